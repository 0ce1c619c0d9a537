"""`make check-records` passes what is sound and names each fault by its file."""

import json
import shutil
import subprocess
import sys

import pytest

from slimqwen import checkpoint, variant
from slimqwen.records import results, store, withdrawals
from slimqwen.report import checks, tables
from tests.records.conftest import example

ROOT = variant.repository_root()
ITEMS = [{"task": task, "index": n, "item": str(n), "value": float(n % 2), "weight": 1.0}
         for task in ("example_facts", "example_prose") for n in range(4)]  # fmt: skip
TIMES = [
    {"class": "short", "error": None, "ttft_ms": 100.0, "tpot_ms": 10.0, "itl_ms": [10.0], "e2el_ms": 250.0}
] * 4
STAMP = "2026-01-02T000000Z"
STARTS = "results/start_up_a_2026-11-21T143244Z.json"


def git(root, *words):
    identity = ("-c", "user.name=x", "-c", "user.email=x@example.org")
    subprocess.run(["git", "-C", str(root), *identity, *words], check=True, capture_output=True)


def measured(root, name, kind, items, **changes):
    body = example(kind) | {"variant": name} | changes
    body["provenance"]["checkpoint"]["digest"] = checkpoint.digest(root / "weights" / name)
    path = store.write(root / "experiments" / name, body, items)
    cite(root, name, path.name)
    return path


def cite(root, name, *records):
    file = root / "experiments" / name / "measurements.json"
    claims = json.loads(file.read_text())
    file.write_text(json.dumps(claims | {"records": sorted({*claims["records"], *records})}))


@pytest.fixture
def repository(tmp_path, add_variant, monkeypatch):
    """Two variants with weights, cited records, a README with tables, an exploration; all committed."""
    monkeypatch.setattr(store, "_stamp", lambda: STAMP)
    for name, baseline in (("a", None), ("b", "a")):
        add_variant(name, f"VLLM_MODEL=weights/{name}\n", baseline=baseline)
        (tmp_path / "weights" / name).mkdir(parents=True)
        (tmp_path / "weights" / name / "config.json").write_text(json.dumps({"of": name}))
        measured(tmp_path, name, "quality", ITEMS)
        measured(tmp_path, name, "latency", TIMES)
    results.add(tmp_path, store.read(ROOT / STARTS.replace("_a_", "_tiny-best_")) | {"variant": "a"})
    (tmp_path / "README.md").write_text("# All\n\n<!-- table:comparison a b -->\n<!-- end -->\n\nText.\n")
    for file, fresh in tables.outdated(tmp_path).items():
        file.write_text(fresh)
    git(tmp_path, "init")
    git(tmp_path, "add", "experiments", "results", "README.md")
    git(tmp_path, "commit", "-m", "records")
    return tmp_path


@pytest.fixture
def quality(repository):
    return repository / "experiments" / "b" / f"quality_{STAMP}.json"


def faults(root):
    return {(fault.place, fault.wrong) for fault in checks.check(root).faults}


def the_fault(root):
    (fault,) = checks.check(root).faults
    assert fault.cure
    return fault


def test_a_sound_repository_has_no_fault(repository):
    found = checks.check(repository)
    assert (found.faults, found.notes, found.records) == ((), (), 5)


def test_every_committed_record_and_table_of_this_repository_is_sound():
    # Weights that are not committed are this machine's own, and another kind of CPU makes other ones.
    committed = [
        fault
        for fault in checks.check(ROOT).faults
        if not fault.wrong.startswith("of checkpoint") or fault.place.startswith("experiments/tiny/")
    ]
    assert committed == []


def test_each_bad_file_is_named_and_the_others_are_checked_all_the_same(repository, quality):
    quality.write_text(quality.read_text()[:-40])
    exploration = repository / STARTS
    exploration.write_text(exploration.read_text().replace('"cold"', '"hot"'))
    (quality.parent / "notes.txt").touch()
    items = repository / "experiments" / "a" / f"quality_{STAMP}.items.jsonl"
    items.write_text("{}\n")
    found = checks.check(repository).faults
    assert {fault.place for fault in found} == {
        "README.md",  # its table needs the damaged record
        "experiments/b/notes.txt",
        f"experiments/b/{quality.name}",
        f"experiments/a/{items.name}",
        STARTS,
    }
    assert all(fault.wrong and fault.cure and "\n" not in fault.wrong for fault in found)


