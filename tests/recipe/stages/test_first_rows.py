"""The first rows stay, a draft head gets the first ids, everything else is as it was; trained weights are refused."""

import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from pydantic import ValidationError

from slimqwen import checkpoint
from slimqwen.checkpoint import draft_head
from slimqwen.checkpoint.config import write_config
from slimqwen.recipe.stage import StageError
from slimqwen.recipe.stages.first_rows import FirstRowsParameters
from slimqwen.serving import in_process
from tests.checkpoints import TINY, stage_output, stored
from tests.recipe.stages import random_checkpoint

EMBEDDING = "model.embed_tokens.weight"


@pytest.fixture(scope="module")
def random(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return random_checkpoint.write(tmp_path_factory.mktemp("random") / "narrow")


def cut(source: Path, destination: Path, **parameters: Any) -> Path:
    return stage_output("first_rows", source, destination, **parameters)


def test_the_embedding_keeps_its_first_rows_and_nothing_else_changes(random: Path, tmp_path: Path) -> None:
    before, after = stored(random), stored(cut(random, tmp_path / "cut", vocab_size=8192))
    assert torch.equal(after.pop(EMBEDDING), before.pop(EMBEDDING)[:8192])
    assert after.keys() == before.keys()
    assert all(torch.equal(tensor, after[name]) for name, tensor in before.items())
    assert checkpoint.read_config(tmp_path / "cut")["vocab_size"] == 8192


def test_a_draft_head_has_the_first_rows_of_the_output_head(random: Path, tmp_path: Path) -> None:
    folder = cut(random, tmp_path / "cut", draft_vocab_size=128)
    tensors = stored(folder)
    assert torch.equal(tensors[draft_head.WEIGHT], tensors[EMBEDDING][:128])
    assert tensors[draft_head.TOKEN_IDS].tolist() == list(range(128))
    assert checkpoint.read_config(folder)[draft_head.SIZE_KEY] == 128
    assert checkpoint.has_random_weights(folder)


def test_the_sizes_go_into_the_text_part_of_a_multimodal_config(random: Path, tmp_path: Path) -> None:
    source = Path(shutil.copytree(random, tmp_path / "multimodal"))
    config = checkpoint.read_config(source)
    write_config(source, {"architectures": config["architectures"], "text_config": config})

    folder = cut(source, tmp_path / "cut", vocab_size=8192, draft_vocab_size=128)

    written = checkpoint.read_config(folder)
    assert written["text_config"] == {**config, "vocab_size": 8192, draft_head.SIZE_KEY: 128}
    assert "vocab_size" not in written


def test_trained_weights_are_refused(tmp_path: Path) -> None:
    with pytest.raises(StageError, match="prune_vocab"):
        cut(TINY, tmp_path / "cut", draft_vocab_size=128)


@pytest.mark.parametrize(
    ("parameters", "message"),
    [
        ({}, "would keep all"),
        ({"vocab_size": 4096}, "tokenizer of 8"),
        ({"vocab_size": 16384}, "do not fit"),
        ({"vocab_size": 8192, "draft_vocab_size": 8256}, "do not fit"),
    ],
)
def test_impossible_sizes_are_refused(
    random: Path, tmp_path: Path, parameters: dict[str, int], message: str
) -> None:
    with pytest.raises(StageError, match=message):
        cut(random, tmp_path / "cut", **parameters)


def test_a_size_that_engines_would_pad_is_refused() -> None:
    with pytest.raises(ValidationError):
        FirstRowsParameters(draft_vocab_size=100)


def test_a_packed_head_is_refused(random: Path, tmp_path: Path) -> None:
    packed = stage_output("quantise_lm_head", random, tmp_path / "packed")
    with pytest.raises(StageError, match="put first_rows first"):
        cut(packed, tmp_path / "cut", draft_vocab_size=128)


@pytest.mark.engine
def test_vllm_drafts_with_the_result(random: Path, tmp_path: Path) -> None:
    in_process.try_out(cut(random, tmp_path / "cut", vocab_size=8192, draft_vocab_size=128))
