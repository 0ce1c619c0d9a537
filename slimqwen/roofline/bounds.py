"""Rooflines of variants as they are served, from the checkpoint or from the dimensions that the recipe will give it."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from slimqwen import checkpoint
from slimqwen.checkpoint.files import sha256
from slimqwen.checkpoint.tensors import TensorInfo, list_tensors
from slimqwen.models.shape import ShapeError
from slimqwen.plan import devices, shapes
from slimqwen.plan.devices import GpuSheet, read_gpu
from slimqwen.records import provenance
from slimqwen.roofline import RooflineError, cost
from slimqwen.roofline.architecture import MEMORY_UTILIZATION, Model, read_model, shape_tensors
from slimqwen.roofline.record import Roofline, WaterfallStep
from slimqwen.serving import checked_lines
from slimqwen.variant import Variant

CONTEXT_LENS = (128, 2048, 8192)
"""Default context lengths of the bounds, cached tokens per sequence."""


CheckpointStage = tuple[str, Mapping[str, TensorInfo], Mapping[str, Any]]
"""Name, tensors and config.json of a checkpoint: the recipe's base, or the output of a stage with that name."""


@dataclass(frozen=True)
class ServedModel:
    """The model of a variant, and the settings that its flags decide.

    Attributes:
        flags: values of vLLM's flags by name.
        stages: the base of the recipe, then the output of each of its stages.
        dimensions: where the dimensions of the last stage come from, in words.
        model: model of the last stage, with the dtypes of KV cache and states that the flags set.
        num_speculative_tokens: drafted tokens per step (K).
    """

    variant: Variant
    flags: Mapping[str, Any]
    stages: Sequence[CheckpointStage]
    dimensions: str
    model: Model
    num_speculative_tokens: int

    @classmethod
    def load(cls, variant: Variant) -> "ServedModel":
        """Read the flags and the checkpoint of a variant; a checkpoint that is not here is known by its dimensions.

        Raises:
            RooflineError: an unsupported checkpoint, dtype or draft method.
            ShapeError: no checkpoint is here, and its dimensions are not known.
        """
        flags = {name: flag.value for name, flag in checked_lines.resolve(variant).flags.items()}
        if flags.get("dtype") in ("float32", "float"):
            raise RooflineError(
                f"{variant.name} is served in float32, for which {devices.FILE} has no peak FLOP/s; "
                "set VLLM_DTYPE=bfloat16"
            )
        stages, dimensions = _list_stages(variant)
        _, tensors, config = stages[-1]
        kv_dtype, state_dtype = _cache_dtypes(flags)
        model = read_model(tensors, config, kv_cache_dtype=kv_dtype, state_dtype=state_dtype)
        depth = _num_speculative_tokens(variant, flags, model)
        return cls(variant, flags, stages, dimensions, model, depth)

    def largest_batch(self, gpu: GpuSheet, context_len: int) -> int:
        """Sequences served at once: --max-num-seqs, or fewer if fewer fit; raises RooflineError if none fits."""
        share = float(self.flags.get("gpu-memory-utilization", MEMORY_UTILIZATION))
        fitting = self.model.fitting_batch(gpu, context_len, self.num_speculative_tokens, share)
        return min(int(self.flags.get("max-num-seqs") or gpu.default_max_num_seqs), fitting)

    def list_waterfall_steps(self, gpu: GpuSheet, context_len: int) -> Iterator[WaterfallStep]:
        """Yield the step of the recipe's base without drafts, then a step for each optimisation that changes bytes."""
        before: dict[str, int] = {}
        for name, model, depth in self._optimisations():
            parts = cost.count_part_bytes(model, depth, context_len)
            if parts != before:
                seconds = cost.bound_decode_step(model, gpu, 1, context_len, depth).seconds
                yield WaterfallStep(
                    optimisation=name, num_speculative_tokens=depth, part_bytes=parts, seconds=seconds
                )
                before = parts

    def _optimisations(self) -> Iterator[tuple[str, Model, int]]:
        """Yield each optimisation, the model with this one and all before, and K."""
        depth = self.num_speculative_tokens
        name, tensors, config = self.stages[0]
        yield name, read_model(tensors, config), 0
        yield f"drafts, K = {depth}", read_model(tensors, config), depth
        names = [name for name, *_ in self.stages[1:]]
        for number, (name, tensors, config) in enumerate(self.stages[1:]):
            yield f"{name}{' again' if name in names[:number] else ''}", read_model(tensors, config), depth
        kv_dtype, state_dtype = _cache_dtypes(self.flags)
        yield f"states in {state_dtype}", read_model(tensors, config, state_dtype=state_dtype), depth
        yield f"KV cache in {kv_dtype}", self.model, depth


