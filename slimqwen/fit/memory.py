"""A server on one GPU, or on several of one kind: its weights, cache and activations, and how fast it could be.

vLLM takes the share --gpu-memory-utilization of a GPU's memory. What weights and an assumed overhead (activations, CUDA
context, graphs) leave of that becomes blocks of KV cache and states (`architecture.CacheLayout`).
"""

import json
import math
from collections import defaultdict
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any, Self, TypeVar

from slimqwen.fit import FitError, cost
from slimqwen.fit.architecture import CacheLayout, Model, lay_out_cache, read_model
from slimqwen.fit.optimised import Optimised
from slimqwen.fit.subject import Subject
from slimqwen.models.families import find_kind, unshared_heads
from slimqwen.plan.devices import Gpu
from slimqwen.plan.resolution import OVERHEAD_GIB
from slimqwen.variant import read_token_count

DRAFT_DEPTH, SEQUENCES, UTILIZATION, BATCHED_TOKENS = 4, 1, 0.90, 2048
"""Settings of a server that no variant describes: the flags of qwen3.5-4b-best, except the number of sequences."""

DEFAULT_UTILIZATION = 0.92
"""vLLM's default of --gpu-memory-utilization."""

CONTEXT_LEN = 32_768
"""Context of a server that no variant describes, tokens; the model's longest where that is shorter."""

SPEED_CONTEXT_LEN = 2048
"""Cached tokens of the one sequence whose speed is given."""

Number = TypeVar("Number", int, float)


