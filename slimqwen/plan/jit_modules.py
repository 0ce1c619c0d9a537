"""The kernels that FlashInfer and Humming compile at their first use.

Compiling FlashInfer's needs nvcc, ninja and a C++ compiler. Kernels of Triton and graphs of torch.compile, which every
host can compile, are left out.
"""

from collections.abc import Sequence
from typing import Any
from unittest.mock import patch

from slimqwen.plan import resolution
from slimqwen.plan.facts import JitModule, LinearKernels
from slimqwen.serving import cuda_toolkit
from slimqwen.vllm_plugin.engine_facts import AttentionLayers

ATTENTION, SAMPLING = "FlashInfer attention", "FlashInfer sampling"
GDN_PREFILL, HUMMING = "FlashInfer Gated DeltaNet prefill", "Humming W4A16"

_FLASHINFER_BACKEND = "FLASHINFER"
_NO_POSITIONS = 0  # PosEncodingMode.NONE: vLLM rotates queries and keys itself


def list_modules(attention: Sequence[AttentionLayers], linears: Sequence[LinearKernels]) -> list[JitModule]:
    """The modules that the layers and the sampler of a variant need."""
    # The compilers may be in this Python environment; Humming compiles with the lock's NVRTC.
    compiles = not cuda_toolkit.missing()
    modules: dict[str, JitModule] = {}

    def add(module: str, reason: str, possible: bool) -> None:
        modules[module] = JitModule(module=module, reason=reason, possible=possible)

    for layers in attention:
        if layers.backend == _FLASHINFER_BACKEND:
            add(ATTENTION, f"{layers.layer} uses {layers.backend}", compiles)
        if "flashinfer" in layers.prefill.lower():
            add(GDN_PREFILL, f"{layers.layer} prefills with {layers.prefill}", compiles)
    if resolution.samples_with_flashinfer():
        add(SAMPLING, "requests with top-k or top-p and no seed", compiles)
    for group in linears:
        if "Humming" in group.kernel:
            add(HUMMING, f"linears use {group.kernel}", True)
    return list(modules.values())


def check_attention(config: Any, layout: Any) -> None:
    """Ask FlashInfer for the attention libraries of a variant, by the rules of its wrappers' `plan`, and load none.

    vLLM's builders of attention metadata have the dtypes. Attention by trtllm-gen or XQA (vLLM's choice on compute
    capability 9.0, 10.x and 12.x) is not checked.

    Args:
        config: vLLM's configuration, after its models were built and its blocks aligned.
        layout: vLLM's layout of the KV cache.

    Raises:
        Exception: FlashInfer's own refusal, such as that of FP8 queries on compute capability 10.x.
    """
    import torch
    from flashinfer.jit.core import JitSpec
    from flashinfer.prefill import get_batch_prefill_module
    from flashinfer.utils import determine_attention_backend
    from vllm.config import set_current_vllm_config
    from vllm.v1.worker.gpu.attn_utils import init_attn_backend

    with set_current_vllm_config(config):
        # Any device will do: the builders' buffers are small, and nothing is launched.
        groups, *_ = init_attn_backend(layout, config, torch.device("cpu"))
    builders = [
        group.get_metadata_builder()
        for groups_of_layout in groups
        for group in groups_of_layout
        if group.backend.get_name() == _FLASHINFER_BACKEND
    ]
    if any(builder.use_trtllm_decode_attention or builder.use_dcp for builder in builders):
        return
    gpu, fp8 = torch.device("cuda"), {torch.float8_e4m3fn, torch.float8_e5m2}
    with patch.object(JitSpec, "build_and_load", lambda spec: _UnloadedLibrary()):
        for builder in builders:
            kv, size = builder.kv_cache_dtype, builder.head_dim
            for q, prefills in ((builder.q_data_type_prefill, True), (builder.q_data_type_decode, False)):
                backend = "fa2"
                if prefills or fp8 & {q, kv}:
                    backend = determine_attention_backend(
                        gpu, _NO_POSITIONS, False, False, q, kv, head_dim_qk=size, head_dim_vo=size
                    )
                get_batch_prefill_module(
                    backend,
                    *(q, kv, config.model_config.dtype, torch.int32, size, size, _NO_POSITIONS),
                    builder.window_left >= 0,
                    (builder.logits_soft_cap or 0.0) > 0,
                    False,
                )


class _UnloadedLibrary:
    """Replacement for a library of FlashInfer, which is asked for its functions and never called."""

    def __getattr__(self, name: str) -> Any:
        return None
