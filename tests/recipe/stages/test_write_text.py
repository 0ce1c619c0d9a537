"""The model writes its own text: as many tokens as asked for, the same bytes after a kill, readable by later stages."""

import json
from pathlib import Path
from typing import Any

import pytest

from slimqwen.models.vocabulary import read_tokenizer
from slimqwen.progress import silent
from slimqwen.recipe import recipe_file, runner
from slimqwen.recipe.calibration_text import CalibrationText, calibration_documents
from slimqwen.recipe.stages import write_text
from slimqwen.recipe.stages.write_text import WriteTextParameters
from slimqwen.text.corpus import END_OF_TEXT, OWN_TEXT
from tests.checkpoints import TINY

pytestmark = pytest.mark.engine

FEW: dict[str, Any] = {"tokens": 1500, "longest": 16, "chunk": 8}
RECIPE = """\
description: d
base: tiny
stages:
  - write_text: {tokens: 600, longest: 16, chunk: 16}
  - calibrate: {corpus: {sequences: 8, length: 64}}
  - sample_outputs: {texts: 16, held_out: 8, tokens: 16, chunk: 8}
"""


@pytest.fixture
def written(tmp_path: Path) -> Path:
    """The output of the stage on tiny; its chunks are beside it."""
    for name in ("written", "unfinished"):
        (tmp_path / name).mkdir()
    facts = write_text.write_own_text(
        TINY, tmp_path / "written", WriteTextParameters(**FEW), silent, unfinished=tmp_path / "unfinished"
    )
    assert facts["tokens"] >= 1500
    return tmp_path / "written"


def test_a_killed_stage_goes_on_to_the_same_text(written: Path, tmp_path: Path) -> None:
    chunks = sorted((tmp_path / "unfinished").glob("*.jsonl"))
    assert len(chunks) > 1
    chunks[-1].unlink()
    (tmp_path / "again").mkdir()
    write_text.write_own_text(
        TINY, tmp_path / "again", WriteTextParameters(**FEW), silent, unfinished=tmp_path / "unfinished"
    )
    assert (tmp_path / "again" / OWN_TEXT).read_bytes() == (written / OWN_TEXT).read_bytes()
    texts = [json.loads(line)["text"] for line in (written / OWN_TEXT).read_text().splitlines()]
    assert len(set(texts)) == len(texts)
    tokenizer = read_tokenizer(TINY / "tokenizer.json")
    assert sum(len(tokenizer.encode(text + END_OF_TEXT).ids) for text in texts) >= 1500


@pytest.mark.usefixtures("keys_cover_what_stages_execute")
def test_stages_read_what_the_model_wrote(tmp_path: Path) -> None:
    file = tmp_path / "recipe.yaml"
    file.write_text(RECIPE)
    (tmp_path / "weights").mkdir()
    wrote, calibrated, sampled = runner.run_recipe(
        recipe_file.read_recipe(file), "v", tmp_path / "weights", lambda _: TINY
    )
    text = (wrote.folder / OWN_TEXT).read_bytes()
    assert (calibrated.folder / OWN_TEXT).read_bytes() == text
    assert calibrated.manifest.facts["calibration_tokens"] == 512
    assert not [name for name in calibrated.manifest.ingredients if name.startswith("data.")]
    assert sampled.manifest.facts["continuations"] == 24
    assert calibration_documents(CalibrationText(), wrote.folder)
