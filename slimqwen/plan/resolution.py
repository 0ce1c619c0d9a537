"""vLLM's configuration, kernels, CUDA graphs and KV cache for a server command, by vLLM's own code, without weights.

The process sees the CPU or a simulated GPU (`slimqwen.plan.rehearsal`). vLLM's parser and config classes make the
engine's configuration. vLLM's models are built on torch's meta device, so that attention backends and quantised kernels
are chosen with their real arguments. vLLM's own code aligns the blocks, lays out the KV cache in the memory that is
left, resolves the CUDA graphs, and loads every tensor name of the checkpoint. A plan does not show whether a kernel
launches, is right or is fast. It does not measure activations as vLLM's start-up does, but assumes `OVERHEAD_GIB`.
"""

import contextlib
import tempfile
import types
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any
from unittest.mock import patch

from slimqwen.checkpoint.tensors import list_tensors, torch_dtype
from slimqwen.plan.facts import Graphs, KvCache, LinearKernels
from slimqwen.plan.meta_device import on_meta_device
from slimqwen.serving import flags
from slimqwen.vllm_plugin import engine_facts

OVERHEAD_GIB = 1.5
"""Assumed memory on a GPU beside weights and KV cache, GiB: activations of the profiled step, CUDA context, graphs."""

_SHARED_WITH_TARGET = ("embed_tokens", "lm_head")


def make_engine_config(argv: Sequence[str]) -> Any:
    """The engine configuration that vLLM derives from a server's flags; raises what vLLM raises for wrong flags."""
    from vllm.engine.arg_utils import AsyncEngineArgs
    from vllm.platforms import current_platform
    from vllm.usage.usage_lib import UsageContext
    from vllm.utils.argparse_utils import FlexibleArgumentParser

    cli_args = flags.import_cli_args()
    arguments = cli_args.make_arg_parser(FlexibleArgumentParser()).parse_args(list(argv))
    cli_args.validate_parsed_serve_args(arguments)
    config = AsyncEngineArgs.from_cli_args(arguments).create_engine_config(UsageContext.OPENAI_API_SERVER)
    if current_platform.is_cuda():
        # vLLM's worker does this when it starts: bfloat16 needs compute capability 8.0.
        current_platform.check_if_supports_dtype(config.model_config.dtype)
    return config


@contextlib.contextmanager
def _as_one_of_several(config: Any) -> Iterator[None]:
    """Build and load models as on the first of several GPUs that share them, without processes for the others.

    Nothing communicates on the meta device, so it is enough to change the size of vLLM's group.
    """
    from vllm.distributed import get_tp_group

    with patch.object(get_tp_group(), "world_size", config.parallel_config.tensor_parallel_size):
        yield


def build_models(config: Any) -> tuple[Any, Any]:
    """Build target model and draft model on the meta device; with several GPUs, the part that one GPU holds.

    The draft model is an MTP head or a separate model. It is None without drafts and for prompt lookup.
    """
    from vllm.config import set_current_vllm_config
    from vllm.distributed import ensure_model_parallel_initialized, init_distributed_environment
    from vllm.model_executor.model_loader.utils import initialize_model
    from vllm.utils.torch_utils import set_default_torch_dtype

    with set_current_vllm_config(config), tempfile.TemporaryDirectory(prefix="slimqwen-plan-") as folder:
        init_distributed_environment(1, 0, f"file://{folder}/rendezvous", 0, backend="gloo")
        ensure_model_parallel_initialized(1, 1)
        with (
            set_default_torch_dtype(config.model_config.dtype),
            on_meta_device(),
            _as_one_of_several(config),
        ):
            target = initialize_model(config, model_config=config.model_config)
            return target, _build_draft(config)


def _build_draft(config: Any) -> Any:
    """The draft model, as the speculator of vLLM's model runner builds it; None for a speculator without a model."""
    from vllm.compilation.backends import set_model_tag
    from vllm.config import replace
    from vllm.model_executor.model_loader.utils import initialize_model

    speculation = config.speculative_config
    if speculation is not None and speculation.use_eagle():
        with set_model_tag("eagle_head"):
            return initialize_model(config, model_config=speculation.draft_model_config)
    if speculation is not None and speculation.uses_draft_model():
        own = replace(config, model_config=speculation.draft_model_config, quant_config=None)
        with set_model_tag("draft_model"):
            return initialize_model(own, prefix="draft_model")
    return None


def align_blocks(config: Any) -> None:
    """Make vLLM's platform choose the block sizes, as vLLM does after its models are built."""
    from vllm.platforms import current_platform

    current_platform.update_block_size_for_backend(config)
    config.validate_block_size()


