"""Which records of two variants are compared, with stored records that differ in what pairs them."""

import pytest

from slimqwen.bench.latency import Latency
from slimqwen.records import pairing, store
from slimqwen.records.pairing import NotComparableError
from tests.record_files import host_load, record_of, write


@pytest.fixture
def keep(tmp_path, latency, monkeypatch):
    """Write a latency record of a variant: hour of its end, run, length of its context, whether the host was busy."""

    def add(name, hour, run="", context=2048, is_busy=False, **hardware):
        monkeypatch.setattr(store, "_stamp", lambda: f"2026-01-01T{hour:02}0000Z")
        made = latency["provenance"] | {"ended": f"2026-01-01T{hour:02}:00:00Z"}
        made["hardware"] = made["hardware"] | hardware
        if is_busy:
            made["host_load"] = host_load(busy=True)
        changes = {
            "variant": name,
            "run": run or f"{name} {hour}",
            "max_model_len": context,
            "workload": f"of {context}",
            "provenance": made,
        }
        folder = tmp_path / "experiments" / name
        folder.mkdir(parents=True, exist_ok=True)
        (folder / "config.env").touch()
        return write(folder, latency | changes, [{"class": "short"}])

    return add


@pytest.fixture
def pair(tmp_path):
    def find(**options):
        folders = [tmp_path / "experiments" / name for name in ("first", "second")]
        return pairing.newest_pair(*folders, Latency, lambda name, like: f"time {name}", **options)

    return find


def test_the_newest_records_that_fit_are_a_pair(keep, pair):
    keep("first", 1)
    expected = keep("first", 3), keep("second", 4)
    keep("second", 2)
    keep("second", 5, context=1)
    assert pair() == expected


def test_records_measured_in_turns_go_before_newer_ones(keep, pair):
    expected = keep("first", 1, run="turns"), keep("second", 1, run="turns")
    keep("first", 3)
    keep("second", 3)
    assert pair() == expected


def test_records_of_a_busy_host_or_against_the_condition_are_in_no_pair(keep, pair):
    expected = keep("first", 1), keep("second", 1)
    keep("first", 2, is_busy=True)
    keep("second", 2, is_busy=True)
    keep("first", 3, context=9)
    keep("second", 3, context=9)
    assert pair(condition=lambda record: record.max_model_len != 9) == expected


def test_where_none_fit_the_difference_of_the_newest_and_the_cure_are_named(keep, pair):
    keep("first", 1, context=1)
    keep("first", 2)
    keep("second", 2, context=1024)
    keep("second", 1, context=1023)
    with pytest.raises(NotComparableError) as error:
        pair(condition=lambda record: record.max_model_len != 1)
    assert "differ in workload (of 2048 and of 1024); run `time second` for a record that fits" in str(
        error.value
    )


def test_records_of_a_busy_host_are_refused_by_name(keep):
    quiet, busy = (store.read_record(keep("first", hour, is_busy=hour == 2), Latency) for hour in (1, 2))
    pairing.require_quiet(quiet, quiet)
    with pytest.raises(
        NotComparableError,
        match="latency record of first of 2026-01-01T02:00:00Z was measured on a busy host; measure again",
    ):
        pairing.require_quiet(quiet, busy)


def test_only_values_that_fit_a_line_are_shown(tmp_path):
    files = tmp_path / "a" / "x.json", tmp_path / "b" / "y.json"
    with pytest.raises(NotComparableError) as error:
        pairing.require_same(
            *files, {"n": 1, "lengths": [1], "gone": "x"}, {"n": 2, "lengths": [2], "new": 3}, ""
        )
    said = "a/x.json and b/y.json differ in gone (x and None), lengths, n (1 and 2), new; measure both again"
    assert str(error.value) == said
    pairing.require_same(*files, {"n": 1}, {"n": 1}, "")


def test_memory_alone_makes_no_other_hardware(latency):
    hardware = record_of(latency).provenance.hardware
    more = hardware.model_copy(update={"memory_bytes": 1})
    slower = hardware.model_copy(update={"cpu_count": 1})
    assert more.basis == hardware.basis != slower.basis
