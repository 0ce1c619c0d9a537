"""An exploration's record says what made it, and its plot lies beside it."""

import dataclasses
import json
from pathlib import Path

import pytest

from slimqwen import checkpoint, variant
from slimqwen.records import provenance, results, store
from slimqwen.records.plots import Line, Panel

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
        lambda record: [Panel("x", "y", [Line("figure", [1], [record["requests"]])])],
        command=["scripts/explore.py", "--variant", "tiny"],
        started="2026-01-01T00:00:00Z",
        **inputs,
    )


def test_a_record_names_its_schema_variant_command_and_checkpoint(one: variant.Variant) -> None:
    served = provenance.served({"max-num-seqs": 8}, {"OMP_NUM_THREADS": "3"}, one.root)
    file = write(one, seeds={"a": 1}, **served)
    assert file == one.root / "results" / "profile_tiny.json"
    record = json.loads(file.read_text())
    assert (record["schema"], record["variant"], record["classes"]) == ("profile/1", "tiny", FOUND["classes"])
    block = record["provenance"]
    assert block["command"] == "python scripts/explore.py --variant tiny"
    assert block["checkpoint"] == checkpoint.digest(one.weights)
    assert (block["seeds"], block["threads"], block["flags"]) == ({"a": 1}, 3, {"max-num-seqs": 8})
    assert file.with_suffix(".svg").read_text().count("figure") >= 1
    assert str(one.root) not in file.read_text()
    assert results.read(one.root, "profile", "tiny") == record == store.read(file)
    assert results.read(one.root, "profile", "absent") is None


def test_an_exploration_made_again_replaces_its_record(one: variant.Variant) -> None:
    write(one)
    file = write(one, FOUND | {"requests": 3})
    assert json.loads(file.read_text())["requests"] == 3
    assert sorted(path.name for path in file.parent.iterdir()) == ["profile_tiny.json", "profile_tiny.svg"]


@pytest.mark.parametrize(
    ("found", "inputs"),
    [
        (FOUND | {"requests": 1}, {}),
        (FOUND | {"note": "typed by hand"}, {}),
        (FOUND, {"host": "mine"}),
        (FOUND | {"requests": float("nan")}, {}),
    ],
)
def test_a_record_that_breaks_its_schema_leaves_the_one_before(
    one: variant.Variant, found: dict, inputs: dict
) -> None:
    file = write(one)
    before = file.read_bytes()
    with pytest.raises(store.RecordError, match=r"results/profile_tiny\.json: "):
        write(one, found, **inputs)
    assert file.read_bytes() == before
    assert len(list(file.parent.iterdir())) == 2


def test_a_kind_without_a_schema_is_not_written(one: variant.Variant) -> None:
    with pytest.raises(store.RecordError, match="'exploration/1' is unknown"):
        results.write(
            "exploration", one, {}, lambda record: [], command=["x"], started="2026-01-01T00:00:00Z"
        )
    assert not (one.root / "results").exists()


def test_an_old_record_is_read_in_the_present_form() -> None:
    root = variant.repository_root()
    assert (
        "schema" not in json.loads((root / "results" / "start_up_tiny-best.json").read_text())["provenance"]
    )
    read = results.read(root, "start_up", "tiny-best")
    assert read is not None
    assert read["provenance"]["schema"] == "provenance/2"


def test_a_damaged_record_is_named(tmp_path: Path) -> None:
    (tmp_path / "results").mkdir()
    (tmp_path / "results" / "profile_tiny.json").write_text("{")
    with pytest.raises(store.RecordError, match=r"results/profile_tiny\.json: not JSON"):
        results.read(tmp_path, "profile", "tiny")
