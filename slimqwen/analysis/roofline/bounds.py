"""Rooflines of variants as their config.env serves them, beside their baseline and measured rates."""

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from slimqwen import checkpoint
from slimqwen import variant as variants
from slimqwen.analysis.roofline import cost
from slimqwen.analysis.roofline import gpu as data_sheets
from slimqwen.analysis.roofline.architecture import MEMORY_UTILIZATION, Model, served_model
from slimqwen.analysis.roofline.gpu import Gpu, RooflineError
from slimqwen.analysis.roofline.record import (
    AcceptanceLength,
    Bound,
    Decode,
    Measured,
    Prefill,
    Roofline,
    VariantBounds,
    WeightBytes,
)
from slimqwen.checkpoint.files import sha256
from slimqwen.records import provenance, registry, store
from slimqwen.serving.command import ServerCommand
from slimqwen.variant import Variant

CONTEXT_LENS = (128, 2048, 8192)
"""Cached tokens per sequence that bounds are given for."""

ASSUMPTIONS = (
    "a pass takes at least max(bytes / memory bandwidth, FLOPs / dense peak)",
    "packed weights are computed in 16 bits: they save bytes, not FLOPs",
    "a step reads and writes each Gated DeltaNet state once, however many tokens it verifies",
    "a prompt is prefilled alone in one pass",
    "activations, norms, sampling, kernel launches and the host cost nothing",
)

_NOTED_L2_SHARE = 0.1
"""Share of the weights above which a note warns that the L2 cache may beat the memory bound."""


def write(
    variant: Variant,
    gpu_name: str,
    *,
    others: Iterable[str] = (),
    context_lens: Sequence[int] = CONTEXT_LENS,
    acceptance_length: float | None = None,
    command: Sequence[str],
) -> Path:
    """Analyse a variant beside its baseline and others, and write the record.

    Args:
        gpu_name: name of a GPU in eval/devices.yaml.
        others: names of further variants to compare.
        context_lens: as for `analyse`.
        acceptance_length: as for `analyse`.

    Raises:
        RooflineError: as `gpu.read` and `analyse`.
    """
    started = provenance.utc_now()
    fields = analyse(
        with_baseline(variant, others),
        data_sheets.read(gpu_name, variant.root),
        context_lens,
        acceptance_length,
    )
    block = provenance.of_variant(variant, command, started, devices=sha256(variant.root / data_sheets.FILE))
    return store.write(variant.root / "results", Roofline(variant=variant.name, provenance=block, **fields))


def with_baseline(variant: Variant, others: Iterable[str]) -> list[Variant]:
    """The variant's baseline if it has one, the variant, and others by name, each once.

    Raises:
        ConfigError: no such variant; suggests similar names.
    """
    names = [*([variant.baseline] if variant.baseline else []), variant.name, *others]
    return [variants.load(name, variant.root) for name in dict.fromkeys(names)]


def analyse(
    compared: Sequence[Variant],
    gpu: Gpu,
    context_lens: Sequence[int] = CONTEXT_LENS,
    acceptance_length: float | None = None,
) -> dict[str, Any]:
    """Rooflines of variants on a GPU, each relative to the first.

    Decode rows come without speculation and, if the acceptance length is known, with it.

    Args:
        compared: variants, the baseline first.
        context_lens: cached tokens per sequence; cut to the shortest --max-model-len of the variants.
        acceptance_length: assumed for speculating variants without an acceptance record of this checkpoint and K.

    Raises:
        RooflineError: an unsupported checkpoint or draft method, weights and cache larger than the GPU's memory, or
            an impossible acceptance length.
    """
    served = [ServedVariant.load(variant, gpu) for variant in compared]
    longest = min(variant.max_model_len for variant in served)
    lengths = sorted({min(context_len, longest) for context_len in context_lens})
    if not lengths or lengths[0] < 1:
        raise RooflineError(
            "a roofline needs context lengths of at least one token; name them with --context"
        )
    bounds: list[VariantBounds] = []
    for variant in served:
        bounds.append(variant.bounds(gpu, lengths, acceptance_length, bounds[0] if bounds else None))
    return {
        "gpu": gpu,
        "assumptions": ASSUMPTIONS,
        "notes": tuple(note for variant in bounds for note in _notes(variant, gpu)),
        "baseline": compared[0].name,
        "context_lens": tuple(lengths),
        "variants": tuple(bounds),
    }


