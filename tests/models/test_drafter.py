"""A drafting model of another maker: which method of vLLM it gets, and what does not fit the model it drafts for."""

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from slimqwen.checkpoint import CorruptCheckpointError
from slimqwen.models.drafter import DrafterError, check_files, describe_drafter
from tests.checkpoints import TINY

TEXT = json.loads((TINY / "config.json").read_text())
FITTING = {"vocab_size": TEXT["vocab_size"], "hidden_size": TEXT["hidden_size"]}


def drafter(folder: Path, architecture: str, **config: Any) -> Path:
    """A drafter with these settings and one tensor."""
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps({"architectures": [architecture], **FITTING, **config}))
    save_file({"fc.weight": torch.zeros(2, 2)}, folder / "model.safetensors")
    return folder


@pytest.mark.parametrize(
    ("architecture", "method"),
    [
        ("DFlashDraftModel", "dflash"),
        ("DFlash2DraftModel", "dflash"),
        ("LlamaForCausalLMEagle3", "eagle3"),
        ("PEagleDraftModel", "eagle3"),
        ("Qwen3ForCausalLM", "draft_model"),
    ],
)
def test_the_architecture_says_which_method_drafts(tmp_path: Path, architecture: str, method: str) -> None:
    folder = drafter(tmp_path / "x", architecture)
    assert describe_drafter(folder, TINY, "weights/x") == {
        "method": method,
        "model": "weights/x",
        "num_speculative_tokens": 4,
    }


@pytest.mark.parametrize(
    ("config", "fault"),
    [
        ({"vocab_size": 151_936}, "its vocabulary has 151936 ids, the model's 8192"),
        ({"hidden_size": 2560}, "it reads states of width 2560, the model's have 192"),
        ({"target_hidden_size": 2560}, "it reads states of width 2560, the model's have 192"),
    ],
)
def test_a_drafter_of_another_model_is_refused(tmp_path: Path, config: dict[str, int], fault: str) -> None:
    folder = drafter(tmp_path / "x", "DFlashDraftModel", **config)
    with pytest.raises(
        DrafterError, match=f"does not fit .*: {fault}; name a drafter that was made for this"
    ):
        describe_drafter(folder, TINY, "weights/x")


def test_a_language_model_may_be_of_any_width_but_has_the_same_ids(tmp_path: Path) -> None:
    folder = drafter(tmp_path / "x", "Qwen3ForCausalLM", hidden_size=64)
    state = json.loads((TINY / "tokenizer.json").read_text())
    shutil.copy(TINY / "tokenizer.json", folder)
    assert describe_drafter(folder, TINY, "x")["method"] == "draft_model"
    ids = state["model"]["vocab"]
    one, other = list(ids)[-2:]
    ids[one], ids[other] = ids[other], ids[one]
    (folder / "tokenizer.json").write_text(json.dumps(state))
    with pytest.raises(DrafterError, match=r"2 tokens, as .* have another id"):
        describe_drafter(folder, TINY, "x")


def test_what_cannot_draft_or_is_damaged_is_named(tmp_path: Path) -> None:
    with pytest.raises(DrafterError, match="is a BertModel, with which vLLM cannot draft"):
        describe_drafter(drafter(tmp_path / "bert", "BertModel"), TINY, "x")
    folder = drafter(tmp_path / "cut", "DFlashDraftModel")
    file = folder / "model.safetensors"
    file.write_bytes(file.read_bytes()[:-4])
    with pytest.raises(CorruptCheckpointError, match="; fetch it again"):
        check_files(folder, "fetch it again")
