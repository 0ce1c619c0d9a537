"""Packed linears served by vLLM give the log-probabilities that transformers gives for the same files."""

import re
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from slimqwen import checkpoint
from slimqwen.checkpoint import packing
from slimqwen.checkpoint.config import write_config
from slimqwen.checkpoint.files import carry_side_files
from slimqwen.checkpoint.tensors import list_tensors, rewrite
from slimqwen.serving.in_process import counter, engine
from slimqwen.vllm_plugin.engine_fixes import w4a16_linear
from tests.noise import NOISE_FACTOR
from tests.vllm_plugin.engine_fixes.packing import packed

pytestmark = pytest.mark.engine

GROUP = 32

FORMS = {"mlp": (8, None), "attention": (4, GROUP), "linear_attention": (4, GROUP), "mtp": (8, None)}
"""Bits and group size of each kind of linears; symmetric."""

_EMPTY = {
    "quant_method": "compressed-tensors",
    "format": "pack-quantized",
    "quantization_status": "compressed",
}


@pytest.fixture(scope="module")
def mixed(tiny: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The tiny model with every linear but the decay's packed, each kind in a form of its own."""
    folder = tmp_path_factory.mktemp("mixed")

    def packed_linear(name, info):
        module = name.removesuffix(".weight")
        for kind, (bits, group_size) in FORMS.items():
            if re.match(packing.LINEARS[kind].removeprefix("re:"), module):
                return packing.rounded_to_nearest(info, name, bits, group_size)
        return None

    rewrite(tiny, folder, packed_linear)
    carry_side_files(tiny, folder)
    groups = {kind: packing.config_group(kind, *form) for kind, form in FORMS.items()}
    config = checkpoint.read_config(tiny)
    others = {**config, "quantization_config": {**_EMPTY, "config_groups": groups}}
    pattern = packing.LINEARS["mtp"].removeprefix("re:")
    heads = [
        module for name in list_tensors(tiny) if re.match(pattern, module := name.removesuffix(".weight"))
    ]
    config["quantization_config"] = packing.with_group(others, "mtp", groups["mtp"], heads)
    write_config(folder, config)
    return folder


@pytest.fixture(scope="module")
def with_zero_points(tiny: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The tiny model with its MLPs, those of the MTP head left out, in 4 bits with zero points."""
    folder = tmp_path_factory.mktemp("with_zero_points")
    tensors = {}
    for name, tensor in load_file(tiny / "model.safetensors").items():
        is_mlp = re.fullmatch(r"model\..*\.mlp\.(gate|up|down)_proj\.weight", name)
        tensors |= round_to_nearest(name, tensor) if is_mlp else {name: tensor}
    assert any(name.endswith("_zero_point") for name in tensors)
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    carry_side_files(tiny, folder)
    group = packing.config_group("mlp", 4, GROUP)
    group["weights"]["symmetric"] = False
    settings = {"config_groups": {"mlp": group}, "ignore": ["lm_head", "re:.*attn.*", "re:.*mtp.*"]}
    write_config(folder, {**checkpoint.read_config(tiny), "quantization_config": {**_EMPTY, **settings}})
    return folder


def round_to_nearest(name, weight):
    """The tensors that stand for a weight in compressed-tensors' pack-quantized format."""
    grouped = weight.float().unflatten(-1, (-1, GROUP))
    low, high = grouped.amin(-1).clamp(max=0), grouped.amax(-1).clamp(min=0)
    scale = (high - low) / 15
    zero = (-low / scale).round()
    scale = scale.to(torch.bfloat16)
    integers = (grouped / scale.float().unsqueeze(-1) + zero.unsqueeze(-1)).round().clamp(0, 15)
    return {
        f"{name}_packed": packed(integers.flatten(-2), dim=1),
        f"{name}_scale": scale,
        f"{name}_shape": torch.tensor(weight.shape),
        f"{name}_zero_point": packed(zero, dim=0),
    }


def in_transformers(folder, texts):
    """Log-probability of each token of each text after its first, in float32."""
    from transformers import AutoModelForCausalLM, CompressedTensorsConfig

    is_packed = "quantization_config" in checkpoint.read_config(folder)
    unpacked = {"quantization_config": CompressedTensorsConfig(run_compressed=False)} if is_packed else {}
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, **unpacked).eval()
    scores = []
    for ids in texts:
        with torch.inference_mode():
            logits = model(torch.tensor([ids])).logits[0, :-1].float()
        scores.append(logits.log_softmax(-1).gather(1, torch.tensor(ids[1:])[:, None])[:, 0])
    return scores


def in_vllm(folder, texts):
    from vllm import SamplingParams

    scored = SamplingParams(max_tokens=1, prompt_logprobs=0)
    with engine(folder) as llm:
        outputs = llm.generate([{"prompt_token_ids": ids} for ids in texts], scored, use_tqdm=False)
    return [
        torch.tensor([at[token].logprob for at, token in zip(out.prompt_logprobs[1:], ids[1:], strict=True)])
        for out, ids in zip(outputs, texts, strict=True)
    ]


def mean_difference(served, reference):
    return torch.cat([a - b for a, b in zip(served, reference, strict=True)]).abs().mean().item()


@pytest.fixture(scope="module")
def noise(tiny, texts):
    """How far vLLM is from transformers on this CPU where no weight is packed."""
    return mean_difference(in_vllm(tiny, texts), in_transformers(tiny, texts))


@pytest.mark.parametrize(
    ("form", "kernels"),
    [
        ("mixed", {"TorchInt4LinearKernel", "TorchInt8LinearKernel"}),
        ("with_zero_points", {"TorchInt4LinearKernel"}),
    ],
)
def test_log_probabilities_are_those_of_transformers(form, kernels, texts, noise, request):
    from vllm.model_executor.layers.quantization.compressed_tensors.schemes import CompressedTensorsWNA16

    folder = request.getfixturevalue(form)
    CompressedTensorsWNA16._kernel_backends_being_used.clear()
    served = in_vllm(folder, texts)
    used = CompressedTensorsWNA16._kernel_backends_being_used
    if not w4a16_linear.is_needed():
        assert kernels - {"TorchInt4LinearKernel"} <= used
    else:
        assert used == kernels
    assert mean_difference(served, in_transformers(folder, texts)) < NOISE_FACTOR * noise


def test_a_packed_mtp_head_drafts(mixed, texts):
    from vllm import SamplingParams

    greedy = SamplingParams(temperature=0.0, max_tokens=32, ignore_eos=True)
    with engine(mixed, num_speculative_tokens=2) as llm:
        llm.generate([{"prompt_token_ids": ids[:24]} for ids in texts], greedy, use_tqdm=False)
        drafted = counter(llm, "vllm:spec_decode_num_draft_tokens")
        accepted = counter(llm, "vllm:spec_decode_num_accepted_tokens")
    assert accepted > 0.5 * drafted > 0