def tokens_per_second_by_depth(
    variant: Variant,
    gpu_name: str,
    acceptance_lengths: Mapping[int, float],
    context_len: int,
    *,
    always_drafts: bool = False,
) -> dict[int, list[float]]:
    """The highest output rate at several draft depths, by batch size from 1 to the largest that is served and fits.

    Args:
        variant: variant whose flags apply, except the draft depth.
        gpu_name: name of a GPU in eval/devices.yaml.
        acceptance_lengths: acceptance length by draft depth K, 1.0 at K = 0.
        context_len: cached tokens.
        always_drafts: whether a step at K = 0 makes a draft pass, as vLLM's does where the depth varies.

    Raises:
        RooflineError: as `analyse`.
    """
    gpu = data_sheets.read(gpu_name, variant.root)
    served = ServedVariant.load(variant, gpu)
    batch_sizes = range(1, served.largest_batch(gpu, context_len) + 1)

    def rate(batch_size: int, depth: int, length: float) -> float:
        step = cost.decode(served.model, gpu, batch_size, context_len, depth, length)
        if depth or not always_drafts:
            return step.tokens_per_second
        return batch_size / (step.seconds + cost.draft(served.model, batch_size, context_len).seconds(gpu))

    return {
        depth: [rate(batch_size, depth, length) for batch_size in batch_sizes]
        for depth, length in acceptance_lengths.items()
    }


