"""Whatever lies in experiments/, the good records come back and each bad file is named once."""

import json
import os
import shutil

import pytest

from slimqwen import variant
from slimqwen.records import collection, registry, store
from tests.record_files import example, record_of, write

ITEMS = [{"task": "example_facts", "index": n, "item": str(n), "value": float(n % 2)} for n in range(4)]
ROOT = variant.repository_root()
KINDS = registry.kinds()
QUALITY = "experiments/a/quality_2026-01-02T000000Z.json"
STARTS = "experiments/a/start_up_2026-01-02T000000Z.json"


def stamped(monkeypatch, day):
    monkeypatch.setattr(store, "_stamp", lambda: f"2026-01-0{day}T000000Z")


@pytest.fixture
def repository(tmp_path, add_variant, quality, latency, monkeypatch):
    """Two variants; the first has three records, the second one, and the first has starts, which have no items."""
    for name in ("a", "b"):
        add_variant(name, f"VLLM_MODEL=weights/{name}\n")
    for day in (1, 2):
        stamped(monkeypatch, day)
        write(tmp_path / "experiments" / "a", quality | {"variant": "a"}, ITEMS)
    write(tmp_path / "experiments" / "a", latency | {"variant": "a"}, ITEMS)
    write(tmp_path / "experiments" / "b", quality | {"variant": "b"}, ITEMS)
    started = example("start_up")
    changed = record_of(started, variant="a")
    assert store.write_record(tmp_path / "experiments" / "a", changed) == tmp_path / STARTS
    return tmp_path


def collected(repository):
    result = collection.collect(repository)
    return {stored.location for stored in result.records}, {
        stored.location: stored.reason for stored in result.problems
    }


def test_all_records_are_found_newest_first_by_variant_and_kind(repository):
    result = collection.collect(repository)
    assert result.problems == ()
    assert [stored.location for stored in result.records] == [
        "experiments/a/latency_2026-01-02T000000Z.json",
        QUALITY,
        "experiments/a/quality_2026-01-01T000000Z.json",
        STARTS,
        "experiments/b/quality_2026-01-02T000000Z.json",
    ]
    kinds = [stored.kind for stored in result.records]
    assert kinds == ["latency", "quality", "quality", "start_up", "quality"]
    assert [stored.location for stored in result.select(KINDS["quality"], "a")] == [
        QUALITY,
        "experiments/a/quality_2026-01-01T000000Z.json",
    ]
    assert result.select(KINDS["gate"], "a") == ()
    assert len(result.select(KINDS["quality"])) == 3
    assert list(result.measurements) == ["a", "b"]
    assert result.measurements["a"].hypothesis == "what a shows"
    assert result.select(KINDS["quality"], "b")[0].record == store.read_record(
        result.select(KINDS["quality"], "b")[0].path
    )


def changed(change):
    def damage(path):
        path.write_text(json.dumps(change(json.loads(path.read_text()))))

    return damage


@pytest.mark.parametrize(
    ("damage", "location", "reason"),
    [
        (lambda p: p.write_text(p.read_text()[:-40]), QUALITY, "not JSON"),
        (changed(lambda record: record | {"tasks": None}), QUALITY, "tasks: Input should be"),
        (changed(lambda record: record | {"variant": "b"}), QUALITY, "move it to experiments/b/quality_"),
        (lambda p: shutil.copy(p.with_name(p.name.replace("quality", "latency")), p), QUALITY, "holds latency of a"),
        (lambda p: shutil.copytree(p.parent.parent / "b", p.parent / "b"), "experiments/a/b/config.env", "subfolder"),
        (lambda p: (p.unlink(), p.symlink_to("/nowhere")), QUALITY, "not a plain file"),
        (lambda p: (p.unlink(), os.mkfifo(p)), QUALITY, "not a plain file"),
        (lambda p: p.with_suffix(".items.jsonl").unlink(), QUALITY, "are missing"),
        (lambda p: p.unlink(), QUALITY.replace(".json", ".items.jsonl"), "belongs to no record"),
        (lambda p: p.with_name("notes.txt").touch(), "experiments/a/notes.txt", "belongs to no record"),
        (lambda p: p.with_name("sweep.svg").touch(), "experiments/a/sweep.svg", "belongs to no record"),
        (lambda p: p.with_name(".quality.json.x1").touch(), "experiments/a/.quality.json.x1", "an interrupted run"),
        (lambda p: p.with_name("measurements.json").write_text("{"), "experiments/a/measurements.json", "not JSON"),
        (lambda p: p.with_name("measurements.json").unlink(), "experiments/a/measurements.json", "missing"),
        (lambda p: p.with_name("config.env").unlink(), "experiments/a", "no config.env"),
        (lambda p: (p.parent.parent / "loose.json").touch(), "experiments/loose.json", "belongs to no variant"),
    ],
)  # fmt: skip
def test_each_bad_file_is_named_once_and_the_rest_is_there(repository, damage, location, reason):
    whole = collected(repository)[0]
    damage(repository / QUALITY)
    good, problems = collected(repository)
    assert reason in problems[location]
    assert "\n" not in problems[location]
    within = f"{location.rpartition('/')[0]}/" if "subfolder" in reason else location
    assert {one for one in problems if not one.startswith(within)} == set()
    lost = {one for one in whole if one.startswith("experiments/a/")}
    assert whole - good <= (lost if location == "experiments/a" else {QUALITY})