@dataclass(frozen=True)
class ServerSettings:
    """Settings of a server that decide its memory and speed.

    Attributes:
        context_len: prompt and output tokens of the longest request.
        sequences: number of requests that are served at a time.
        depth: drafted tokens per step (K); 0 without drafts.
        dtype, kv_cache_dtype, state_dtype: as vLLM's flags spell them; `auto` is what config.json says.
        utilization: share of the GPU's memory that vLLM may use.
        prefix_caching: whether blocks are kept for later requests.
        gdn_prefill: vLLM's --gdn-prefill-backend, the kernel that computes the prompts of Gated DeltaNet layers.
        batched_tokens: largest number of tokens in a step.
        gpus: number of GPUs, of one kind, that share the model (tensor parallel).
        captured_sequences: most sequences of a decode step that vLLM captures as a CUDA graph, its --max-num-seqs; 0
            without graphs, None for vLLM's default on the GPU.
    """

    context_len: int
    sequences: int
    depth: int
    dtype: str = "auto"
    kv_cache_dtype: str = "auto"
    state_dtype: str = "auto"
    utilization: float = UTILIZATION
    prefix_caching: bool = False
    gdn_prefill: str = "auto"
    batched_tokens: int = BATCHED_TOKENS
    gpus: int = 1
    captured_sequences: int | None = 0

    @classmethod
    def of(
        cls,
        subject: Subject,
        context_len: int | None,
        sequences: int | None,
        gpus: int | None = None,
        gpus_here: int = 1,
    ) -> Self:
        """Read the settings of a variant's config.env; for a model without one, take this project's initial settings.

        The initial settings are one request at a time with a context of 32,768 tokens, or the model's longest if that
        is shorter, and 4 drafted tokens a step if the model has an MTP head.

        Args:
            subject: the checkpoint, with the lines of its config.env if it is a variant.
            context_len, sequences, gpus: replace the subject's own settings; None keeps them.
            gpus_here: number of GPUs of this host, which share a model without a config.env; fewer if its heads cannot
                be divided by so many.

        Raises:
            FitError: the GPUs cannot share the heads, the model was not made for `context_len`, or a setting that has
                to be a number is none.
        """
        flags = {key.removeprefix("VLLM_").lower(): value for key, value in subject.settings.items()}

        def number(key: str, default: Number, read: Callable[[str], Number], example: str = "8") -> Number:
            try:
                return read(flags[key]) if key in flags else default
            except ValueError:
                line = f"VLLM_{key.upper()}={flags[key]}"
                raise FitError(
                    f"{subject.name}: {line}: vLLM cannot read this as a number; write one such as {example}"
                ) from None

        native = int(subject.text.get("max_position_embeddings", CONTEXT_LEN))
        # Settings that a variant's config.env leaves out have vLLM's own defaults.
        depth, utilization, prefix_caching, longest = DRAFT_DEPTH, UTILIZATION, "0", min(native, CONTEXT_LEN)
        if subject.variant:
            try:
                drafts = json.loads(flags.get("speculative_config", "null")) or {}
            except ValueError:
                raise FitError(
                    f"{subject.name}: VLLM_SPECULATIVE_CONFIG={flags['speculative_config']}: this is not JSON; write "
                    'it as in {"method": "mtp", "num_speculative_tokens": 4}'
                ) from None
            # Without a number vLLM drafts as many tokens as the head has layers, which is one in every release.
            depth = int(drafts.get("num_speculative_tokens", 1)) if "mtp" in str(drafts.get("method")) else 0
            utilization, prefix_caching, longest = DEFAULT_UTILIZATION, "1", native
        own = number("max_model_len", longest, read_token_count, "4096, 4k or 4K")
        # With "auto" vLLM takes all positions, or as many as the memory holds.
        length = context_len or (native if own == -1 else own)
        if not 1 <= length <= native:
            raise FitError(
                f"{subject.name} was made for contexts of 1 to {native:,} tokens, not {length:,}; correct --context"
            )
        if gpus is None and subject.variant is None:
            gpus = next(each for each in range(gpus_here, 0, -1) if not unshared_heads(subject.text, each))
        cure = "set VLLM_TENSOR_PARALLEL_SIZE" if gpus is None else "set --gpus"
        gpus = gpus or number("tensor_parallel_size", 1, int)
        if heads := unshared_heads(subject.text, gpus):
            raise FitError(f"{gpus} GPUs cannot share {heads} evenly; {cure} to a divisor of that number")
        served = sequences or number("max_num_seqs", SEQUENCES, int)
        captured: int | None = served
        if flags.get("enforce_eager", "0") != "0":
            captured = 0
        elif subject.variant and not sequences and "max_num_seqs" not in flags:
            captured = None
        return cls(
            context_len=length,
            sequences=served,
            depth=depth if subject.has_mtp else 0,
            dtype=flags.get("dtype", "auto"),
            kv_cache_dtype=flags.get("kv_cache_dtype", "auto"),
            state_dtype=flags.get("mamba_ssm_cache_dtype", "auto"),
            utilization=number("gpu_memory_utilization", utilization, float, "0.9"),
            prefix_caching=flags.get("enable_prefix_caching", prefix_caching) != "0",
            gdn_prefill=flags.get("gdn_prefill_backend", "auto"),
            batched_tokens=number(
                "max_num_batched_tokens", BATCHED_TOKENS, read_token_count, "4096, 4k or 4K"
            ),
            gpus=gpus,
            captured_sequences=captured,
        )


