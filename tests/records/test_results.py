"""An exploration's record says what made it, and its plot lies beside it."""

import dataclasses
import json
from pathlib import Path

from slimqwen import checkpoint, variant
from slimqwen.records import results
from slimqwen.records.plots import Line, Panel


def test_a_record_names_its_schema_variant_command_and_checkpoint(tmp_path: Path) -> None:
    real = variant.load("tiny")
    (tmp_path / "weights").mkdir()
    (tmp_path / "weights" / "tiny").symlink_to(real.weights)
    one = dataclasses.replace(real, root=tmp_path)
    file = results.write(
        "exploration",
        one,
        {"figure": 3},
        lambda record: [Panel("x", "y", [Line("figure", [1], [record["figure"]])])],
        command=["scripts/explore.py", "--variant", "tiny"],
        started="2026-01-01T00:00:00Z",
        seeds={"a": 1},
    )
    assert file == tmp_path / "results" / "exploration_tiny.json"
    record = json.loads(file.read_text())
    assert (record["schema"], record["variant"], record["figure"]) == ("exploration/1", "tiny", 3)
    assert record["provenance"]["command"] == "python scripts/explore.py --variant tiny"
    assert record["provenance"]["checkpoint"] == checkpoint.digest(real.weights)
    assert record["provenance"]["seeds"] == {"a": 1}
    assert file.with_suffix(".svg").read_text().count("figure") >= 1
    assert str(tmp_path) not in file.read_text()
