"""Records as data frames: a row a figure, the same figures as in the files."""

import json
import math

import pandas
import pytest

from slimqwen import variant
from slimqwen.records import frame, store
from tests.record_files import write

ROOT = variant.repository_root()
ITEMS = [{"task": "example_facts", "index": n, "item": str(n), "value": float(n % 2)} for n in range(4)]


@pytest.fixture
def repository(tmp_path, add_variant, quality, latency):
    add_variant("a", "VLLM_MODEL=weights/a\n")
    for body in (quality, latency):
        write(tmp_path / "experiments" / "a", body | {"variant": "a"}, ITEMS)
    return tmp_path


@pytest.fixture(scope="module")
def committed():
    return frame.load()


def test_a_figure_is_a_row_with_what_it_is_of(repository):
    loaded = frame.load(repository)
    assert tuple(loaded.columns) == frame.COLUMNS
    (row,) = loaded[loaded.measure == "exact_match"].to_dict("records")
    assert (row["variant"], row["kind"], row["subject"], row["group"]) == (
        "a",
        "quality",
        "example",
        "example_facts",
    )
    assert (row["value"], row["standard_error"], row["unit"]) == (0.5, 0.2, "share")
    assert math.isnan(row["low"])
    assert row["started"] == pandas.Timestamp("2026-01-02T03:04:05Z")
    assert (row["hardware"], row["checkpoint"], row["dirty"]) == ("Example GPU", "ab" * 32, False)
    median = loaded[(loaded.measure == "ttft_ms.median") & (loaded.group == "short")]
    assert (median.value.item(), median.unit.item()) == (100.0, "ms")
    assert not any(loaded[loaded.measure == "ttft_ms.mean"].standard_error.isna())


def test_no_figure_has_two_rows_and_none_is_lost(committed):
    assert not committed.duplicated(["location", "group", "measure"]).any()
    # Those that tell entries of a list apart are in the group.
    labels = {
        "depth",
        "temperature",
        "size",
        "rank",
        "group",
        "context",
        "tokens",
        "step",
        "seed",
        "batch_size",
    }

    def numbers(part, name=""):
        if isinstance(part, dict):
            for key, value in part.items():
                yield from numbers(value, key)
        elif isinstance(part, list):
            for value in part:
                yield from numbers(value, name)
        elif isinstance(part, int | float) and not isinstance(part, bool) and name not in labels:
            yield part

    values = ["value", "standard_error", "low", "high", "count"]
    for place, rows in committed.groupby("location"):
        record = store.read(ROOT / place).as_json()
        if record["schema"].startswith("plan/"):  # the frame has its figures alone, not its settings
            continue
        held = set(rows[values].to_numpy().ravel())
        body = {
            key: part
            for key, part in record.items()
            if key not in ("items", "provenance", "schema", "gpu", "split")
        }
        assert set(numbers(body)) <= held, place


def test_every_committed_record_is_there(committed):
    places = {path.relative_to(ROOT).as_posix() for path in ROOT.glob("experiments/*/*_*.json")}
    assert places <= set(committed.location)
    # Of a quality record the scores are what its file says.
    (path,) = (place for place in places if place.endswith("tiny-awq/quality_2026-11-21T062010Z.json"))
    tasks = json.loads((ROOT / path).read_text())["tasks"]
    scores = committed[
        (committed.location == path) & committed.measure.isin({row["measure"] for row in tasks.values()})
    ]
    assert dict(zip(scores.group, scores.value, strict=True)) == {
        name: row["value"] for name, row in tasks.items()
    }


def test_the_documented_table_shows_the_newest_scores(committed):
    scores = committed[(committed.kind == "quality") & (committed.measure == "exact_match")]
    shown = scores.pivot_table("value", "variant", "group", aggfunc="first")
    newest = max(ROOT.glob("experiments/tiny/quality_*.json"), key=lambda path: path.name)
    task = json.loads(newest.read_text())["tasks"]["tinyworld_facts"]
    assert shown.loc["tiny", "tinyworld_facts"] == task["value"]


def test_intervals_come_along(committed):
    ratio = committed[(committed.kind == "start_up") & (committed.measure == "ready_cold_over_baked")].iloc[0]
    assert ratio.low <= ratio.value <= ratio.high


def test_a_repository_without_records_has_the_columns(tmp_path):
    empty = frame.load(tmp_path)
    assert (len(empty), tuple(empty.columns)) == (0, frame.COLUMNS)