@pytest.mark.parametrize(
    ("name", "content", "reason"),
    [
        (STARTS.replace("/a/", "/b/"), {"variant": "nobody"}, "which experiments/ does not have"),
        (STARTS.replace("/a/", "/b/"), {"variant": "a"}, f"does not say; move it to {STARTS}"),
        (STARTS.replace("start_up", "other"), {}, "its name or its folder does not say"),
        (STARTS.replace("/a/", "/b/"), {"variant": "b", "cold": []}, "cold"),
        (
            STARTS.replace("/a/", "/b/"),
            {"variant": "b", "schema": "start_up/7"},
            "this checkout has start_up/2",
        ),
    ],
)
def test_a_foreign_record_is_named(repository, name, content, reason):
    record = json.loads((repository / STARTS).read_text())
    (repository / name).parent.mkdir(exist_ok=True)
    (repository / name).write_text(json.dumps(record | content))
    good, problems = collected(repository)
    assert list(problems) == [name]
    assert reason in problems[name]
    assert STARTS in good


@pytest.mark.parametrize(("baseline", "wrong"), [("nobody", "'nobody' is no variant"), ("b", "is itself")])
def test_claims_against_a_baseline_that_is_not_there_are_left_out(repository, baseline, wrong):
    file = repository / "experiments" / "b" / "measurements.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | {"baseline": baseline}))
    good, problems = collected(repository)
    assert wrong in problems["experiments/b/measurements.json"]
    assert len(problems) == 1
    assert "b" not in collection.collect(repository).measurements
    assert "experiments/b/quality_2026-01-02T000000Z.json" in good


def test_a_cited_record_that_is_gone_is_named_with_who_cites_it(repository):
    file = repository / "experiments" / "a" / "measurements.json"
    claims = json.loads(file.read_text())
    file.write_text(
        json.dumps(claims | {"records": ["quality_2026-01-02T000000Z.json", "quality_gone.json"]})
    )
    assert collected(repository)[1] == {
        "experiments/a/quality_gone.json": (
            "missing, but experiments/a/measurements.json cites it; restore the file, or remove the citation"
        )
    }


def test_a_gate_s_missing_witness_is_named(repository, quality):
    verdicts = dict.fromkeys(("fidelity", "acceptance", "quality", "engine"), "pass")
    gate = {
        "schema": "gate/1", "variant": "b", "baseline": "a", "plan": "x", "verdict": "pass", "verdicts": verdicts,
        "records": ["a/quality_2026-01-02T000000Z.json", "b/fidelity_2026-01-02T000000Z.json"],
        "provenance": quality["provenance"],
    }  # fmt: skip
    path = write(repository / "experiments" / "b", gate, [{"figure": 1}])
    good, problems = collected(repository)
    assert f"experiments/b/{path.name}" in good
    assert list(problems) == ["experiments/b/fidelity_2026-01-02T000000Z.json"]
    assert path.name in problems["experiments/b/fidelity_2026-01-02T000000Z.json"]


@pytest.mark.skipif(os.geteuid() == 0, reason="root reads everything")
def test_an_unreadable_file_is_named(repository):
    (repository / QUALITY).chmod(0)
    assert "denied" in collected(repository)[1][QUALITY]


def test_a_plot_belongs_to_the_record_beside_it(repository):
    (repository / QUALITY).with_suffix(".svg").touch()
    assert not collected(repository)[1]
