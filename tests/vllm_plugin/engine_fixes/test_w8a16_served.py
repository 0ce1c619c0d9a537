"""Each kind of linears in a form of its own: served by vLLM as transformers reads it, the MTP head drafting."""

import re
from pathlib import Path

import pytest
import torch

from slimqwen import checkpoint
from slimqwen.checkpoint import packing
from slimqwen.checkpoint.config import write_config
from slimqwen.checkpoint.files import carry_side_files
from slimqwen.checkpoint.tensors import rewrite
from slimqwen.serving.in_process import counter, engine
from tests.vllm_plugin.engine_fixes.test_w4a16_served import LARGEST_DIFFERENCE, in_transformers, in_vllm

pytestmark = pytest.mark.engine

FORMS = {"mlp": (8, None), "attention": (4, 32), "linear_attention": (4, 32), "mtp": (8, None)}
"""Bits and group size of each kind."""

_EMPTY = {
    "quant_method": "compressed-tensors",
    "format": "pack-quantized",
    "quantization_status": "compressed",
}


@pytest.fixture(scope="module")
def mixed(tiny: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The tiny model with every linear but the decay's packed."""
    folder = tmp_path_factory.mktemp("mixed")

    def packed(name, info):
        module = name.removesuffix(".weight")
        for kind, (bits, group_size) in FORMS.items():
            if re.match(packing.LINEARS[kind].removeprefix("re:"), module):
                return packing.rounded_to_nearest(info, name, bits, group_size)
        return None

    rewrite(tiny, folder, packed)
    carry_side_files(tiny, folder)
    groups = {kind: packing.config_group(kind, *form) for kind, form in FORMS.items()}
    config = checkpoint.read_config(tiny)
    others = {**config, "quantization_config": {**_EMPTY, "config_groups": groups}}
    config["quantization_config"] = packing.with_group(others, "mtp", groups["mtp"])
    write_config(folder, config)
    return folder


def test_log_probabilities_are_those_of_transformers(mixed, texts):
    from vllm.model_executor.layers.quantization.compressed_tensors.schemes import CompressedTensorsWNA16

    CompressedTensorsWNA16._kernel_backends_being_used.clear()
    served = in_vllm(mixed, texts)
    assert "TorchInt8LinearKernel" in CompressedTensorsWNA16._kernel_backends_being_used
    reference = in_transformers(mixed, texts)
    differences = torch.cat([a - b for a, b in zip(served, reference, strict=True)]).abs()
    assert differences.mean() < LARGEST_DIFFERENCE


def test_a_packed_mtp_head_drafts(mixed, texts):
    from vllm import SamplingParams

    greedy = SamplingParams(temperature=0.0, max_tokens=32, ignore_eos=True)
    with engine(mixed, num_speculative_tokens=2) as llm:
        llm.generate([{"prompt_token_ids": ids[:24]} for ids in texts], greedy, use_tqdm=False)
        drafted = counter(llm, "vllm:spec_decode_num_draft_tokens")
        accepted = counter(llm, "vllm:spec_decode_num_accepted_tokens")
    assert accepted > 0.5 * drafted > 0