def compute_roofline(
    variant: Variant,
    gpu_name: str,
    *,
    context_lens: Sequence[int] = CONTEXT_LENS,
    acceptance_length: float | None = None,
    acceptance_source: str = "unknown",
    command: Sequence[str],
) -> Roofline:
    """Compute the roofline of a variant and return it as a record, which is not written.

    Args:
        gpu_name: name of a GPU in eval/devices.yaml.
        context_lens: cached tokens per sequence, each cut to --max-model-len. The waterfall is of the middle one.
        acceptance_length: output tokens per step at the variant's K; None leaves out steps with drafts.
        acceptance_source: the record that has the acceptance length, or why the length is assumed or unknown.

    Raises:
        RooflineError: no such GPU, weights and cache larger than its memory, an unsupported checkpoint or flag, no
            usable context length, or an impossible acceptance length.
        ShapeError: the dimensions of the checkpoint are not known.
    """
    started = provenance.utc_now()
    gpu = read_gpu(gpu_name, variant.root)
    served = ServedModel.load(variant)
    model, depth = served.model, served.num_speculative_tokens
    longest = int(served.flags.get("max-model-len", -1))
    if longest == -1:  # left out, or "auto"
        longest = int(checkpoint.text_config(served.stages[-1][2])["max_position_embeddings"])
    lengths = sorted({min(context_len, longest) for context_len in context_lens})
    if not lengths or lengths[0] < 1:
        raise RooflineError(
            "a roofline needs one or more context lengths of at least 1 token; give them with --context"
        )
    drafting = [(depth, acceptance_length)] if depth and acceptance_length is not None else []
    middle = lengths[len(lengths) // 2]
    return Roofline(
        variant=variant.name,
        provenance=provenance.circumstances(
            variant.root, command, started, devices=sha256(variant.root / devices.FILE)
        ),
        gpu=gpu,
        dimensions=served.dimensions,
        acceptance=acceptance_source if depth else "1, as there are no drafts",
        context_len=middle,
        waterfall=tuple(served.list_waterfall_steps(gpu, middle)),
        l2_share=min(1.0, (gpu.l2_cache_mb or 0) * 1e6 / model.resident_bytes(depth)),
        decode=tuple(
            cost.bound_decode_step(model, gpu, batch_size, context_len, k, length)
            for context_len in lengths
            for k, length in [(0, 1.0), *drafting]
            for batch_size in sorted({1, served.largest_batch(gpu, context_len)})
        ),
        prefill_seconds={
            str(context_len): cost.count_prefill_work(model, context_len, depth).seconds(gpu)
            for context_len in lengths
        },
    )


def _list_stages(variant: Variant) -> tuple[list[CheckpointStage], str]:
    """`stages` and `dimensions` of a `ServedModel`; the last stage is the checkpoint on this machine if it is here."""
    is_here = (variant.weights / "config.json").is_file()
    stages: list[CheckpointStage] = []
    source = f"weights/{variant.weights.name}"
    try:
        by_stage = shapes.shape_by_stage(variant)
        stages = [(name, shape_tensors(shape.tensors), shape.config_json) for name, shape in by_stage]
        source = source if is_here else by_stage[-1][1].source
    except ShapeError:
        if not is_here:
            raise
    if is_here:
        name = stages.pop()[0] if stages else variant.weights.name
        stages.append((name, list_tensors(variant.weights), checkpoint.read_config(variant.weights)))
    return stages, source


def _cache_dtypes(flags: Mapping[str, Any]) -> tuple[str, str]:
    """Dtypes of KV cache and recurrent states."""
    return str(flags.get("kv-cache-dtype", "auto")), str(flags.get("mamba-ssm-cache-dtype", "auto"))


def _num_speculative_tokens(variant: Variant, flags: Mapping[str, Any], model: Model) -> int:
    speculation = flags.get("speculative-config")
    if not speculation or speculation.get("method") == "ngram":
        return 0  # drafts copied from the prompt read no weights, and the text decides how many are accepted
    if "mtp" not in str(speculation.get("method")):
        raise RooflineError(
            f"{variant.name} drafts with {speculation.get('method')!r}, but a roofline supports only MTP heads; "
            "set method to mtp in VLLM_SPECULATIVE_CONFIG, or unset VLLM_SPECULATIVE_CONFIG"
        )
    if not model.drafter.bytes:
        raise RooflineError(
            f"{variant.name} drafts with an MTP head that its checkpoint lacks; unset VLLM_SPECULATIVE_CONFIG"
        )
    return int(speculation["num_speculative_tokens"])
