"""An exploration's record says what made it, and stays when another is made."""

import dataclasses
import json
from pathlib import Path

import pytest

from slimqwen import checkpoint, variant
from slimqwen.records import provenance, results, store

TIMES = {
    "prompt_tokens": 8,
    "output_tokens": 8,
    "decode_share": 0.5,
    "step": {"forward": 1.0},
    "operators": [],
}
SECONDS = {
    phase: {"value": 0.1, "standard_error": 0.01, "count": 2} for phase in ("queue", "prefill", "decode")
}
FOUND = {"workload": "classes", "requests": 2, "classes": [{"class": "short", "seconds": SECONDS, **TIMES}]}


@pytest.fixture
def one(tmp_path: Path) -> variant.Variant:
    real = variant.load("tiny")
    (tmp_path / "weights").mkdir()
    (tmp_path / "weights" / "tiny").symlink_to(real.weights)
    return dataclasses.replace(real, root=tmp_path)


def write(one: variant.Variant, found: dict = FOUND, **inputs: object) -> Path:
    return results.write(
        "profile",
        one,
        found,
        command=["scripts/explore.py", "--variant", "tiny"],
        started="2026-01-01T00:00:00Z",
        **inputs,
    )


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> None:
    """A second passes whenever the time is asked."""
    times = iter(f"2026-01-01T00:00:{second:02}Z" for second in range(60))
    monkeypatch.setattr(provenance, "utc_now", lambda: next(times))


def test_a_record_names_its_schema_variant_command_and_checkpoint(one: variant.Variant, clock: None) -> None:
    served = provenance.served({"max-num-seqs": 8}, {"OMP_NUM_THREADS": "3"}, one.root)
    file = write(one, seeds={"a": 1}, **served)
    assert file == one.root / "results" / "profile_tiny_2026-01-01T000000Z.json"
    record = json.loads(file.read_text())
    assert (record["schema"], record["variant"], record["classes"]) == ("profile/1", "tiny", FOUND["classes"])
    block = record["provenance"]
    assert block["command"] == "python scripts/explore.py --variant tiny"
    assert block["checkpoint"] == checkpoint.digest(one.weights)
    assert (block["seeds"], block["threads"], block["flags"]) == ({"a": 1}, 3, {"max-num-seqs": 8})
    assert str(one.root) not in file.read_text()
    assert results.latest(one.root, "profile", "tiny") == record == store.read(file)
    assert results.latest(one.root, "profile", "absent") is None


def test_an_exploration_made_again_is_another_file_and_the_latest(one: variant.Variant, clock: None) -> None:
    first = write(one)
    before = first.read_bytes()
    second = write(one, FOUND | {"requests": 3})
    assert (first.read_bytes(), first == second) == (before, False)
    assert results.latest(one.root, "profile", "tiny")["requests"] == 3
    assert results.latest(one.root, "profile", "tiny", lambda r: r["requests"] == 2)["requests"] == 2
    # A variant whose name goes on where this one's ends is another.
    assert results.latest(one.root, "profile", "tin") is None
    other = store.read(second) | {"variant": "tiny_2"}
    assert results.add(one.root, other).name == "profile_tiny_2_2026-01-01T000001Z.json"
    assert results.latest(one.root, "profile", "tiny")["variant"] == "tiny"


def test_two_explorations_of_one_second_do_not_replace_each_other(
    one: variant.Variant, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(provenance, "utc_now", lambda: "2026-01-01T00:00:00Z")
    before = write(one).read_bytes()
    with pytest.raises(store.RecordError, match="never overwritten"):
        write(one, FOUND | {"requests": 3})
    [file] = (one.root / "results").iterdir()
    assert file.read_bytes() == before


@pytest.mark.parametrize(
    ("found", "inputs"),
    [
        (FOUND | {"requests": 1}, {}),
        (FOUND | {"note": "typed by hand"}, {}),
        (FOUND, {"host": "mine"}),
        (FOUND | {"requests": float("nan")}, {}),
    ],
)
def test_a_record_that_breaks_its_schema_is_not_written(
    one: variant.Variant, clock: None, found: dict, inputs: dict
) -> None:
    with pytest.raises(store.RecordError, match=r"results/profile_tiny_2026-01-01T000000Z\.json: "):
        write(one, found, **inputs)
    assert not (one.root / "results").exists()


def test_a_kind_without_a_schema_is_not_written(one: variant.Variant) -> None:
    with pytest.raises(store.RecordError, match="'exploration/1' is unknown"):
        results.write("exploration", one, {}, command=["x"], started="2026-01-01T00:00:00Z")
    assert not (one.root / "results").exists()


def test_an_old_record_is_read_in_the_present_form() -> None:
    root = variant.repository_root()
    old = root / "results" / "start_up_tiny-best_2026-11-21T143244Z.json"
    assert "schema" not in json.loads(old.read_text())["provenance"]
    assert store.read(old)["provenance"]["schema"] == "provenance/2"
    assert results.latest(root, "start_up", "tiny-best")["provenance"]["schema"] == "provenance/2"


def test_a_damaged_record_is_named(tmp_path: Path) -> None:
    (tmp_path / "results").mkdir()
    (tmp_path / "results" / "profile_tiny_2026-01-01T000000Z.json").write_text("{")
    with pytest.raises(store.RecordError, match=r"results/profile_tiny_2026-01-01T000000Z\.json: not JSON"):
        results.latest(tmp_path, "profile", "tiny")
