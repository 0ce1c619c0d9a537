"""The rounded weights are the weights to within half a step, the rest stays, and vLLM computes with both schemes."""

from pathlib import Path
from typing import Any

import pytest
import torch
from compressed_tensors.compressors.pack_quantized.helpers import unpack_from_int32
from safetensors.torch import load_file

from slimqwen import checkpoint, progress
from slimqwen.analysis.roofline.architecture import read_model
from slimqwen.checkpoint.tensors import list_tensors
from slimqwen.recipe.stage import StageError
from slimqwen.recipe.stages import quantise_lm_head, round_linears
from slimqwen.recipe.stages.quantise_lm_head import QuantiseLmHeadParameters
from slimqwen.recipe.stages.round_linears import RoundLinearsParameters
from slimqwen.serving import in_process

TINY = Path(__file__).parents[3] / "weights" / "tiny"
UP = "model.layers.0.mlp.up_proj.weight"
MLPS = tuple(f"mlp.{part}_proj.weight" for part in ("gate", "up", "down"))


def rounded(destination: Path, source: Path = TINY, **parameters: Any) -> Path:
    destination.mkdir()
    round_linears.run(source, destination, RoundLinearsParameters(**parameters), progress.silent)
    return destination


def test_four_bits_in_groups_are_within_half_a_step(tmp_path: Path) -> None:
    stored = load_file(rounded(tmp_path / "w4", group_size=64) / "model.safetensors")
    before = load_file(TINY / "model.safetensors")[UP].float()
    whole = unpack_from_int32(stored[f"{UP}_packed"], 4, before.shape).float()
    scale = stored[f"{UP}_scale"].float().repeat_interleave(64, dim=1)
    # The largest weight may lie half a step beyond the last level, and the scale was rounded to bfloat16.
    assert ((whole * scale - before).abs() <= 0.55 * scale).all()
    assert stored[f"{UP}_shape"].tolist() == list(before.shape)


def test_eight_bits_in_rows_are_within_half_a_step(tmp_path: Path) -> None:
    stored = load_file(rounded(tmp_path / "w8", scheme="W8A8") / "model.safetensors")
    before = load_file(TINY / "model.safetensors")[UP].float()
    scale = stored[f"{UP}_scale"].float()
    assert stored[UP].dtype == torch.int8
    assert scale.shape == (len(before), 1)
    # 127.5 levels times a bfloat16 scale may miss the largest weight by its rounding error.
    assert ((stored[UP].float() * scale - before).abs() <= 1.02 * scale).all()


@pytest.mark.parametrize("scheme", ["W4A16", "W8A8"])
def test_only_the_targets_change_and_the_mtp_head_is_none(tmp_path: Path, scheme: str) -> None:
    before = load_file(TINY / "model.safetensors")
    after = load_file(rounded(tmp_path / "rounded", scheme=scheme) / "model.safetensors")
    for name, tensor in before.items():
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
    folder = rounded(tmp_path / "rounded", **parameters)
    from slimqwen.checkpoint.config import expected_tensors

    expected = expected_tensors(folder)
    stored = list_tensors(folder)
    assert expected.keys() == stored.keys()
    for name, (shape, dtypes) in expected.items():
        assert stored[name].shape == shape, name
        assert stored[name].dtype in dtypes, name


def test_eight_bit_layers_and_a_four_bit_head_are_counted_together(tmp_path: Path) -> None:
    source = rounded(tmp_path / "w8", scheme="W8A8")
    both = tmp_path / "both"
    both.mkdir()
    quantise_lm_head.run(source, both, QuantiseLmHeadParameters(), progress.silent)
    model = read_model(list_tensors(both), checkpoint.read_config(both))
    assert model.body.flops["int8"] > 0
    assert model.head.flops == {"bf16": 2 * 8192 * 192}


def test_the_output_head_is_untied_and_the_embedding_stays(tmp_path: Path) -> None:
    folder = rounded(tmp_path / "w8", scheme="W8A8", targets=["lm_head"])
    stored, embedding = load_file(folder / "model.safetensors"), "model.embed_tokens.weight"
    assert torch.equal(stored[embedding], load_file(TINY / "model.safetensors")[embedding])
    assert stored["lm_head.weight"].dtype == torch.int8
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
