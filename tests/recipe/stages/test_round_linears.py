"""The rounded weights are the weights to within half a step, the rest stays, and vLLM computes with both schemes."""

from pathlib import Path
from typing import Any

import pytest
import torch
from compressed_tensors.compressors.pack_quantized.helpers import unpack_from_int32

from slimqwen import checkpoint
from slimqwen.checkpoint.config import write_config
from slimqwen.checkpoint.promise import check_tensors, expected_tensors
from slimqwen.checkpoint.tensors import list_tensors
from slimqwen.recipe.stage import StageError
from slimqwen.roofline.architecture import read_model
from slimqwen.serving import in_process
from tests.checkpoints import TINY, stage_output, stored

UP = "model.layers.0.mlp.up_proj.weight"
MLPS = tuple(f"mlp.{part}_proj.weight" for part in ("gate", "up", "down"))


def rounded(destination: Path, source: Path = TINY, **parameters: Any) -> Path:
    return stage_output("round_linears", source, destination, **parameters)


def test_four_bits_in_groups_are_within_half_a_step(tmp_path: Path) -> None:
    tensors, before = stored(rounded(tmp_path / "w4", group_size=64)), stored(TINY)[UP].float()
    whole = unpack_from_int32(tensors[f"{UP}_packed"], 4, before.shape).float()
    scale = tensors[f"{UP}_scale"].float().repeat_interleave(64, dim=1)
    # The largest weight may lie half a step beyond the last level, and the scale was rounded to bfloat16.
    assert ((whole * scale - before).abs() <= 0.55 * scale).all()
    assert tensors[f"{UP}_shape"].tolist() == list(before.shape)


def test_eight_bits_in_rows_are_within_half_a_step(tmp_path: Path) -> None:
    tensors, before = stored(rounded(tmp_path / "w8", scheme="W8A8")), stored(TINY)[UP].float()
    scale = tensors[f"{UP}_scale"].float()
    assert tensors[UP].dtype == torch.int8
    assert scale.shape == (len(before), 1)
    # 127.5 levels times a bfloat16 scale may miss the largest weight by its rounding error.
    assert ((tensors[UP].float() * scale - before).abs() <= 1.02 * scale).all()


@pytest.mark.parametrize("scheme", ["W4A16", "W8A8"])
def test_only_the_targets_change_and_the_mtp_head_is_none(tmp_path: Path, scheme: str) -> None:
    after = stored(rounded(tmp_path / "rounded", scheme=scheme))
    for name, tensor in stored(TINY).items():
        if name.startswith("mtp.") or not name.endswith(MLPS):
            assert torch.equal(after[name], tensor)
        elif scheme == "W4A16":
            assert name not in after
        else:
            assert after[name].dtype == torch.int8


@pytest.mark.parametrize(
    "parameters",
    [
        {"scheme": "W8A8", "targets": ["mlp", "attention", "linear_attention", "lm_head"]},
        {"scheme": "W8A8", "targets": ["lm_head", "mtp"]},
        {"targets": ["mlp", "lm_head"]},
        {"targets": ["attention"]},
    ],
)
def test_the_checkpoint_is_what_its_config_promises(tmp_path: Path, parameters: dict[str, Any]) -> None:
    check_tensors(rounded(tmp_path / "rounded", **parameters))


def test_a_scale_per_row_may_be_stored_with_a_group_size_of_minus_one(tmp_path: Path) -> None:
    folder = rounded(tmp_path / "rounded", scheme="W8A8")
    expected = expected_tensors(folder)
    config = checkpoint.read_config(folder)
    for group in config["quantization_config"]["config_groups"].values():
        assert group["weights"]["strategy"] == "channel"
        group["weights"]["group_size"] = -1
    write_config(folder, config)
    assert expected_tensors(folder) == expected


def test_eight_bit_layers_and_a_four_bit_head_are_counted_together(tmp_path: Path) -> None:
    source = rounded(tmp_path / "w8", scheme="W8A8")
    both = stage_output("quantise_lm_head", source, tmp_path / "both")
    model = read_model(list_tensors(both), checkpoint.read_config(both))
    assert model.body.flops["int8"] > 0
    assert model.head.flops == {"bf16": 2 * 8192 * 192}


def test_the_output_head_is_untied_and_the_embedding_stays(tmp_path: Path) -> None:
    folder = rounded(tmp_path / "w8", scheme="W8A8", targets=["lm_head"])
    tensors, embedding = stored(folder), "model.embed_tokens.weight"
    assert torch.equal(tensors[embedding], stored(TINY)[embedding])
    assert tensors["lm_head.weight"].dtype == torch.int8
    assert checkpoint.read_config(folder)["tie_word_embeddings"] is False


def test_a_second_rounding_is_refused(tmp_path: Path) -> None:
    source = rounded(tmp_path / "first", targets=["mlp"])
    with pytest.raises(StageError, match="quantised already"):
        rounded(tmp_path / "second", source, targets=["attention"])


def test_groups_that_do_not_divide_are_refused(tmp_path: Path) -> None:
    with pytest.raises(StageError, match="does not divide the 192 inputs"):
        rounded(tmp_path / "rounded", group_size=128)


def distribution(folder: Path) -> dict[int, float]:
    """Log-probabilities of the likeliest tokens after a prompt, in an engine that drafts."""
    from vllm import SamplingParams

    with in_process.engine(folder, max_num_seqs=1, num_speculative_tokens=2) as llm:
        settings = SamplingParams(max_tokens=4, temperature=0.0, logprobs=5)
        output = llm.generate([{"prompt_token_ids": list(range(300, 332))}], settings, use_tqdm=False)
    return {token: entry.logprob for token, entry in output[0].outputs[0].logprobs[0].items()}


@pytest.fixture(scope="module")
def before() -> dict[int, float]:
    return distribution(TINY)


@pytest.mark.engine
@pytest.mark.parametrize(
    "parameters",
    [{"scheme": "W8A8", "targets": ["mlp", "attention", "linear_attention", "mtp", "lm_head"]}, {}],
)
def test_vllm_says_nearly_what_it_said_before(
    before: dict[int, float], tmp_path: Path, parameters: dict[str, Any]
) -> None:
    after = distribution(rounded(tmp_path / "rounded", **parameters))
    likeliest = max(before, key=before.__getitem__)
    assert after[likeliest] == pytest.approx(before[likeliest], abs=0.7)
