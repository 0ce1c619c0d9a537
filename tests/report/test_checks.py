"""Checks pass a sound repository and name each fault by its file."""

import json
import shutil
import subprocess

import pytest

from slimqwen import checkpoint, variant
from slimqwen.checkpoint import Manifest
from slimqwen.checkpoint.files import file_records
from slimqwen.evals.quality import Quality
from slimqwen.records import store
from slimqwen.report import checks, markdown
from tests import record_files
from tests.record_files import example as example_of

ROOT = variant.repository_root()
ITEMS = [{"task": task, "index": n, "item": str(n), "value": float(n % 2), "weight": 1.0}
         for task in ("example_facts", "example_prose") for n in range(4)]  # fmt: skip
TIMES = [
    {"class": "short", "error": None, "ttft_ms": 100.0, "tpot_ms": 10.0, "itl_ms": [10.0], "e2el_ms": 250.0}
] * 4
STAMP = "2026-01-02T000000Z"
STARTS = f"experiments/a/start_up_{STAMP}.json"


def git(root, *words):
    identity = ("-c", "user.name=x", "-c", "user.email=x@example.org")
    subprocess.run(["git", "-C", str(root), *identity, *words], check=True, capture_output=True)


def measured(root, name, kind, items, **changes):
    body = example_of(kind) | {"variant": name} | changes
    body["provenance"]["checkpoint"]["digest"] = checkpoint.digest(root / "weights" / name)
    path = record_files.write(root / "experiments" / name, body, items)
    cite(root, name, path.name)
    return path


def cite(root, name, *records):
    file = root / "experiments" / name / "measurements.json"
    claims = json.loads(file.read_text())
    file.write_text(json.dumps(claims | {"records": sorted({*claims["records"], *records})}))


@pytest.fixture
def repository(tmp_path, add_variant, monkeypatch):
    """Two variants with weights, cited records, a README with tables, starts without items; all committed."""
    monkeypatch.setattr(store, "_stamp", lambda: STAMP)
    for name, baseline in (("a", None), ("b", "a")):
        add_variant(name, f"VLLM_MODEL=weights/{name}\n", baseline=baseline)
        (tmp_path / "weights" / name).mkdir(parents=True)
        (tmp_path / "weights" / name / "config.json").write_text(json.dumps({"of": name}))
        measured(tmp_path, name, "quality", ITEMS)
        measured(tmp_path, name, "latency", TIMES)
    started = example_of("start_up")
    record_files.write(tmp_path / "experiments" / "a", started | {"variant": "a"})
    (tmp_path / "README.md").write_text(
        f"# All\n\n<!-- table:comparison a b -->\n<!-- end -->\n\nA start: {STARTS}.\n"
    )
    markdown.update_tables(tmp_path)
    git(tmp_path, "init")
    git(tmp_path, "add", "experiments", "README.md")
    git(tmp_path, "commit", "-m", "records")
    return tmp_path


@pytest.fixture
def quality(repository):
    return repository / "experiments" / "b" / f"quality_{STAMP}.json"


def faults(root):
    return {(fault.location, fault.fault) for fault in checks.check_records(root).faults}


def the_fault(root):
    (fault,) = checks.check_records(root).faults
    assert fault.cure
    return fault


def test_a_sound_repository_has_no_fault(repository):
    result = checks.check_records(repository)
    assert (result.faults, result.notes, result.records) == ((), (), 5)


def test_every_committed_record_and_table_of_this_repository_is_sound():
    assert checks.check_records(ROOT).faults == ()


def test_each_bad_file_is_named_and_the_others_are_checked_all_the_same(repository, quality):
    quality.write_text(quality.read_text()[:-40])
    exploration = repository / STARTS
    exploration.write_text(exploration.read_text().replace('"cold"', '"hot"'))
    (quality.parent / "notes.txt").touch()
    items = repository / "experiments" / "a" / f"quality_{STAMP}.items.jsonl"
    items.write_text("{}\n")
    result = checks.check_records(repository).faults
    assert {fault.location for fault in result} == {
        "README.md",  # its table needs the damaged record
        "experiments/b/notes.txt",
        f"experiments/b/{quality.name}",
        f"experiments/a/{items.name}",
        STARTS,
    }
    assert all(fault.fault and fault.cure and "\n" not in fault.fault for fault in result)


def test_a_copied_record_is_named(repository, quality):
    shutil.copy(quality, quality.with_name("quality_2027-01-01T000000Z.json"))
    reasons = dict(faults(repository))
    assert "copied or renamed" in reasons["experiments/b/quality_2027-01-01T000000Z.json"]


def test_a_cited_record_of_another_checkpoint_is_a_fault_and_one_that_is_not_cited_is_none(repository, claim):
    (repository / "weights" / "b" / "config.json").write_text('{"of": "b, made anew"}')
    result = checks.check_records(repository).faults
    assert {fault.location for fault in result} == {
        f"experiments/b/{kind}_{STAMP}.json" for kind in ("quality", "latency")
    }
    assert all("checkpoint" in fault.fault and "measurements.json" in fault.cure for fault in result)
    claim("b", records=[])
    assert all(
        "no table, measurements.json or Markdown page" in fault.fault
        for fault in checks.check_records(repository).faults
    )


