"""The release check with stand-ins for its measurements: which records it takes, and what it concludes."""

import itertools
import subprocess

import pytest

from slimqwen import variant
from slimqwen.bench import fuzz, soak
from slimqwen.bench.soak import Soak
from slimqwen.evals.engine import length_sweep
from slimqwen.evals.engine.length_sweep import LengthSweep
from slimqwen.records import provenance, store
from slimqwen.search import release_check
from slimqwen.search.release_check import ReleaseCheck
from slimqwen.serving.command import ServerCommand
from slimqwen.stats.verdict import Verdict
from tests.record_files import record_of, write

ROOT = variant.repository_root()
KINDS = ("length_sweep", "fuzz", "soak")


@pytest.fixture(scope="module")
def examples():
    """A record of each kind as JSON: committed ones, and a fuzz without a fault."""
    found = {
        "schema": "fuzz/1", "examples": 20, "endpoints": 30, "requests": {"refused": 900, "answered": 60}, "faults": [],
        "harm": [], "verdict": "pass",
    }  # fmt: skip
    return {
        "length_sweep": store.read(store.latest(ROOT / "experiments" / "tiny-mtp4", LengthSweep)).as_json(),
        "fuzz": found,
        "soak": store.read(store.latest_result(ROOT, Soak, "tiny-best")).as_json(),
    }


@pytest.fixture
def subject(tmp_path, monkeypatch):
    """A variant in a repository of its own, whose provenance says that a commit without changes made it."""
    source = variant.load("tiny")
    (tmp_path / "slimqwen").mkdir()
    (tmp_path / "slimqwen" / "code.py").write_text("x = 1\n")
    (tmp_path / "requirements").mkdir()
    (tmp_path / ".gitignore").write_text("experiments\nresults\nlogs\nweights\n.cache\n")
    folder = tmp_path / "experiments" / "tiny"
    folder.mkdir(parents=True)
    for name in ("config.env", "measurements.json"):
        (folder / name).write_text((source.folder / name).read_text())
    (tmp_path / "weights").mkdir()
    (tmp_path / "weights" / "tiny").symlink_to(source.weights)
    git(tmp_path, "init", "-q")
    git(tmp_path, "add", ".")
    git(tmp_path, "commit", "-qm", "first")
    return variant.load("tiny", tmp_path)


def git(root, *words):
    subprocess.run(["git", "-C", str(root), "-c", "user.name=a", "-c", "user.email=a@b", *words], check=True)


@pytest.fixture
def measured(subject, examples, monkeypatch):
    """Replace the measurements by copies of records; returns what was measured, and changes by kind."""
    made, changes = [], {kind: {} for kind in KINDS}
    # Records of one second would have one name.
    seconds = itertools.count()
    monkeypatch.setattr(
        provenance, "utc_now", lambda: "2026-01-01T00:{:02}:{:02}Z".format(*divmod(next(seconds), 60))
    )
    monkeypatch.setattr(store, "_stamp", lambda: f"2026-01-01T{next(seconds):06}Z")

    def record(kind):
        made.append(kind)
        block = provenance.describe(
            ServerCommand.resolve(subject),
            ["slimqwen"],
            provenance.utc_now(),
            datasets=[],
            seeds={"prompts": 0},
        )
        fields = {**examples[kind], "variant": "tiny", "provenance": block.as_json(), **changes[kind]}
        folder = subject.folder if kind == "length_sweep" else subject.root / "results"
        return write(folder, fields, [{"arm": 0}] if kind == "length_sweep" else None)

    monkeypatch.setattr(length_sweep, "measure", lambda *given, **options: record("length_sweep"))
    monkeypatch.setattr(fuzz, "write", lambda *given, **options: record("fuzz"))
    monkeypatch.setattr(soak, "write", lambda *given, **options: record("soak"))
    return made, changes


def check(subject, minutes=5, examples=5, settings_name="tinyworld"):
    path = release_check.write(
        subject, settings_name, minutes=minutes, examples=examples, command=["slimqwen", "release-check"]
    )
    return store.read(path, ReleaseCheck)


def test_one_verdict_over_three_records_that_it_cites(subject, measured):
    record = check(subject)

    assert measured[0] == list(KINDS)
    assert record.verdict == Verdict.PASS
    assert [part.reused for part in record.parts] == [False] * 3
    assert all((subject.root / name).is_file() for name in record.cited())
    [table] = record.tables(subject.root / "results" / "release_check.json")
    assert [row[:2] for row in table.rows] == [(part.check, "pass") for part in record.parts]


@pytest.mark.parametrize("verdict", ["fail", "inconclusive"])
def test_one_measurement_that_does_not_pass_decides(subject, measured, verdict):
    measured[1]["soak"] = {"verdict": verdict}
    record = check(subject)

    assert record.verdict == verdict


def test_records_that_hold_are_used_again(subject, measured):
    check(subject)
    record = check(subject)

    assert measured[0] == list(KINDS)
    assert [part.reused for part in record.parts] == [True] * 3


def test_an_interrupted_check_goes_on_with_what_is_missing(subject, measured, monkeypatch):
    def interrupted(*given, **options):
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(soak, "write", interrupted)
        with pytest.raises(KeyboardInterrupt):
            check(subject)
    record = check(subject)

    assert measured[0] == list(KINDS)
    assert [part.reused for part in record.parts] == [True, True, False]


@pytest.mark.parametrize(
    ("wanted", "again"),
    [
        ({"minutes": 60}, ["soak"]),
        ({"examples": 1000}, ["fuzz"]),
        ({"settings_name": "other"}, ["length_sweep"]),
    ],
)
def test_a_smaller_record_than_is_wanted_is_made_again(subject, measured, wanted, again):
    check(subject)
    check(subject, **wanted)
    assert measured[0][3:] == again


def test_nothing_counts_after_a_change_of_code_or_flags(subject, measured):
    check(subject)
    (subject.root / "slimqwen" / "code.py").write_text("x = 2\n")
    check(subject)  # a checkout with changes
    git(subject.root, "commit", "-qam", "second")
    check(subject)
    assert measured[0] == list(KINDS) * 3

    (subject.folder / "config.env").write_text((subject.folder / "config.env").read_text() + "VLLM_SEED=7\n")
    check(variant.load("tiny", subject.root))
    assert measured[0][9:] == list(KINDS)


def test_a_change_of_documents_changes_nothing(subject, measured):
    check(subject)
    (subject.root / "README.md").write_text("read me")
    git(subject.root, "add", ".")
    git(subject.root, "commit", "-qm", "words")
    check(subject)
    assert measured[0] == list(KINDS)


def test_records_of_another_variant_do_not_count(subject, measured):
    check(subject)
    for path in (subject.root / "results").glob("fuzz_*.json"):
        path.rename(path.with_name(path.name.replace("tiny", "other")))
        other = path.with_name(path.name.replace("tiny", "other"))
        fields = store.read(other).as_json() | {"variant": "other"}
        other.write_text(store.serialise(record_of(fields), "other"))
    check(subject)
    assert measured[0][3:] == ["fuzz"]