@dataclass(frozen=True)
class Fit:
    """How a checkpoint fits on a GPU, or on several that share it.

    Attributes:
        optimisation: name of the last optimisation of the checkpoint.
        weight_bytes: kind of weights -> bytes on disk.
        resident_bytes: bytes of weights in the memory of one GPU.
        cache_bytes: memory left for cache blocks, bytes; negative if not even the weights fit.
        layout: the blocks of the cache.
        sequence_bytes: bytes of the blocks of one sequence of full length, the context of the settings.
        missing_bytes: bytes that all sequences of full length need beyond `cache_bytes`; negative if some are left.
        captured_sequences: sequences of the largest decode step, each of which needs a block for its states before vLLM
            captures CUDA graphs; 0 without states or graphs.
        full_sequences: number of sequences of full length that the blocks hold.
        kv_tokens: tokens of these sequences.
        tokens_per_second: roofline of one sequence of 2,048 cached tokens without drafts.
        drafted: roofline of the same sequence with drafts, at the published acceptance length; None without drafts or
            such a length.
        break_even: acceptance length from which drafts pay; None without drafts.
    """

    optimisation: str
    weight_bytes: Mapping[str, int]
    resident_bytes: int
    cache_bytes: int
    layout: CacheLayout
    sequence_bytes: int
    missing_bytes: int
    captured_sequences: int
    full_sequences: float
    kv_tokens: int
    tokens_per_second: float
    drafted: float | None
    break_even: float | None

    @property
    def fits(self) -> bool:
        """Whether all sequences fit at full length together, and vLLM can capture its CUDA graphs."""
        return self.missing_bytes <= 0 and self.captured_sequences <= self.blocks

    @property
    def starts(self) -> bool:
        """Whether vLLM starts: one sequence fits at full length, and vLLM can capture its CUDA graphs."""
        return self.full_sequences >= 1 and self.captured_sequences <= self.blocks

    @property
    def blocks(self) -> int:
        """Number of blocks that the cache has."""
        return max(0, self.cache_bytes // self.layout.block_bytes)

    @property
    def state_bytes(self) -> int:
        """Cache memory of a sequence for its Gated DeltaNet states, bytes, whatever its length."""
        return self.layout.state_blocks * self.layout.block_bytes

    @property
    def token_bytes(self) -> int:
        """KV cache of one token of a sequence, bytes."""
        return self.layout.block_bytes // self.layout.block_size

    def longest_context(self, sequences: int) -> int:
        """Longest context, tokens, at which `sequences` fit together; 0 or less if they fit at none."""
        return (self.blocks // sequences - self.layout.state_blocks) * self.layout.block_size


@dataclass(frozen=True)
class Sized:
    """The sizes of a checkpoint, which are the same on every kind of GPU.

    Attributes:
        optimisation: name of the last optimisation of the checkpoint.
        weight_bytes: kind of weights -> bytes on disk.
        model: the part of the model that one GPU of the server holds and computes.
    """

    optimisation: str
    weight_bytes: Mapping[str, int]
    model: Model


def size_checkpoint(step: Optimised, settings: ServerSettings) -> Sized:
    """Count bytes and FLOPs of a checkpoint as a server with these settings loads it.

    Raises:
        FamilyError: the model is of no supported family.
        FitError: config.json is unusable, or a packing or dtype is unknown.
    """
    sizes: dict[str, int] = defaultdict(int)
    outline = step.outline
    for name, info in outline.tensors.items():
        sizes[find_kind(name)] += info.end - info.start
    model = read_model(
        outline.tensors,
        outline.config,
        kv_cache_dtype=settings.kv_cache_dtype,
        state_dtype=settings.state_dtype,
    )
    return Sized(step.optimisation, sizes, _share_of_one_gpu(model, settings.gpus, outline.text))


def fit_checkpoint(sized: Sized, settings: ServerSettings, gpu: Gpu, acceptance_length: float | None) -> Fit:
    """Lay out the memory of a server on a GPU, and bound its speed.

    Args:
        sized: the checkpoint.
        settings: context, number of sequences, drafts and dtypes of the server.
        gpu: data sheet of the GPU.
        acceptance_length: output tokens per step with drafts; None where no figure is published.
    """
    model, depth = sized.model, settings.depth
    resident = model.resident_bytes(depth)
    cache = _room(gpu, settings.utilization, resident)
    flashinfer_prefill = settings.gdn_prefill in ("auto", "flashinfer") and _has_flashinfer_prefill(
        gpu, model
    )
    layout = lay_out_cache(
        model, depth, prefix_caching=settings.prefix_caching, flashinfer_prefill=flashinfer_prefill
    )
    sequence = layout.sequence_bytes(settings.context_len)
    full = max(0, cache // layout.block_bytes) / layout.sequence_blocks(settings.context_len)
    captured = settings.captured_sequences
    if captured is None:
        captured = gpu.default_max_num_seqs
    plain = cost.bound_decode_step(model, gpu, 1, SPEED_CONTEXT_LEN)
    drafting = cost.bound_decode_step(model, gpu, 1, SPEED_CONTEXT_LEN, depth) if depth else None
    return Fit(
        optimisation=sized.optimisation,
        weight_bytes=sized.weight_bytes,
        resident_bytes=resident,
        cache_bytes=cache,
        layout=layout,
        sequence_bytes=sequence,
        missing_bytes=settings.sequences * sequence - cache,
        captured_sequences=captured if layout.state_blocks else 0,
        full_sequences=full,
        kv_tokens=int(full * settings.context_len),
        tokens_per_second=plain.tokens_per_second,
        drafted=acceptance_length / drafting.seconds if drafting and acceptance_length else None,
        break_even=drafting.seconds / plain.seconds if drafting else None,
    )


def _has_flashinfer_prefill(gpu: Gpu, model: Model) -> bool:
    """Whether vLLM has FlashInfer's kernel for prompts of Gated DeltaNet (`_resolve_gdn_prefill_backend`)."""
    major, _ = gpu.capability
    return gpu.capability == (9, 0) or (major in (10, 12) and model.linear_key_head_dim == 128)


def _room(gpu: Gpu, utilization: float, resident: int) -> int:
    """Bytes that weights and overhead leave for the cache; negative where not even they fit."""
    return int(utilization * gpu.cuda_memory_bytes - resident - OVERHEAD_GIB * 2**30)


def fitting_batch(model: Model, gpu: Gpu, context_len: int, num_speculative_tokens: int) -> int:
    """Number of sequences that fit on a GPU with vLLM's default --gpu-memory-utilization of 0.92.

    Args:
        model: bytes of the model.
        gpu: data sheet of the GPU.
        context_len: prompt and output tokens of each sequence.
        num_speculative_tokens: drafted tokens of a step (K); 0 without drafts.

    Raises:
        FitError: not even one sequence fits.
    """
    resident = model.resident_bytes(num_speculative_tokens)
    sequence = lay_out_cache(model, num_speculative_tokens).sequence_bytes(context_len)
    fitting = _room(gpu, DEFAULT_UTILIZATION, resident) // sequence
    if fitting < 1:
        raise FitError(
            f"weights and {context_len} tokens need {(resident + sequence) / 2**30:.1f} GiB beside "
            f"{OVERHEAD_GIB:g} GiB of overhead, but vLLM may use only {DEFAULT_UTILIZATION:.0%} of the "
            f"{gpu.cuda_memory_gib:g} GiB of {gpu.name}; use a larger GPU or a smaller variant"
        )
    return fitting


def _share_of_one_gpu(model: Model, gpus: int, text: Mapping[str, Any]) -> Model:
    """The part of a model that one of `gpus` GPUs holds and computes; whole copies of small norms are not counted."""
    if gpus == 1:
        return model

    def share(value: Any) -> Any:
        return replace(
            value,
            bytes=-(-value.bytes // gpus),
            flops={precision: flops // gpus for precision, flops in value.flops.items()},
            expert_bytes=value.expert_bytes // gpus,
        )

    kv_heads = int(text["num_key_value_heads"])
    return replace(
        model,
        body=share(model.body),
        head=share(model.head),
        drafter=share(model.drafter),
        draft_head=model.draft_head and share(model.draft_head),
        embedding_bytes=model.embedding_bytes // gpus,
        kv_bytes=model.kv_bytes // min(gpus, kv_heads),
        attention_flops=model.attention_flops // gpus,
        state_bytes=model.state_bytes // gpus,
        conv_row_bytes=model.conv_row_bytes // gpus,
        state_flops=model.state_flops // gpus,
    )


def estimate_activations(subject: Subject, settings: ServerSettings) -> int:
    """Estimate the activations of the largest step, which vLLM profiles when it starts: bytes on each GPU.

    These are one layer's inputs and products in 16 bits, and the logits in 32 bits twice, because sampling copies them.
    They are a part of the assumed overhead.
    """
    text = subject.text
    widest = max(
        3 * int(text.get("intermediate_size", 0)),
        3 * int(text.get("num_experts_per_tok", 0)) * int(text.get("moe_intermediate_size", 0)),
        2
        * (2 * int(text["num_attention_heads"]) + 2 * int(text["num_key_value_heads"]))
        * int(text["head_dim"]),
    )
    tokens = settings.batched_tokens * 2 * (4 * int(text["hidden_size"]) + widest)
    logits = settings.sequences * (1 + settings.depth) * int(text["vocab_size"]) * 4 * 2
    return math.ceil((tokens + logits) / settings.gpus)
