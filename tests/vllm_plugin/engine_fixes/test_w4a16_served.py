"""A 4-bit checkpoint served by vLLM gives the log-probabilities that transformers gives for the same files."""

import json
import re

import pytest
import torch

from slimqwen.serving.in_process import engine
from slimqwen.vllm_plugin.engine_fixes import w4a16_linear
from tests.vllm_plugin.engine_fixes.packing import packed

pytestmark = pytest.mark.engine

GROUP = 32
LARGEST_DIFFERENCE = 0.02


def round_to_nearest(name, weight, symmetric):
    """The tensors that stand for a weight in compressed-tensors' pack-quantized format."""
    grouped = weight.float().unflatten(-1, (-1, GROUP))
    if symmetric:
        scale = grouped.abs().amax(-1) / 7.5
        zero = torch.full_like(scale, 8)
    else:
        low, high = grouped.amin(-1).clamp(max=0), grouped.amax(-1).clamp(min=0)
        scale = (high - low) / 15
        zero = (-low / scale).round()
    scale = scale.to(torch.bfloat16)
    integers = (grouped / scale.float().unsqueeze(-1) + zero.unsqueeze(-1)).round().clamp(0, 15)
    tensors = {
        "packed": packed(integers.flatten(-2), dim=1),
        "scale": scale,
        "shape": torch.tensor(weight.shape),
    }
    if not symmetric:
        tensors["zero_point"] = packed(zero, dim=0)
    return {f"{name}_{part}": tensor for part, tensor in tensors.items()}


@pytest.fixture(scope="module", params=["symmetric", "asymmetric"])
def quantised(request, tiny, tmp_path_factory):
    """The tiny model with its MLPs, those of the MTP head left out, in 4 bits."""
    from safetensors.torch import load_file, save_file

    folder = tmp_path_factory.mktemp(request.param)
    tensors = {}
    for name, tensor in load_file(tiny / "model.safetensors").items():
        is_mlp = re.fullmatch(r"model\..*\.mlp\.(gate|up|down)_proj\.weight", name)
        tensors |= round_to_nearest(name, tensor, request.param == "symmetric") if is_mlp else {name: tensor}
    assert any(name.endswith("_packed") for name in tensors)
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    weights = {
        "num_bits": 4,
        "type": "int",
        "symmetric": request.param == "symmetric",
        "strategy": "group",
        "group_size": GROUP,
    }
    config = json.loads((tiny / "config.json").read_text())
    config["quantization_config"] = {
        "quant_method": "compressed-tensors",
        "format": "pack-quantized",
        "quantization_status": "compressed",
        "config_groups": {"group_0": {"targets": ["Linear"], "weights": weights}},
        "ignore": ["lm_head", "re:.*self_attn.*", "re:.*linear_attn.*", "re:.*mtp.*"],
    }
    (folder / "config.json").write_text(json.dumps(config))
    for file in tiny.iterdir():
        if not (folder / file.name).exists():
            (folder / file.name).symlink_to(file)
    return folder


def in_transformers(checkpoint, texts):
    """Log-probability of each token of each text after its first."""
    from transformers import AutoModelForCausalLM, CompressedTensorsConfig

    model = AutoModelForCausalLM.from_pretrained(
        checkpoint, dtype=torch.float32, quantization_config=CompressedTensorsConfig(run_compressed=False)
    ).eval()
    scores = []
    for ids in texts:
        with torch.inference_mode():
            logits = model(torch.tensor([ids])).logits[0, :-1].float()
        scores.append(logits.log_softmax(-1).gather(1, torch.tensor(ids[1:])[:, None])[:, 0])
    return scores


def in_vllm(checkpoint, texts):
    from vllm import SamplingParams

    scored = SamplingParams(max_tokens=1, prompt_logprobs=0)
    with engine(checkpoint) as llm:
        outputs = llm.generate([{"prompt_token_ids": ids} for ids in texts], scored, use_tqdm=False)
    return [
        torch.tensor([at[token].logprob for at, token in zip(out.prompt_logprobs[1:], ids[1:], strict=True)])
        for out, ids in zip(outputs, texts, strict=True)
    ]


def test_log_probabilities_are_those_of_transformers(quantised, texts):
    from vllm.model_executor.layers.quantization.compressed_tensors.schemes import CompressedTensorsWNA16

    CompressedTensorsWNA16._kernel_backends_being_used.clear()
    served = in_vllm(quantised, texts)
    if w4a16_linear.reason() is not None:
        assert CompressedTensorsWNA16._kernel_backends_being_used == {"TorchInt4LinearKernel"}
    reference = in_transformers(quantised, texts)
    differences = torch.cat([a - b for a, b in zip(served, reference, strict=True)]).abs()
    assert differences.mean() < LARGEST_DIFFERENCE