@dataclass(frozen=True)
class ServedVariant:
    """A variant and what its flags decide.

    Attributes:
        flags: vLLM's flags by name.
        digest: digest of the checkpoint.
        num_speculative_tokens: drafted tokens per step (K).
        max_model_len: longest context, tokens.
        max_num_seqs: largest batch.
    """

    variant: Variant
    flags: Mapping[str, Any]
    digest: str
    model: Model
    num_speculative_tokens: int
    max_model_len: int
    max_num_seqs: int

    @classmethod
    def load(cls, variant: Variant, gpu: Gpu) -> "ServedVariant":
        """Read checkpoint and flags of a variant.

        Raises:
            RooflineError: an unsupported checkpoint, dtype or draft method.
        """
        variant.require_weights()
        command = ServerCommand.resolve(variant, platform="cuda")
        flags = command.flags
        if flags.get("dtype") in ("float32", "float"):
            raise RooflineError(
                f"{variant.name} is served in float32, which eval/devices.yaml has no peak for; "
                "set VLLM_DTYPE=bfloat16"
            )
        try:
            model = served_model(variant.weights, flags)
        except RooflineError as error:
            raise RooflineError(f"{variant.name}: {error}") from None
        return cls(
            variant,
            flags,
            checkpoint.digest(variant.weights),
            model,
            _num_speculative_tokens(variant, flags, model),
            command.max_model_len,
            flags.get("max-num-seqs") or gpu.default_max_num_seqs,
        )

    def bounds(
        self,
        gpu: Gpu,
        context_lens: Sequence[int],
        assumed_length: float | None,
        baseline: VariantBounds | None,
    ) -> VariantBounds:
        """All bounds of the variant.

        Args:
            assumed_length: acceptance length to assume if no record has it.
            baseline: bounds that ratios are relative to; None if this variant is the baseline.
        """
        model, depth = self.model, self.num_speculative_tokens
        acceptance = self.acceptance_length(assumed_length)
        settings = [(0, 1.0)]
        if depth and acceptance.value is not None:
            settings.append((depth, acceptance.value))
        steps = {
            (k, length, context_len): (
                cost.decode(model, gpu, 1, context_len, k, length),
                cost.decode(model, gpu, self.largest_batch(gpu, context_len), context_len, k, length),
            )
            for k, length in settings
            for context_len in context_lens
        }
        if baseline:
            reference = {row.context_len: (row.single, row.batch) for row in baseline.as_served}
        else:
            reference = {context_len: steps[*settings[-1], context_len] for context_len in context_lens}
        return VariantBounds(
            variant=self.variant.name,
            checkpoint=self.digest,
            weights=WeightBytes(
                body=dict(model.body.bytes_by_dtype),
                head=dict(model.head.bytes_by_dtype),
                drafter=dict(_own_draft_bytes(model)),
                tied=model.tied,
            ),
            l2_share=min(1.0, gpu.l2_cache_mb * 1e6 / model.resident_bytes(depth)),
            kv_bytes_per_token=model.attention_layers * model.kv_bytes,
            state_bytes_per_sequence=model.state_bytes,
            max_num_seqs=self.max_num_seqs,
            num_speculative_tokens=depth,
            acceptance_length=acceptance,
            decode=tuple(
                Decode(
                    num_speculative_tokens=k,
                    acceptance_length=length,
                    context_len=context_len,
                    weight_bytes_per_step=model.weight_bytes_per_step(k),
                    single=single,
                    batch=batch,
                    single_over_baseline=_ratio(single, reference[context_len][0]),
                    batch_over_baseline=_ratio(batch, reference[context_len][1]),
                )
                for (k, length, context_len), (single, batch) in steps.items()
            ),
            prefill=tuple(self.prefill(gpu, context_len) for context_len in context_lens),
            measured=tuple(self.measured(gpu)),
        )

    def largest_batch(self, gpu: Gpu, context_len: int) -> int:
        """Sequences that are served at once: --max-num-seqs, or as many as fit into GPU memory.

        Raises:
            RooflineError: not even one fits.
        """
        share = float(self.flags.get("gpu-memory-utilization", MEMORY_UTILIZATION))
        try:
            fitting = self.model.fitting_batch(gpu, context_len, self.num_speculative_tokens, share)
        except RooflineError as error:
            raise RooflineError(f"{self.variant.name}: {error}") from None
        return min(self.max_num_seqs, fitting)

    def prefill(self, gpu: Gpu, num_tokens: int) -> Prefill:
        """Bound of the pass over a prompt."""
        work = cost.prefill(self.model, num_tokens, self.num_speculative_tokens)
        seconds = work.seconds(gpu)
        return Prefill(
            num_tokens=num_tokens,
            bytes_per_token=work.bytes / num_tokens,
            flops_per_token=work.total_flops / num_tokens,
            seconds=seconds,
            tokens_per_second=num_tokens / seconds,
            limited_by=work.limit(gpu),
        )

    def acceptance_length(self, assumed: float | None) -> AcceptanceLength:
        """From the newest acceptance record of this checkpoint and K, else as assumed."""
        if not self.num_speculative_tokens:
            return AcceptanceLength(value=1.0, source="no speculation")
        reason = f"there is no acceptance record of {self.variant.name}"
        # The kinds of evals and bench import this package, so their models cannot be named here.
        model: Any = registry.kinds()["acceptance"]
        for path in store.records(self.variant.folder, model):
            record = store.read(path, model)
            name = f"{self.variant.name}/{path.name}"
            if record.split:
                continue
            if record.provenance.checkpoint_digest != self.digest:
                reason = f"{name} is of another checkpoint"
                continue
            for row in record.depths:
                if row.depth == self.num_speculative_tokens:
                    return AcceptanceLength(
                        value=row.length.value, source=f"{name}, K = {self.num_speculative_tokens}"
                    )
            reason = f"{name} has no K = {self.num_speculative_tokens}"
        if assumed is None:
            return AcceptanceLength(value=None, source=f"unknown, so only without speculation: {reason}")
        return AcceptanceLength(value=assumed, source=f"assumed: {reason}")

    def measured(self, gpu: Gpu) -> list[Measured]:
        """Classes of the newest latency record on this GPU, of this checkpoint, drafts and KV cache dtype."""

        def is_alike(record: Any) -> bool:
            origin = record.provenance
            names = {device.name for device in origin.hardware.gpus}
            return (
                bool(names)
                and names <= set(gpu.nvidia_smi)
                and origin.checkpoint_digest == self.digest
                and all(
                    origin.flags.get(flag) == self.flags.get(flag)
                    for flag in ("speculative-config", "kv-cache-dtype")
                )
            )

        try:
            model: Any = registry.kinds()["latency"]
            path = store.latest(self.variant.folder, model, is_alike)
        except store.MissingRecordError:
            return []
        record = store.read(path, model)
        rows = []
        for name, row in record.classes.items():
            # Uncounted drafts get the bound of drafts that are all accepted.
            length = row.acceptance.length if row.acceptance else self.num_speculative_tokens + 1
            bound = self.request_rate(gpu, row.prompt_tokens, row.output_tokens, row.concurrency, length)
            rate = row.output_throughput_tokens_per_s
            rows.append(
                Measured(
                    record=path.name,
                    class_=name,
                    prompt_tokens=row.prompt_tokens,
                    output_tokens=row.output_tokens,
                    concurrency=row.concurrency,
                    tokens_per_second=rate,
                    bound_tokens_per_second=bound,
                    share_of_bound=rate / bound,
                )
            )
        return rows

    def request_rate(
        self, gpu: Gpu, prompt_tokens: int, output_tokens: int, concurrency: int, acceptance_length: float
    ) -> float:
        """Highest output tokens per second over whole requests, prefill included."""
        step = cost.decode(
            self.model, gpu, concurrency, prompt_tokens, self.num_speculative_tokens, acceptance_length
        )
        seconds = (output_tokens - 1) / step.tokens_per_second
        # Concurrent requests can share a pass between one's prefill and another's decoding.
        if concurrency == 1:
            seconds += cost.prefill(self.model, prompt_tokens, self.num_speculative_tokens).seconds(gpu)
        return float(output_tokens / seconds)


