"""The committed tiny model, texts of its world, and vLLM as it comes."""

import itertools
import sys
from pathlib import Path

import pytest
import torch

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


def patched_places():
    """(owner, name) of every attribute of vLLM or torch that a fix replaces, but those that `stock_vllm` names."""
    from torch._dynamo.aot_compile_types import BundledAOTAutogradSerializableCallable
    from torch._inductor.cpp_builder import CppBuilder
    from vllm import _custom_ops
    from vllm.distributed.device_communicators.shm_broadcast import SpinCondition
    from vllm.model_executor.layers.mamba.ops.cpu import gdn_attention
    from vllm.model_executor.models import registry
    from vllm.platforms.cpu import CpuPlatform
    from vllm.sampling_params import SamplingParams
    from vllm.utils import cpu_triton_utils
    from vllm.v1.attention.backends import cpu_attn
    from vllm.v1.core.sched.scheduler import Scheduler
    from vllm.v1.engine.core import EngineCoreProc
    from vllm.v1.executor.multiproc_executor import WorkerProc
    from vllm.v1.sample import rejection_sampler
    from vllm.v1.sample.ops import topk_topp_sampler
    from vllm.v1.worker import gpu_model_runner
    from vllm.v1.worker.gpu_model_runner import GPUModelRunner
    from vllm.v1.worker.mamba_utils import MambaSpecDecodeGPUContext

    return (
        (BundledAOTAutogradSerializableCallable, "deserialize_compile_artifacts"),
        (CppBuilder, "__init__"),
        (_custom_ops, "create_onednn_mm"),
        (_custom_ops, "onednn_mm"),
        (_custom_ops, "fused_sigmoid_gating_delta_rule_update_cpu"),
        (SpinCondition, "record_read"),
        (gdn_attention, "_spec_forward"),
        (gdn_attention, "_causal_conv1d_fwd_cpu"),
        (gdn_attention, "causal_conv1d_torch"),
        (cpu_attn.CPUAttentionBackendImpl, "forward"),
        (registry, "_run_in_subprocess"),
        (CpuPlatform, "check_and_update_config"),
        (cpu_triton_utils, "_expand_kernel_impl"),
        (Scheduler, "_update_after_schedule"),
        (EngineCoreProc, "run_engine_core"),
        (WorkerProc, "worker_main"),
        (gpu_model_runner, "build_logitsprocs"),
        (rejection_sampler.RejectionSampler, "apply_logits_processors"),
        (rejection_sampler, "apply_sampling_constraints"),
        (SamplingParams, "_validate_spec_decode"),
        (GPUModelRunner, "sample_tokens"),
        (topk_topp_sampler, "apply_top_k_only"),
        (MambaSpecDecodeGPUContext, "run_fused_precopy"),
        (MambaSpecDecodeGPUContext, "run_fused_postprocess"),
    )


def unwrapped(attribute):
    """vLLM's function below a fix's, a class or static method if it was one."""
    kind = type(attribute) if isinstance(attribute, classmethod | staticmethod) else None
    function = attribute.__func__ if kind else attribute
    stock = getattr(function, "__wrapped__", function)
    return kind(stock) if kind else stock


@pytest.fixture
def stock_vllm(monkeypatch):
    """vLLM's own code where the fixes would be, even if an engine of this process has loaded them."""
    from vllm.model_executor.kernels import linear
    from vllm.model_executor.layers.mamba.ops.cpu import causal_conv1d, gdn_attention
    from vllm.model_executor.models import config
    from vllm.platforms.interface import PlatformEnum
    from vllm.v1.sample import sampler
    from vllm.v1.sample.ops import logprobs

    for owner, name in patched_places():
        monkeypatch.setattr(owner, name, unwrapped(vars(owner)[name]))
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
    for module in (causal_conv1d, gdn_attention):
        monkeypatch.setattr(module, "F", torch.nn.functional)
    monkeypatch.setattr(sampler, "batched_count_greater_than", logprobs.batched_count_greater_than)
    monkeypatch.delitem(sys.modules, "vllm.v1.sample.rejection_sampler", raising=False)
    monkeypatch.setenv("VLLM_CPU_INT4_W4A8", "1")  # so that it is as before after the test
    monkeypatch.delenv("VLLM_CPU_INT4_W4A8")