@pytest.mark.parametrize(
    ("damage", "wrong"),
    [
        (lambda p: p.write_text(p.read_text().replace('"value": 1.0', '"value": 0.0')), "not the items"),
        (lambda p: p.write_text(p.read_text() + "{}\n"), "not the items"),
        (lambda p: p.write_bytes(b""), "not the items"),
    ],
)
def test_items_are_held_against_their_digest(repository, quality, damage, wrong):
    damage(quality.with_suffix(".items.jsonl"))
    place = f"experiments/b/quality_{STAMP}.items.jsonl"
    assert any(at == place and wrong in told for at, told in faults(repository))


def test_a_copied_record_is_named(repository, quality):
    shutil.copy(quality, quality.with_name("quality_2027-01-01T000000Z.json"))
    told = dict(faults(repository))
    assert "copied or renamed" in told["experiments/b/quality_2027-01-01T000000Z.json"]
    assert "differs" in told["README.md"]  # for it shows the newest


def test_a_cited_record_of_another_checkpoint_is_a_fault_and_one_that_is_not_cited_is_none(
    repository, quality
):
    (repository / "weights" / "b" / "config.json").write_text('{"of": "b, made anew"}')
    found = checks.check(repository).faults
    assert {fault.place for fault in found} == {
        f"experiments/b/{kind}_{STAMP}.json" for kind in ("quality", "latency")
    }
    assert all("checkpoint" in fault.wrong and "measurements.json" in fault.cure for fault in found)
    file = quality.with_name("measurements.json")
    file.write_text(json.dumps(json.loads(file.read_text()) | {"records": []}))
    assert checks.check(repository).faults == ()


def test_absent_weights_are_a_note(repository):
    shutil.rmtree(repository / "weights" / "b")
    found = checks.check(repository)
    assert found.faults == ()
    assert any("not on this machine" in note and note.rstrip(".").endswith("b") for note in found.notes)


def test_a_cited_record_that_is_gone_is_a_fault(repository):
    cite(repository, "b", "quality_2020-01-01T000000Z.json")
    fault = the_fault(repository)
    assert fault.place == "experiments/b/quality_2020-01-01T000000Z.json"
    assert "measurements.json rests on it" in fault.wrong


def test_a_table_that_differs_is_a_fault_and_a_bad_one_does_not_hide_the_next(repository):
    readme = repository / "README.md"
    readme.write_text(readme.read_text().replace("0.500", "0.501", 1))
    (repository / "experiments" / "a" / "README.md").write_text("<!-- table:nonsense -->\n<!-- end -->\n")
    (repository / "experiments" / "b" / "README.md").write_bytes(b"\xff\xfe")
    told = dict(faults(repository))
    assert "differs" in told["README.md"]
    assert "no table" in told["experiments/a/README.md"]
    assert "UTF-8" in told["experiments/b/README.md"]


def test_a_claim_that_no_measurement_gives_is_named_with_its_line(repository):
    (repository / "experiments" / "b" / "README.md").write_text(
        "# b\n\nIt is 1.00x as fast.\n\nIt is 7.5x as fast.\n"
    )
    fault = the_fault(repository)
    assert fault.place == "experiments/b/README.md:5"
    assert "'7.5x as fast.'" in fault.wrong


def test_a_record_that_was_changed_since_its_commit_is_a_fault(repository, quality):
    quality.write_text(quality.read_text().replace('"item_count": 4', '"item_count": 5'))
    found = {fault.place: fault for fault in checks.check(repository).faults}
    assert "never changed" in found[f"experiments/b/{quality.name}"].wrong
    assert found[f"experiments/b/{quality.name}"].cure.startswith(
        "`git checkout HEAD -- experiments/b/quality"
    )


def test_a_record_that_was_deleted_is_a_fault_even_when_the_deletion_was_committed(repository, quality):
    claims = quality.with_name("measurements.json")
    claims.write_text(json.dumps(json.loads(claims.read_text()) | {"records": []}))
    (repository / "README.md").write_text("# All\n")
    kept = quality.read_bytes(), quality.with_suffix(".items.jsonl").read_bytes()
    for file in (quality, quality.with_suffix(".items.jsonl")):
        file.unlink()
    places = {f"experiments/b/{quality.name}", f"experiments/b/quality_{STAMP}.items.jsonl"}
    assert {place for place, wrong in faults(repository) if "gone, and git has it" in wrong} == places
    git(repository, "commit", "-a", "-m", "tidy")
    found = checks.check(repository).faults
    assert {fault.place for fault in found} == places
    assert all("taken away by commit" in fault.wrong for fault in found)
    # The cure works, and what was brought back is no fault.
    subprocess.run(found[0].cure.strip("`").split(), cwd=repository, check=True)
    subprocess.run(found[1].cure.strip("`").split(), cwd=repository, check=True)
    assert (quality.read_bytes(), quality.with_suffix(".items.jsonl").read_bytes()) == kept
    git(repository, "commit", "-a", "-m", "back")
    assert checks.check(repository).faults == ()


