import json

import pytest

from slimqwen.records import collection
from slimqwen.report import charts, trends
from tests.record_files import host_load

SHORT = "short 31 -> 62"


@pytest.fixture
def timed(add_variant, add_record):
    """Add a latency record of a variant: hour of the day, commit, engine, hardware."""
    add_variant("base", "VLLM_MODEL=weights/base\n")

    def add(hour, commit="a", vllm="0.32.0", cpus=2, data="0", edit=lambda record: None):
        def change(record):
            made = record["provenance"]
            made["ended"] = f"2026-01-01T{hour:02}:00:00Z"
            made["git"] = {"commit": commit * 40, "dirty": False}
            made["packages"]["vllm"] = vllm
            made["hardware"]["cpu_count"] = cpus
            made["datasets"] = {"eval/workloads/classes.yaml": data * 64}
            edit(record)

        return add_record("base", "latency", f"2026-01-01T{hour:02}0000Z", edit=change)

    return add


def observations(tmp_path, name="TTFT, ms"):
    found = trends.trends(collection.collect(tmp_path), "base").get(name, {})
    return next(iter(found.values()), [])


def line_groups(chart):
    """The positions that each line joins, in the first panel."""
    groups = {}
    for value in chart.spec["vconcat"][0]["data"]["values"]:
        groups.setdefault(value["basis"], []).append(int(value["x"].partition("|")[0]))
    return sorted(groups.values())


def test_a_figure_is_followed_from_the_oldest_record_to_the_newest(timed, tmp_path):
    def slow(record):
        for figures in record["classes"].values():
            figures["ttft_ms"] |= {"mean": 40.0, "standard_error": 2.0}

    timed(9, commit="b")
    timed(7, commit="a", edit=slow)
    first, second = observations(tmp_path)

    assert [each.entry.record.provenance.git.commit[0] for each in (first, second)] == ["a", "b"]
    assert first.figure.value == 40
    assert first.interval == pytest.approx((40 - 1.96 * 2, 40 + 1.96 * 2), abs=1e-3)


def test_decoding_speed_is_the_inverse_of_tpot_with_its_interval(timed, tmp_path):
    def of_ten(record):
        for figures in record["classes"].values():
            figures["tpot_ms"] |= {"mean": 10.0, "standard_error": 1.0}

    timed(7, edit=of_ten)
    timed(8, edit=of_ten)
    observation = observations(tmp_path, "Decoding of one sequence, tokens/s")[0]

    assert observation.figure.value == pytest.approx(100)
    assert observation.interval == pytest.approx((1000 / 11.96, 1000 / 8.04), rel=1e-3)


@pytest.mark.parametrize(("is_busy", "count"), [(False, 2), (True, 0)])
def test_a_single_record_or_one_of_a_busy_host_gives_no_trend(timed, tmp_path, is_busy, count):
    def loaded(record):
        record["provenance"]["host_load"] = host_load(busy=is_busy)

    timed(7)
    assert observations(tmp_path) == []
    timed(8, edit=loaded)
    assert len(observations(tmp_path)) == count


@pytest.mark.parametrize("other", [{"cpus": 4}, {"data": "1"}])
def test_a_line_joins_one_kind_of_hardware_and_the_same_data_alone(timed, tmp_path, other):
    for hour, change in ((1, {}), (2, other), (3, {})):
        timed(hour, **change)
    chart = trends.trend_chart("TTFT, ms", {SHORT: observations(tmp_path)})

    assert line_groups(chart) == [[0, 2], [1]]


def test_the_engine_is_named_where_it_changes(timed, tmp_path):
    for hour, vllm in ((1, "0.32.0"), (2, "0.32.0"), (3, "0.33.0")):
        timed(hour, commit="abc"[hour - 1], vllm=vllm)
    chart = trends.trend_chart("TTFT, ms", {SHORT: observations(tmp_path)})

    scale = chart.spec["vconcat"][0]["layer"][0]["encoding"]["x"]["scale"]
    assert scale["domain"] == ["0|aaaaaaa|vLLM 0.32.0", "1|bbbbbbb|", "2|ccccccc|vLLM 0.33.0"]
    charts.draw([chart])
    assert chart.svg.count("vLLM 0.33.0") == chart.svg.count("ccccccc") == 1
    assert [row[:3] for row in chart.rows][2] == (SHORT, "c" * 10, "vLLM 0.33.0")


def test_the_size_has_a_point_for_each_new_checkpoint(timed, tmp_path):
    def grown(record):
        record["provenance"]["checkpoint"] |= {"size_bytes": 5_000_000, "digest": "1" * 64}

    timed(1)
    timed(2)
    timed(3, edit=grown)
    assert [each.figure.value for each in observations(tmp_path, trends.SIZE)][1:] == [5.0]


def test_names_of_hardware_that_differ_in_more_than_their_names_are_numbered(timed, tmp_path):
    def other(record):
        record["provenance"]["hardware"]["cpu_flags"].insert(0, "avx")

    timed(1)
    timed(2, edit=other)
    chart = trends.trend_chart("TTFT, ms", {SHORT: observations(tmp_path)})

    names = [row[4] for row in chart.rows]
    assert names[1] == f"{names[0]} (2)"
    json.dumps(chart.spec)
