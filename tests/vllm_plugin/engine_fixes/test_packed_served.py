"""Packed linears served by vLLM give the log-probabilities that transformers gives for the same files."""

import re
from pathlib import Path

import pytest
import torch

from slimqwen import checkpoint
from slimqwen.checkpoint import packing
from slimqwen.checkpoint.config import write_config
from slimqwen.checkpoint.files import carry_side_files
from slimqwen.checkpoint.tensors import list_tensors, rewrite
from slimqwen.serving.in_process import counter, engine
from slimqwen.vllm_plugin.engine_fixes import w4a16_linear
from tests.noise import NOISE_FACTOR

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


def test_log_probabilities_are_those_of_transformers(mixed, texts, noise):
    from vllm.model_executor.layers.quantization.compressed_tensors.schemes import CompressedTensorsWNA16

    CompressedTensorsWNA16._kernel_backends_being_used.clear()
    served = in_vllm(mixed, texts)
    kernels = {"TorchInt8LinearKernel"} | ({"TorchInt4LinearKernel"} if w4a16_linear.is_needed() else set())
    assert kernels <= CompressedTensorsWNA16._kernel_backends_being_used
    assert mean_difference(served, in_transformers(mixed, texts)) < NOISE_FACTOR * noise


def test_a_packed_mtp_head_drafts(mixed, texts):
    from vllm import SamplingParams

    greedy = SamplingParams(temperature=0.0, max_tokens=32, ignore_eos=True)
    with engine(mixed, num_speculative_tokens=2) as llm:
        llm.generate([{"prompt_token_ids": ids[:24]} for ids in texts], greedy, use_tqdm=False)
        drafted = counter(llm, "vllm:spec_decode_num_draft_tokens")
        accepted = counter(llm, "vllm:spec_decode_num_accepted_tokens")
    assert accepted > 0.5 * drafted > 0
