"""vLLM's own warm-up of its kernels on a simulated GPU: the model runner takes real steps without launching a kernel.

vLLM's V2 model runner is made as in vLLM's worker, with a KV cache of the planned layout. Its warm-up then builds
requests with every sampling feature and schedules the steps of a server: a prefill; verify steps in which all, one and
none of the sequences have drafts; a prefill beside a decode (vllm/v1/worker/gpu/warmup.py, vllm/model_executor/warmup).
Tensors are on torch's meta device, so layers, metadata builders, sampler and drafter take the same branches as on the
GPU, and each Triton kernel would be launched with the dtypes, strides and constants of the variant.
"""

import contextlib
import functools
import os
from collections.abc import Callable, Collection, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

from slimqwen.plan import jit_modules, meta_device, triton_kernels
from slimqwen.plan.devices import Gpu
from slimqwen.plan.facts import TritonKernels
from slimqwen.vllm_plugin import triton_cache

_LIBRARY_ATTENTION = ("FLASH_ATTN", "FLASHINFER")
"""Attention backends whose kernels are in a library; their layers return the output buffer unchanged here."""

_SCHEDULE_OPERATOR = "_vllm_fa3_C::get_scheduler_metadata"

_NOT_COVERED = (
    "kernels that torch.compile writes, which come with its graphs",
    "what FlashInfer and Humming compile, which the plan lists",
    "kernels of images and of LoRA",
)


def compile_kernels(
    config: Any, target: Any, draft: Any, layout: Any, gpu: Gpu, cache: Path, baked: Collection[str]
) -> tuple[TritonKernels, list[str]]:
    """Compile every Triton kernel that vLLM's warm-up launches for a variant.

    Args:
        config: vLLM's configuration, after its blocks were aligned and its graphs resolved.
        target: the model on the meta device.
        draft: the model's MTP head on the meta device; None without drafts.
        layout: vLLM's layout of the KV cache.
        cache: folder of Triton's cache.
        baked: names of the folders of Triton's cache that are in the archive beside the checkpoint.

    Returns:
        The kernels, and the names of their folders in Triton's cache.
    """
    left_out = list(_NOT_COVERED)
    compilations: list[triton_kernels.Compilation] = []
    if config.use_v2_model_runner:
        os.environ["TRITON_CACHE_DIR"] = str(cache)
        triton_cache.find_beside_group_file()
        with _patched_driver(), triton_kernels.compiled_not_launched() as compilations:
            _run_warm_up(config, target, draft, layout, left_out)
    else:
        left_out.append("all of them: this is not vLLM's V2 model runner")
    major, minor = gpu.capability
    folders = sorted({compilation.folder for compilation in compilations if compilation.folder})
    kernels = TritonKernels(
        target=f"sm_{major}{minor}",
        kernels=triton_kernels.summarise_kernels(compilations, gpu),
        left_out=list(dict.fromkeys(left_out)),
        forms=len(folders),
        compiled_at_start=len(set(folders) - set(baked)),
    )
    return kernels, folders


def _run_warm_up(config: Any, target: Any, draft: Any, layout: Any, left_out: list[str]) -> None:
    import torch
    from vllm.config import set_current_vllm_config
    from vllm.model_executor.warmup.mamba_triton_warmup import mamba_triton_warmup
    from vllm.model_executor.warmup.qwen_triton_warmup import qwen_triton_warmup
    from vllm.v1.worker.gpu import warmup
    from vllm.v1.worker.gpu.model_runner import GPUModelRunner

    device = torch.device("cuda:0")
    with set_current_vllm_config(config):
        for model in filter(None, (target, draft)):
            _prepare_linears(config, model, device, left_out)
        with torch.inference_mode():
            runner = GPUModelRunner(config, device)
            if draft is not None:
                runner.speculator.load_draft_model = functools.partial(_built_draft, draft)
            runner.load_model(model=target)
            runner.initialize_kv_cache(layout)
            runner._init_kv_zero_meta()
            _run_eagerly(target, draft)
            _skip_library_attention(runner, left_out)
            steps: dict[str, Callable[[], object]] = {
                "Gated DeltaNet kernels": lambda: qwen_triton_warmup(runner, config.model_config),
                "copies of states": lambda: mamba_triton_warmup(runner),
                "prefill and verify steps": lambda: warmup.warmup_kernels(
                    runner, runner.execute_model, runner.sample_tokens
                ),
                "a prefill beside a decode": lambda: warmup.run_mixed_prefill_decode_warmup(
                    runner,
                    runner.execute_model,
                    runner.sample_tokens,
                    min(runner.max_num_tokens, runner.max_model_len),
                ),
            }
            for name, step in steps.items():
                try:
                    step()
                except Exception as error:  # kernels that were compiled before it count
                    reason = " ".join(f"{type(error).__name__}: {error}".split())[:300]
                    left_out.append(f"the rest of vLLM's warm-up from {name} on, which ended: {reason}")
                    _log(error)
                    return