def test_a_committed_change_of_a_record_is_a_fault(repository, quality):
    quality.write_text(quality.read_text() + "\n")
    git(repository, "commit", "-a", "-m", "polish")
    fault = the_fault(repository)
    assert fault.place == f"experiments/b/{quality.name}"
    assert "changed by commit" in fault.wrong


def test_an_exploration_is_made_again_beside_itself_and_neither_edited_nor_deleted(repository):
    file = repository / STARTS
    committed = file.read_text()
    again = json.loads(committed)
    again["provenance"]["ended"] = "2027-01-01T00:00:00Z"
    results.add(repository, again)
    assert checks.check(repository).faults == ()
    file.write_text(committed.replace('"ready_seconds": 125.56', '"ready_seconds": 225.56'))
    assert (the_fault(repository).place, "never changed" in the_fault(repository).wrong) == (STARTS, True)
    git(repository, "commit", "-a", "-m", "better figures")
    assert "changed by commit" in the_fault(repository).wrong
    file.unlink()
    git(repository, "commit", "-a", "-m", "none")
    assert "taken away by commit" in the_fault(repository).wrong


def test_a_new_record_is_no_fault_before_and_after_its_commit(repository, monkeypatch):
    monkeypatch.setattr(store, "_stamp", lambda: "2026-01-03T000000Z")
    measured(repository, "a", "latency", TIMES, workload="context")
    assert checks.check(repository).faults == ()
    git(repository, "add", "experiments")
    git(repository, "commit", "-m", "more")
    assert checks.check(repository).faults == ()


def withdraw(root, **reasons):
    file = root / withdrawals.PLACE
    file.write_text(json.dumps(reasons))
    return file


def test_a_record_may_be_gone_where_the_list_of_the_withdrawn_has_a_reason_for_it(repository, quality):
    claims = quality.with_name("measurements.json")
    claims.write_text(json.dumps(json.loads(claims.read_text()) | {"records": []}))
    (repository / "README.md").write_text("# All\n")
    place = f"experiments/b/{quality.name}"
    withdraw(repository, **{place: "names a machine", STARTS: "of a machine that throttled"})
    told = {fault.place: fault for fault in checks.check(repository).faults}
    assert told.keys() == {place, STARTS}
    assert all("withdrawn by results/withdrawn.yaml, and there" in one.wrong for one in told.values())
    for file in (quality, quality.with_suffix(".items.jsonl"), repository / STARTS):
        file.unlink()
    sound = 3, (), ("2 records are withdrawn; results/withdrawn.yaml says why.",)
    found = checks.check(repository)
    assert (found.records, found.faults, found.notes) == sound
    git(repository, "add", "results")
    git(repository, "commit", "-a", "-m", "withdrawn")
    found = checks.check(repository)
    assert (found.records, found.faults, found.notes) == sound


def test_what_is_withdrawn_was_committed_and_has_a_reason(repository):
    withdraw(repository, **{"results/soak_a_2026-01-01T000000Z.json": "never was"})
    assert (
        "withdraws results/soak_a_2026-01-01T000000Z.json, which git never had" in the_fault(repository).wrong
    )
    for reasons in ({STARTS: " "}, {STARTS: None}, [STARTS]):
        (repository / withdrawals.PLACE).write_text(json.dumps(reasons))
        assert (the_fault(repository).place, "no mapping" in the_fault(repository).wrong) == (
            withdrawals.PLACE,
            True,
        )
    (repository / withdrawals.PLACE).write_text("# none\n")
    assert checks.check(repository).faults == ()


def test_without_git_there_is_a_note(repository):
    shutil.rmtree(repository / ".git")
    found = checks.check(repository)
    assert found.faults == ()
    assert any("git cannot be asked" in note for note in found.notes)


def test_the_script_shows_a_line_a_fault_and_exits_1(repository, quality):
    def run():
        words = [sys.executable, str(ROOT / "scripts" / "check_records.py"), "--root", str(repository)]
        return subprocess.run(words, capture_output=True, text=True, check=False)

    sound = run()
    assert (sound.returncode, sound.stdout.strip()) == (0, "5 records, no fault")
    quality.with_suffix(".items.jsonl").write_text("{}\n")
    faulty = run()
    assert faulty.returncode == 1
    assert "place" in faulty.stdout.splitlines()[0]
    assert f"experiments/b/{quality.name.removesuffix('.json')}" in "".join(
        line.split("  ")[0].strip() for line in faulty.stdout.splitlines()
    )
