"""The kernels that FlashInfer and Humming compile at first use, and FlashInfer's libraries compiled ahead.

vLLM and FlashInfer themselves decide which libraries a variant loads: vLLM's builders of attention metadata have the
dtypes, and FlashInfer's entry points name the library. Compiling one needs nvcc, ninja and a C++ compiler, but no GPU.
Kernels of Triton and graphs of torch.compile, which every host can compile, are left out.
"""

import contextlib
import shutil
import time
from collections.abc import Collection, Iterator, Mapping, Sequence
from pathlib import Path
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


def specify_libraries(config: Any, layout: Any, modules: Sequence[JitModule]) -> dict[str, list[Any]]:
    """FlashInfer's specifications of the libraries of each module that can be compiled ahead.

    Args:
        config: vLLM's configuration, after its models were built and its blocks aligned.
        layout: vLLM's layout of the KV cache.
        modules: modules of the variant (`list_modules`).

    Returns:
        Module -> `JitSpec` of each library. Left out are Humming, Gated DeltaNet prefill (CuTe DSL, compiled by Python)
        and attention by trtllm-gen or XQA (vLLM's choice on compute capability 9.0, 10.x and 12.x).
    """
    names = {module.module for module in modules}
    specs_by_module: dict[str, list[Any]] = {}
    if ATTENTION in names:
        specs_by_module[ATTENTION] = _attention(config, layout)
    if SAMPLING in names:
        from flashinfer.sampling import get_sampling_module

        with _recorded() as specs:
            get_sampling_module()
        specs_by_module[SAMPLING] = specs
    return {module: specs for module, specs in specs_by_module.items() if specs}


def _attention(config: Any, layout: Any) -> list[Any]:
    """Libraries of the prefill and decode wrappers, by the rules of their `plan` (flashinfer/prefill.py, decode.py)."""
    import torch
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
        return []
    gpu, fp8 = torch.device("cuda"), {torch.float8_e4m3fn, torch.float8_e5m2}
    with _recorded() as specs:
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
    return specs


class UnloadedLibrary:
    """Replacement for a library of FlashInfer; its functions do nothing, as the real ones only write to arguments."""

    def __getattr__(self, name: str) -> Any:
        return lambda *arguments, **keywords: None


@contextlib.contextmanager
def _recorded() -> Iterator[list[Any]]:
    """Collect the libraries that FlashInfer would load, and load none."""
    from flashinfer.jit.core import JitSpec

    specs: list[Any] = []

    def record(spec: Any) -> UnloadedLibrary:
        specs.append(spec)
        return UnloadedLibrary()

    with patch.object(JitSpec, "build_and_load", record):
        yield specs


def name_libraries(
    modules: Sequence[JitModule], specs: Mapping[str, Sequence[Any]], baked: Collection[str]
) -> list[JitModule]:
    """The modules with the names of their libraries in `specs`; `baked` are those that an archive has."""
    named = [
        module.model_copy(update={"libraries": sorted(spec.name for spec in specs.get(module.module, ()))})
        for module in modules
    ]
    return mark_baked(named, baked)


def mark_baked(modules: Sequence[JitModule], libraries: Collection[str]) -> list[JitModule]:
    """The modules, with `baked` set for those whose libraries are all among `libraries`, which were compiled ahead."""
    return [
        module.model_copy(
            update={"baked": bool(module.libraries) and set(module.libraries) <= set(libraries)}
        )
        for module in modules
    ]


def build_libraries(specs: Sequence[Any], folder: Path) -> dict[str, float]:
    """Compile libraries to <folder>/<name>/<name>.so, for the compute capability of the GPU that this process sees.

    FlashInfer compiles below FLASHINFER_WORKSPACE_BASE, where a second build reuses what is up to date.

    Returns:
        Library -> seconds of its compilation.

    Raises:
        RuntimeError: a compiler failed; the message quotes its output.
    """
    seconds: dict[str, float] = {}
    for spec in specs:
        started = time.monotonic()
        spec.build()
        seconds[spec.name] = round(time.monotonic() - started, 1)
        library = folder / spec.name / f"{spec.name}.so"
        library.parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(spec.jit_library_path, library)
    return seconds
