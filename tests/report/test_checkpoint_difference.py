"""The tables of `slimqwen diff`."""

import json
import shutil

import pytest

from slimqwen import variant
from slimqwen.checkpoint import MissingCheckpointError
from slimqwen.report import checkpoint_difference

ROOT = variant.repository_root()


@pytest.fixture
def sides(tmp_path):
    """tiny, and a variant whose config.json, tokenizer and flags differ in one thing each."""
    for folder in ("experiments/tiny", "weights/tiny"):
        shutil.copytree(ROOT / folder, tmp_path / folder)
    weights = shutil.copytree(tmp_path / "weights" / "tiny", tmp_path / "weights" / "other")
    config = json.loads((weights / "config.json").read_text())
    (weights / "config.json").write_text(json.dumps(config | {"rms_norm_eps": 1e-3}))
    (weights / "chat_template.jinja").write_text("{{ messages }}")
    folder = tmp_path / "experiments" / "other"
    folder.mkdir()
    (folder / "config.env").write_text("BASE=tiny\nVLLM_MODEL=weights/other\nVLLM_MAX_NUM_SEQS=3\n")
    shutil.copy(tmp_path / "experiments" / "tiny" / "measurements.json", folder)
    return variant.load("tiny", tmp_path), variant.load("other", tmp_path)


def test_settings_that_differ_are_listed_side_by_side(sides):
    tensors, config, files, flags = checkpoint_difference.tables(*sides)
    assert {row[1] for row in tensors.rows} == {"same bytes"}
    assert config.columns == ("key", "tiny", "other")
    assert [row[0] for row in config.rows] == ["rms_norm_eps"]
    assert [row[0] for row in files.rows] == ["chat_template.jinja"]
    assert ("VLLM_MAX_NUM_SEQS", "3") in [(row[0], row[2]) for row in flags.rows]


def test_what_does_not_differ_has_no_table(sides):
    (tensors,) = checkpoint_difference.tables(sides[0], sides[0])
    assert sum(int(row[2]) for row in tensors.rows) > 50


def test_a_missing_checkpoint_is_named_with_the_command_that_makes_it(sides):
    shutil.rmtree(sides[1].weights)
    with pytest.raises(MissingCheckpointError, match="weights/other"):
        checkpoint_difference.tables(*sides)
