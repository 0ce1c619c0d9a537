"""The committed tiny model in three forms, texts of its world, and vLLM as it comes."""

import importlib.util
import itertools
import json
import sys
from pathlib import Path

import pytest
import torch

_ROOT = Path(__file__).parents[3]


@pytest.fixture(scope="session")
def tiny():
    return _ROOT / "weights" / "tiny"


@pytest.fixture(scope="session")
def tiny_with_mrope(tiny, tmp_path_factory):
    """The tiny model as a real text-only Qwen3.5 says it: with M-RoPE fields in its config.json."""
    folder = tmp_path_factory.mktemp("with_mrope")
    for file in tiny.iterdir():
        (folder / file.name).symlink_to(file)
    config = json.loads((tiny / "config.json").read_text())
    config["rope_parameters"] |= {"mrope_section": [11, 11, 10], "mrope_interleaved": True}
    (folder / "config.json").unlink()
    (folder / "config.json").write_text(json.dumps(config))
    return folder


@pytest.fixture(scope="session")
def texts(tiny):
    """Token IDs of twelve documents of the world, every second one prose, 32 to 200 tokens each."""
    from tokenizers import Tokenizer

    from slimqwen.tinyworld.documents import DocumentSampler
    from slimqwen.tinyworld.world import World

    tokenizer = Tokenizer.from_file(str(tiny / "tokenizer.json"))

    def encoded(kind):
        for document in DocumentSampler(World(), left_out=(), mix={kind: 1.0}).stream(seed=2):
            ids = tokenizer.encode(document.text).ids
            if 32 <= len(ids) <= 200:
                yield ids

    pairs = zip(encoded("prose"), encoded("choice"), strict=False)
    return list(itertools.chain.from_iterable(itertools.islice(pairs, 6)))


@pytest.fixture(scope="session")
def stock_expand():
    """vLLM's own `_expand_kernel_impl`, from a second copy of its module."""
    from vllm.utils import cpu_triton_utils

    spec = importlib.util.spec_from_file_location("stock_cpu_triton_utils", cpu_triton_utils.__file__)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module._expand_kernel_impl


@pytest.fixture
def stock_vllm(monkeypatch, stock_expand):
    """vLLM's own code where the fixes would be, even if an engine of this process has loaded them."""
    from torch._dynamo.aot_compile_types import BundledAOTAutogradSerializableCallable as Saved
    from vllm import _custom_ops
    from vllm.distributed.device_communicators.shm_broadcast import SpinCondition
    from vllm.model_executor.kernels import linear
    from vllm.model_executor.layers.mamba.ops.cpu import causal_conv1d, gdn_attention
    from vllm.model_executor.models import config, registry
    from vllm.platforms.cpu import CpuPlatform
    from vllm.platforms.interface import PlatformEnum
    from vllm.utils import cpu_triton_utils
    from vllm.v1.engine.core import EngineCoreProc
    from vllm.v1.executor.multiproc_executor import WorkerProc
    from vllm.v1.worker.mamba_utils import MambaSpecDecodeGPUContext as Context

    update = _custom_ops.fused_sigmoid_gating_delta_rule_update_cpu
    update = getattr(update, "__wrapped__", update)
    monkeypatch.setattr(_custom_ops, "fused_sigmoid_gating_delta_rule_update_cpu", update)
    for name in ("run_fused_precopy", "run_fused_postprocess"):
        method = getattr(Context, name)
        monkeypatch.setattr(Context, name, getattr(method, "__wrapped__", method))
    kernels = [
        kernel
        for kernel in linear._POSSIBLE_KERNELS[PlatformEnum.CPU]
        if not kernel.__module__.startswith("slimqwen")
    ]
    if linear.CPUWNA16LinearKernel not in kernels:
        kernels.append(linear.CPUWNA16LinearKernel)
    monkeypatch.setitem(linear._POSSIBLE_KERNELS, PlatformEnum.CPU, kernels)
    for architecture in ("Qwen3_5ForCausalLM", "Qwen3_5MoeForCausalLM"):
        monkeypatch.setitem(config.MODELS_CONFIG_MAP, architecture, config.Qwen3_5ForCausalLMConfig)
    loader = Saved.__dict__["deserialize_compile_artifacts"]
    stock_loader = getattr(loader.__func__, "__wrapped__", loader.__func__)
    monkeypatch.setattr(Saved, "deserialize_compile_artifacts", classmethod(stock_loader))
    spec_forward = getattr(gdn_attention._spec_forward, "__wrapped__", gdn_attention._spec_forward)
    monkeypatch.setattr(gdn_attention, "_spec_forward", spec_forward)
    forward = getattr(
        gdn_attention._causal_conv1d_fwd_cpu, "__wrapped__", gdn_attention._causal_conv1d_fwd_cpu
    )
    monkeypatch.setattr(gdn_attention, "_causal_conv1d_fwd_cpu", forward)
    record_read = getattr(SpinCondition.record_read, "__wrapped__", SpinCondition.record_read)
    monkeypatch.setattr(SpinCondition, "record_read", record_read)
    inspect = registry._run_in_subprocess
    monkeypatch.setattr(registry, "_run_in_subprocess", getattr(inspect, "__wrapped__", inspect))
    check = CpuPlatform.__dict__["check_and_update_config"].__func__
    monkeypatch.setattr(
        CpuPlatform, "check_and_update_config", classmethod(getattr(check, "__wrapped__", check))
    )
    for owner, name in ((EngineCoreProc, "run_engine_core"), (WorkerProc, "worker_main")):
        main = getattr(owner, name)
        monkeypatch.setattr(owner, name, staticmethod(getattr(main, "__wrapped__", main)))
    for module in (causal_conv1d, gdn_attention):
        monkeypatch.setattr(module, "F", torch.nn.functional)
    monkeypatch.setattr(cpu_triton_utils, "_expand_kernel_impl", stock_expand)
    for name in ("_rejection_greedy_sample_kernel_impl", "_rejection_random_sample_kernel_impl"):
        kernel = getattr(cpu_triton_utils, name)
        monkeypatch.setattr(cpu_triton_utils, name, getattr(kernel, "__wrapped__", kernel))
    monkeypatch.delitem(sys.modules, "vllm.v1.sample.rejection_sampler", raising=False)