def _prepare_linears(config: Any, model: Any, device: Any, left_out: list[str]) -> None:
    """Make linear kernels rearrange their weights; if that needs a GPU, their products return an empty tensor."""
    import torch
    from vllm.model_executor.model_loader.utils import process_weights_after_loading

    try:
        process_weights_after_loading(model, config.model_config, device)
    except Exception as error:  # Humming rearranges its weights with a kernel that it compiles and launches
        _log(error)
        kernels = set()

        def product(layer: Any, values: Any, bias: Any = None) -> Any:
            # The class of an output head is that of an embedding.
            rows = getattr(layer, "output_partition_sizes", None) or [layer.num_embeddings_per_partition]
            return torch.empty((*values.shape[:-1], sum(rows)), dtype=values.dtype, device=values.device)

        for module in model.modules():
            method: Any = getattr(module, "quant_method", None)
            kernel = getattr(getattr(module, "scheme", None), "kernel", None) or getattr(
                method, "kernel", None
            )
            if kernel is not None:
                kernels.add(type(kernel).__name__)
                method.apply = product
        left_out.append(f"kernels of {', '.join(sorted(kernels))}, whose weights only a GPU rearranges")


def _built_draft(draft: Any, target: Any, target_layers: set[str]) -> Any:
    """Stand-in for vLLM's loading of the MTP head; as there, its layers leave the names of the target's layers."""
    target_layers -= {name for name in target_layers if name.startswith("mtp.")}
    return draft


def _run_eagerly(*models: Any) -> None:
    """Make models run without torch.compile, which would launch the kernels that it compiles."""
    for model in filter(None, models):
        for module in model.modules():
            if hasattr(module, "do_not_compile"):
                module.do_not_compile = True


def _skip_library_attention(runner: Any, left_out: list[str]) -> None:
    """Make layers whose attention is in a library return their output buffer unchanged."""
    draft_groups = getattr(runner.speculator, "attn_groups", None) or []
    backends = {group.backend for groups in (*runner.attn_groups, *draft_groups) for group in groups}
    for backend in backends:
        if backend.get_name() in _LIBRARY_ATTENTION:
            backend.get_impl_cls().forward = (
                lambda self, layer, q, k, v, cache, metadata, output, *rest, **named: output
            )
            left_out.append(f"kernels of {backend.get_name()}, which are not Triton's")


@contextlib.contextmanager
def _patched_driver() -> Iterator[None]:
    """Replace FlashInfer's libraries, and calls of steps that would reach the driver in spite of `simulated_gpu`."""
    import torch
    from flashinfer.jit.core import JitSpec
    from vllm.model_executor.layers.mamba.gdn import qwen_gdn_linear_attn
    from vllm.v1.worker.gpu import buffer_utils

    @contextlib.contextmanager
    def no_op(*arguments: Any, **keywords: Any) -> Iterator[None]:
        yield

    answers: dict[str, Callable[..., Any]] = dict.fromkeys(("stream", "device"), no_op)
    answers |= dict.fromkeys(("set_stream", "reset_peak_memory_stats"), lambda *arguments: None)
    answers |= dict.fromkeys(
        ("max_memory_allocated", "memory_allocated", "memory_reserved"), lambda *arguments: 0
    )
    with contextlib.ExitStack() as patches:
        for name, answer in answers.items():
            patches.enter_context(patch.object(torch.cuda, name, answer))
        patches.enter_context(patch.object(torch.accelerator, "device_index", no_op))
        patches.enter_context(patch.object(torch.cuda, "default_generators", (_generator(),)))
        patches.enter_context(
            patch.object(JitSpec, "build_and_load", lambda spec: jit_modules.UnloadedLibrary())
        )
        patches.enter_context(
            patch.object(qwen_gdn_linear_attn, "fi_chunk_gated_delta_rule", _library_prefill)
        )
        view = functools.partial(torch.empty_like, device="meta")
        patches.enter_context(patch.object(buffer_utils, "get_accelerator_view_from_cpu_tensor", view))
        patches.enter_context(meta_device.meta_for_cuda())
        patches.enter_context(meta_device.python_operators({_SCHEDULE_OPERATOR: _schedule}))
        yield


def _generator() -> Any:
    """Stand-in for a GPU's random number generator, whose state is seed and offset, eight bytes each."""
    import torch

    return SimpleNamespace(
        get_state=lambda: torch.zeros(16, dtype=torch.uint8, device="cpu"), set_state=lambda state: None
    )


def _schedule() -> Any:
    """Stand-in for a schedule of FlashAttention 3, which only its own kernel reads."""
    import torch

    return torch.empty(1, dtype=torch.int32, device="meta")


def _library_prefill(*, v: Any, initial_state: Any, **inputs: Any) -> tuple[Any, Any]:
    """Stand-in for FlashInfer's Gated DeltaNet prefill: results of the right shapes."""
    import torch

    return torch.empty_like(v), torch.empty_like(initial_state)


def _log(error: Exception) -> None:
    import logging

    logging.getLogger(__name__).warning("part of the warm-up was left out", exc_info=error)
