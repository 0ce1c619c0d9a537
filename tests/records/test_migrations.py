"""Records of every age read as if they had been written today, and what nobody knows stays unknown."""

import json

import pytest

from slimqwen import variant
from slimqwen.evals import gate, quality_comparison
from slimqwen.evals.quality import Quality
from slimqwen.records import migrations, store

ROOT = variant.repository_root()
EARLY = ROOT / "experiments" / "tiny" / "quality_2026-11-21T092542Z.json"
LATE = ROOT / "experiments" / "tiny-best" / "quality_2026-11-21T141537Z.json"

RENAMED = {"rules": "system_prompt"}


def committed(kind):
    return sorted(ROOT.glob(f"experiments/*/{kind}_*.json"))


@pytest.mark.parametrize(
    "path", [*committed("*"), *sorted(ROOT.glob("results/**/*.json"))], ids=lambda p: p.stem
)
def test_every_committed_record_is_read_in_the_present_form_and_keeps_its_figures(path):
    on_disk = json.loads(path.read_text())
    record = store.read(path)
    read = record.as_json()
    assert on_disk["schema"].partition("/")[0] == record.kind
    assert read["schema"] == record.present_schema()
    assert read["provenance"]["schema"] == "provenance/3"

    def kept(old, new):
        if isinstance(old, dict):
            assert all(
                kept(value, new[RENAMED.get(key, key)]) for key, value in old.items() if key != "schema"
            )
            return True
        # Older records in results/ name a checkpoint by its digest alone, and one has questions of a single length.
        return old == new or new in ({"digest": old}, {"chat": old, "completion": old})

    assert kept(on_disk, read)
    assert store.validate(read, "again") == record


def test_a_quality_record_from_before_chats_gets_what_was_so_then():
    on_disk, read = json.loads(EARLY.read_text()), store.read(EARLY, Quality)
    assert on_disk["schema"] == "quality/1"
    assert "endpoint" not in on_disk
    assert (read.schema_, read.endpoint, read.answers_of_earlier_run) == ("quality/2", "completions", 0)
    for score in read.tasks.values():
        assert (score.cluster_count, score.settings) == (score.item_count, {})
        assert (score.items_to_decide, score.output_count, score.output_tokens) == (None, None, None)


def test_a_later_quality_1_keeps_what_it_has():
    on_disk, read = json.loads(LATE.read_text()), store.read(LATE, Quality)
    assert on_disk["schema"] == "quality/1"
    assert read.answers_of_earlier_run == 2960
    assert read.tasks["tinyworld_facts"].output_tokens.as_json() == {"mean": 2.017, "p50": 2.0, "max": 12}
    assert read.tasks["tinyworld_facts"].settings == {}


def test_records_from_before_and_after_stand_on_the_same_items():
    rows = quality_comparison.compare(EARLY, LATE)
    assert [row.task for row in rows][:1] == ["tinyworld_facts"]


def test_the_gate_finds_a_record_from_before_chats(monkeypatch):
    tiny, early = variant.load("tiny"), json.loads(EARLY.read_text())["provenance"]["ended"]
    monkeypatch.setattr(gate, "_is_still_valid", lambda record, variant: record.provenance.ended == early)
    assert gate.find_reusable(tiny, Quality, suite="tinyworld", limit=None, endpoint="completions") == EARLY
    assert gate.find_reusable(tiny, Quality, suite="tinyworld", limit=None, endpoint="chat") is None


@pytest.mark.parametrize(
    ("block", "threads"),
    [
        ({"environment": {"OMP_NUM_THREADS": "2"}}, 2),
        ({"environment": {}}, None),
        ({}, None),
        ({"checkpoint": {"path": "weights/x", "digest": "d" * 64, "size_bytes": 1}}, None),
        ({"environment": {"OMP_NUM_THREADS": "2"}, "threads": 3}, 3),
    ],
)
def test_threads_of_old_records_are_those_of_the_server_s_environment(block, threads):
    present = migrations.to_present({"schema": "x/1", "provenance": block})
    assert present["provenance"] == {**block, "schema": "provenance/3", "threads": threads}


def test_a_present_record_is_left_as_it_is(quality):
    assert migrations.to_present(quality) == quality
    assert migrations.to_present({"schema": "unknown/7"}) == {"schema": "unknown/7"}


@pytest.mark.parametrize(
    "schema", [None, 7, "", "quality", "quality/", "/1", "quality/one", "quality/-1", "quality/0x2"]
)
def test_a_schema_without_a_version_is_refused(schema):
    with pytest.raises(migrations.MigrationError, match="no <kind>/<version>"):
        migrations.to_present({"schema": schema})


@pytest.mark.parametrize("tasks", [None, 3, [], {"a": 3}, {"a": {}}])
def test_an_old_record_that_is_not_of_its_form_is_refused_in_one_line(tasks):
    with pytest.raises(migrations.MigrationError, match="not what quality/1 has"):
        migrations.to_present({"schema": "quality/1", "tasks": tasks})