def _own_draft_bytes(model: Model) -> Counter[str]:
    """Bytes by dtype of the MTP head and of a draft head."""
    draft_head = model.draft_head.bytes_by_dtype if model.draft_head else {}
    return Counter(model.drafter.bytes_by_dtype) + Counter(draft_head)


def _ratio(bound: Bound, reference: Bound) -> float:
    return bound.tokens_per_second / reference.tokens_per_second


def _notes(bounds: VariantBounds, gpu: Gpu) -> list[str]:
    name, acceptance = bounds.variant, bounds.acceptance_length
    notes = []
    if bounds.num_speculative_tokens:
        value = "" if acceptance.value is None else f" {acceptance.value:.3f}"
        notes.append(
            f"{name}: acceptance length at K = {bounds.num_speculative_tokens}{value} ({acceptance.source})"
        )
    if bounds.l2_share > _NOTED_L2_SHARE:
        notes.append(
            f"{name}: {gpu.name}'s L2 cache holds {bounds.l2_share:.0%} of its weights; what stays there from pass to "
            "pass is not read from memory, so this is no strict bound"
        )
    if not bounds.measured:
        notes.append(f"{name}: not measured on this GPU")
    return notes


def _num_speculative_tokens(variant: Variant, flags: Mapping[str, Any], model: Model) -> int:
    speculation = flags.get("speculative-config")
    if not speculation:
        return 0
    if "mtp" not in str(speculation.get("method")):
        raise RooflineError(
            f"{variant.name} drafts with {speculation.get('method')!r}, and only MTP heads are counted; "
            "set method to mtp in VLLM_SPECULATIVE_CONFIG or unset it"
        )
    if not model.drafter.bytes:
        raise RooflineError(
            f"{variant.name} drafts with an MTP head that its checkpoint lacks; unset VLLM_SPECULATIVE_CONFIG"
        )
    return int(speculation["num_speculative_tokens"])
