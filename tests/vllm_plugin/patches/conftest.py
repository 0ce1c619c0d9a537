"""The committed tiny model, texts of its world, and vLLM as it comes."""

import functools
import importlib
import itertools
import sys
from pathlib import Path

import pytest
import torch

from slimqwen.vllm_plugin.patches.table import PATCHES
from slimqwen.vllm_plugin.patches.upstream import is_replaced

_ROOT = Path(__file__).parents[3]


@pytest.fixture(scope="session")
def tiny():
    return _ROOT / "weights" / "tiny"


@pytest.fixture(scope="session")
def texts(tiny):
    """Token IDs of twelve documents of the world, every second one prose, 32 to 200 tokens each."""
    from tinyworld.documents import DocumentSampler
    from tinyworld.world import World
    from tokenizers import Tokenizer

    tokenizer = Tokenizer.from_file(str(tiny / "tokenizer.json"))

    def encoded(kind):
        for document in DocumentSampler(World(), left_out=(), mix={kind: 1.0}).stream(seed=2):
            ids = tokenizer.encode(document.text).ids
            if 32 <= len(ids) <= 200:
                yield ids

    pairs = zip(encoded("prose"), encoded("choice"), strict=False)
    return list(itertools.chain.from_iterable(itertools.islice(pairs, 6)))


def replaceable():
    """(owner, name) of every place of the patches of a CPU that `register` makes."""
    for patch in PATCHES.values():
        if patch.function == "install" and "cpu" in patch.devices:
            for place in patch.places:
                module, _, names = place.partition(":")
                *owners, name = names.split(".")
                yield functools.reduce(getattr, owners, importlib.import_module(module)), name


def replaced():
    """The names of those that a patch has replaced."""
    return {name for owner, name in replaceable() if is_replaced(owner, name)}


def unwrapped(attribute):
    """vLLM's function below a patch's, a class or static method if it was one."""
    kind = type(attribute) if isinstance(attribute, classmethod | staticmethod) else None
    function = attribute.__func__ if kind else attribute
    return kind(function.__wrapped__) if kind else function.__wrapped__


@pytest.fixture
def stock_vllm(monkeypatch):
    """vLLM's own code where the patches would be, even if an engine of this process has loaded them."""
    import vllm.v1.sample.rejection_sampler
    from vllm.model_executor.kernels import linear
    from vllm.model_executor.layers.mamba.ops.cpu import causal_conv1d, gdn_attention
    from vllm.model_executor.models import config
    from vllm.model_executor.models.registry import ModelRegistry, _LazyRegisteredModel
    from vllm.platforms.interface import PlatformEnum
    from vllm.v1.sample import sampler
    from vllm.v1.sample.ops import logprobs

    for owner, name in replaceable():
        if is_replaced(owner, name):
            monkeypatch.setattr(owner, name, unwrapped(vars(owner)[name]))
        else:
            monkeypatch.setattr(owner, name, vars(owner)[name])  # so that it is as before after the test
    kernels = [
        kernel
        for kernel in linear._POSSIBLE_KERNELS[PlatformEnum.CPU]
        if not kernel.__module__.startswith("slimqwen")
    ]
    if linear.CPUWNA16LinearKernel not in kernels:
        kernels.append(linear.CPUWNA16LinearKernel)
    monkeypatch.setitem(linear._POSSIBLE_KERNELS, PlatformEnum.CPU, kernels)
    mtp_head = _LazyRegisteredModel("vllm.model_executor.models.qwen3_5_mtp", "Qwen3_5MTP")
    monkeypatch.setitem(ModelRegistry.models, "Qwen3_5MTP", mtp_head)
    for architecture in ("Qwen3_5ForCausalLM", "Qwen3_5MoeForCausalLM"):
        monkeypatch.setitem(config.MODELS_CONFIG_MAP, architecture, config.Qwen3_5ForCausalLMConfig)
    for module in (causal_conv1d, gdn_attention):
        monkeypatch.setattr(module, "F", torch.nn.functional)
    monkeypatch.setattr(sampler, "batched_count_greater_than", logprobs.batched_count_greater_than)
    # A patch or a digest imports it anew; afterwards it is the one of before for both ways to import it.
    monkeypatch.setattr(vllm.v1.sample, "rejection_sampler", vllm.v1.sample.rejection_sampler)
    monkeypatch.delitem(sys.modules, "vllm.v1.sample.rejection_sampler", raising=False)
    monkeypatch.setenv("VLLM_CPU_INT4_W4A8", "1")  # so that it is as before after the test
    monkeypatch.delenv("VLLM_CPU_INT4_W4A8")