@pytest.fixture
def remade(repository):
    """Make b anew by a recipe, with other bytes; its cited records have this recipe key."""

    def remake(recorded, present):
        folder = repository / "weights" / "b"
        (folder / "config.json").write_text('{"of": "b, made on another kind of CPU"}')
        Manifest(
            stage="calibrate", recipe_key=present, files=file_records(folder),
            wall_seconds=1, peak_memory_bytes=1, versions={},
        ).write(folder)  # fmt: skip
        for file in (repository / "experiments" / "b").glob(f"*_{STAMP}.json"):
            record = json.loads(file.read_text())
            record["provenance"]["checkpoint"]["recipe_key"] = recorded
            file.write_text(json.dumps(record))
        git(repository, "commit", "-a", "--amend", "--no-edit")
        return checks.check_records(repository)

    return remake


@pytest.mark.parametrize(("recorded", "build"), [("1" * 64, "another build"), (None, "an unknown build")])
def test_a_cited_record_of_another_build_is_a_note(remade, recorded, build):
    result = remade(recorded, "1" * 64)
    assert result.faults == ()
    assert result.notes == (f"Measured on {build} of b: latency_{STAMP}.json, quality_{STAMP}.json.",)


def test_a_cited_record_of_another_recipe_is_a_fault(remade):
    assert {fault.location for fault in remade("1" * 64, "2" * 64).faults} == {
        f"experiments/b/{kind}_{STAMP}.json" for kind in ("quality", "latency")
    }


def test_absent_weights_are_a_note(repository):
    shutil.rmtree(repository / "weights" / "b")
    result = checks.check_records(repository)
    assert result.faults == ()
    assert any("not on this machine" in note and note.rstrip(".").endswith("b") for note in result.notes)


def test_a_table_that_differs_is_a_fault_and_a_bad_one_does_not_hide_the_next(repository):
    readme = repository / "README.md"
    readme.write_text(readme.read_text().replace("0.500", "0.501", 1))
    (repository / "experiments" / "a" / "README.md").write_text("<!-- table:nonsense -->\n<!-- end -->\n")
    (repository / "experiments" / "b" / "README.md").write_bytes(b"\xff\xfe")
    reasons = dict(faults(repository))
    assert "differs" in reasons["README.md"]
    assert "there is no table" in reasons["experiments/a/README.md"]
    assert "UTF-8" in reasons["experiments/b/README.md"]


def test_a_record_that_was_changed_since_its_commit_is_a_fault(repository, quality):
    quality.write_text(quality.read_text().replace('"item_count": 4', '"item_count": 5'))
    result = {fault.location: fault for fault in checks.check_records(repository).faults}
    assert "never change" in result[f"experiments/b/{quality.name}"].fault
    assert f" -- experiments/b/{quality.name}`" in result[f"experiments/b/{quality.name}"].cure
    git(repository, "commit", "-a", "-m", "polish")
    assert f"experiments/b/{quality.name}" in {location for location, _ in faults(repository)}


def test_an_exploration_that_was_edited_is_a_fault_since_the_commit_that_is_named(repository):
    file = repository / STARTS
    file.write_text(file.read_text().replace('"ready_seconds": 125.56', '"ready_seconds": 225.56'))
    assert (the_fault(repository).location, "never change" in the_fault(repository).fault) == (STARTS, True)
    git(repository, "commit", "-a", "-m", "better figures")
    assert "changed since" in the_fault(repository).fault
    git(repository, "commit", "--allow-empty", "-m", "later")
    assert checks.check_records(repository).faults == ()
    assert checks.check_records(repository, "HEAD~2").faults
    assert checks.check_records(repository, "HEAD~1").faults == ()


def test_a_record_rewritten_for_a_new_schema_is_no_fault(repository, monkeypatch, quality):
    monkeypatch.setattr(Quality, "version", Quality.version + 1)
    for file in (quality, repository / "experiments" / "a" / quality.name):
        file.write_text(
            file.read_text().replace(f'"quality/{Quality.version - 1}"', f'"quality/{Quality.version}"')
        )
    assert checks.check_records(repository).faults == ()


def test_git_holds_the_records_that_something_cites(repository, monkeypatch):
    monkeypatch.setattr(store, "_stamp", lambda: "2026-01-03T000000Z")
    measured(repository, "a", "latency", TIMES, workload="context")
    assert checks.check_records(repository).faults == ()
    git(repository, "add", "-f", "experiments")
    git(repository, "commit", "-m", "more")
    assert checks.check_records(repository).faults == ()
    own = repository / "experiments" / "a" / "measurements.json"
    own.write_text(json.dumps(json.loads(own.read_text()) | {"records": []}))
    uncited = "experiments/a/latency_2026-01-03T000000Z.json"
    assert (uncited, True) in {
        (fault.location, "in git" in fault.fault) for fault in checks.check_records(repository).faults
    }
    git(repository, "rm", "--cached", "-q", uncited, uncited.replace(".json", ".items.jsonl"))
    assert uncited not in {fault.location for fault in checks.check_records(repository).faults}


def test_without_git_there_is_a_note(repository):
    shutil.rmtree(repository / ".git")
    result = checks.check_records(repository)
    assert result.faults == ()
    assert any("git failed" in note for note in result.notes)


def test_a_branch_is_compared_with_where_it_left_the_main_branch(repository, quality):
    git(repository, "update-ref", "refs/remotes/origin/main", "HEAD")
    quality.write_text(quality.read_text() + "\n")
    git(repository, "commit", "-a", "-m", "polish")
    git(repository, "commit", "--allow-empty", "-m", "more work")
    fault = the_fault(repository)
    assert (fault.location, "changed since" in fault.fault) == (f"experiments/b/{quality.name}", True)
    assert checks.check_records(repository, "HEAD").faults == ()