def list_linear_kernels(target: Any, draft: Any) -> list[LinearKernels]:
    """The linear layers of the models, grouped by their kernel."""
    groups: dict[str, dict[str, int]] = {}
    for model in filter(None, (target, draft)):
        for name, module in model.named_modules():
            method = getattr(module, "quant_method", None)
            if method is None:
                continue
            scheme = getattr(module, "scheme", None)
            kernel = getattr(scheme, "kernel", None) or getattr(method, "kernel", None)
            label = type(kernel or scheme or method).__name__
            kind = ("draft " if model is draft else "") + ".".join(name.split(".")[-2:])
            kinds = groups.setdefault(label, {})
            kinds[kind] = kinds.get(kind, 0) + 1
    return [LinearKernels(kernel=label, layers=kinds) for label, kinds in sorted(groups.items())]


def samples_with_flashinfer() -> bool:
    """Whether vLLM uses FlashInfer's kernel for requests with top-k or top-p."""
    from vllm.v1.sample.ops.topk_topp_sampler import flashinfer_sampler_supported

    return bool(flashinfer_sampler_supported())


def count_weight_bytes(config: Any, target: Any, draft: Any) -> dict[str, int]:
    """Count bytes of parameters by kind; tensors that the MTP head shares with the target count once."""
    totals: dict[str, int] = {}
    shared = _shared_names(config)
    for model in filter(None, (target, draft)):
        for name, tensor in model.named_parameters():
            if model is draft and any(part in name for part in shared):
                continue
            kind = "draft head" if model is draft else _weight_kind(name)
            totals[kind] = totals.get(kind, 0) + tensor.numel() * tensor.element_size()
    return totals


def _shared_names(config: Any) -> tuple[str, ...]:
    """Parts of the names of parameters that the draft model shares with the target; a model of its own shares none."""
    speculation = config.speculative_config
    return _SHARED_WITH_TARGET if speculation is not None and speculation.use_eagle() else ()


def _weight_kind(name: str) -> str:
    kinds = {
        "embed_tokens": "embedding",
        "lm_head": "output head",
        ".mlp.": "MLP",
        ".self_attn.": "attention",
        ".linear_attn.": "linear attention",
    }
    return next((kind for part, kind in kinds.items() if part in name), "norms and others")


def lay_out_kv_cache(config: Any, parameter_bytes: int, device_bytes: int | None) -> tuple[KvCache, Any]:
    """The KV cache that vLLM lays out in the memory that weights and the assumed overhead leave.

    Args:
        parameter_bytes: bytes of all parameters.
        device_bytes: total memory of the GPU; None for a CPU, whose pool is set by config.env or vLLM's platform.

    Returns:
        The facts, and vLLM's own layout, which `resolve_graphs` needs.

    Raises:
        ValueError: not even one request of full length fits.
    """
    from vllm.config import set_current_vllm_config
    from vllm.v1.core import kv_cache_utils
    from vllm.v1.worker.gpu.attn_utils import get_kv_cache_spec

    cache = config.cache_config
    if cache.kv_cache_memory_bytes:
        available = int(cache.kv_cache_memory_bytes)
    elif device_bytes is None:
        available = int(cache.cpu_kvcache_space_bytes)
    else:
        available = int(cache.gpu_memory_utilization * device_bytes - parameter_bytes - OVERHEAD_GIB * 2**30)
    with set_current_vllm_config(config):
        specs = get_kv_cache_spec(config)
        _resolve_layout(config, specs)
        layout = _lay_out_blocks(config, specs, available)
        sequences = kv_cache_utils.get_max_concurrency_for_kv_cache_config(config, layout)
        scheduler_block, hash_block = kv_cache_utils.resolve_kv_cache_block_sizes(layout, config)
        alignment = kv_cache_utils.resolve_cache_hit_alignment_tokens(
            layout, config, scheduler_block, hash_block
        )
    shortest_with_hit = None
    if cache.enable_prefix_caching:
        # The last token is always computed. A draft model that reads the target's hidden states needs those of the last
        # whole block of a hit: vLLM computes it again, or, from 0.33 on, has the token after a block in its hash.
        speculation = config.speculative_config
        proof = getattr(config, "num_hash_lookahead_tokens", 0)
        recomputes = speculation is not None and speculation.use_eagle_block_drop() and not proof
        shortest_with_hit = (2 if recomputes else 1) * alignment + max(1, proof)
    facts = KvCache(
        available_bytes=available,
        block_size=cache.block_size,
        blocks=layout.num_blocks,
        tokens=int(sequences * config.model_config.max_model_len),
        sequences_at_max_model_len=round(sequences, 2),
        shortest_prompt_with_hit=shortest_with_hit,
    )
    return facts, layout


