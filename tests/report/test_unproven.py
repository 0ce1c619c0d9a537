import json

from slimqwen.records import collection
from slimqwen.report import leaderboard, unproven
from slimqwen.report.leaderboard import rows_of
from slimqwen.variant import repository_root

ROOT = repository_root()


def test_each_shipped_variant_of_a_baseline_states_its_claims():
    for file in ROOT.glob("experiments/*/measurements.json"):
        stated = json.loads(file.read_text())
        assert bool(stated.get("claims")) == (stated["baseline"] is not None), file


def claiming(*claims):
    """tiny-best's committed records, with other claims."""
    records = collection.collect(ROOT)
    stated = records.measurements["tiny-best"].model_copy(update={"claims": claims})
    object.__setattr__(records, "measurements", {**records.measurements, "tiny-best": stated})
    return records


def test_what_records_prove_is_not_named():
    records = claiming("speed", "memory", "quality")
    assert unproven.list_unproven(records, rows_of(records, "tiny-best")[0]) == {}


def test_a_timing_whose_interval_contains_one_proves_no_speed(monkeypatch):
    monkeypatch.setattr(leaderboard.Timing, "is_faster", False)
    records = claiming("speed")
    (reason,) = unproven.list_unproven(records, rows_of(records, "tiny-best")[0]).values()
    assert (
        "which is not surely faster; `slimqwen bench latency --variant tiny-best --baseline` measures it"
        in reason
    )


def test_claims_without_records_are_named_with_the_command_that_measures_each():
    records = collection.collect(ROOT)
    named = unproven.list_unproven(records, rows_of(records, "cyankiwi-best")[0])
    assert [*named] == ["speed", "quality"]
    assert "`slimqwen bench latency --variant cyankiwi-best --baseline`" in named["speed"]
    assert "`slimqwen gate --variant cyankiwi-best`" in named["quality"]


def test_a_baseline_claims_nothing():
    records = collection.collect(ROOT)
    assert unproven.list_unproven(records, rows_of(records, "tiny")[0]) == {}