def _lay_out_blocks(config: Any, specs: Mapping[str, Any], available_bytes: int) -> Any:
    """The layout of the KV cache of one worker, made as in vLLM's engine core."""
    try:
        from vllm.v1.core import kv_cache_planning
    except ImportError:  # vLLM up to 0.32, which groups the layers in the same function
        from vllm.v1.core.kv_cache_utils import get_kv_cache_configs

        (layout,) = get_kv_cache_configs(config, [specs], [available_bytes])
        return layout
    groups = kv_cache_planning.get_global_kv_cache_groups(config, [specs])
    (layout,) = kv_cache_planning.get_kv_cache_configs(config, [specs], [available_bytes], groups)
    return layout


def _resolve_layout(config: Any, specs: Mapping[str, Any]) -> None:
    """Choose a KV layout that the backends of all layers support, as vLLM's engine core does."""
    from vllm.v1.attention.backends.utils import resolve_kv_cache_layout
    from vllm.v1.worker.worker_base import WorkerBase

    supported = WorkerBase.get_supported_kv_cache_layouts(types.SimpleNamespace(vllm_config=config))
    resolve_kv_cache_layout(config, [supported], list(specs.values()))


def resolve_graphs(config: Any, layout: Any) -> Graphs:
    """CUDA graphs: their mode after vLLM's fallbacks, and the step sizes that runner V2 captures for the target."""
    import torch
    from vllm.config import get_layers_from_vllm_config, set_current_vllm_config
    from vllm.model_executor.layers.attention_layer_base import AttentionLayerBase
    from vllm.v1.attention.backend import AttentionCGSupport
    from vllm.v1.worker.gpu.cudagraph_utils import CudaGraphManager

    weakest, weakest_backend = AttentionCGSupport.ALWAYS, None
    compilation = config.compilation_config
    with set_current_vllm_config(config):
        layers = get_layers_from_vllm_config(config, AttentionLayerBase)
        for group in layout.kv_cache_groups:
            for name in group.layer_names:
                backend = layers[name].get_attn_backend()
                spec = getattr(group.kv_cache_spec, "kv_cache_specs", {}).get(name, group.kv_cache_spec)
                level = backend.get_builder_cls().get_cudagraph_support(config, spec)
                if level.value < weakest.value:
                    weakest, weakest_backend = level, backend.__name__
        mode = compilation.resolve_cudagraph_mode_and_sizes(
            weakest,
            weakest_backend,
            config.uniform_decode_query_len,
            use_v2_model_runner=config.use_v2_model_runner,
            kv_cache_config=layout,
            max_num_reqs=config.scheduler_config.max_num_seqs,
        )
        compilation.cudagraph_mode = mode
        captured = {}
        if config.use_v2_model_runner:
            depth = config.uniform_decode_query_len
            manager = CudaGraphManager(config, torch.device("cpu"), mode, decode_query_len=depth)
            captured = engine_facts.captured_sizes(manager)
    return Graphs(mode=mode.name, captured=captured, decode_query_len=config.uniform_decode_query_len)


def load_names(config: Any, target: Any, draft: Any) -> None:
    """Pass every tensor of the checkpoint, and of a separate draft model's, through vLLM's loaders, without content.

    Raises:
        ValueError: a parameter has no tensor.
        Exception: vLLM's loaders refuse a name that no parameter has, or a shape that does not fit.
    """
    import torch
    from vllm.config import set_current_vllm_config

    folders = {target: config.model_config.model}
    if draft is not None:
        folders[draft] = config.speculative_config.draft_model_config.model
    with set_current_vllm_config(config), on_meta_device(), _as_one_of_several(config):
        for model, folder in folders.items():
            tensors = list_tensors(Path(folder))
            weights = (
                (name, torch.empty(info.shape, dtype=torch_dtype(info.dtype), device="meta"))
                for name, info in tensors.items()
            )
            loaded = set(model.load_weights(weights) or ())
            # vLLM fills in scales of the KV cache after loading if the checkpoint has none.
            optional = (".attn.", *(_shared_names(config) if model is draft else ()))
            names = {
                name for name, _ in model.named_parameters() if not any(part in name for part in optional)
            }
            if missing := sorted(names - loaded):
                raise ValueError(f"the checkpoint has no tensor for {', '.join(missing[:3])}")
