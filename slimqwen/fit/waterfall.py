"""The waterfall of a variant: what a decode step reads after each stage of its recipe, and its shortest time."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from slimqwen import checkpoint
from slimqwen.checkpoint.tensors import TensorInfo, list_tensors
from slimqwen.fit import FitError, cost
from slimqwen.fit.architecture import Model, read_model, shape_tensors
from slimqwen.fit.memory import SPEED_CONTEXT_LEN, ServerSettings
from slimqwen.fit.subject import Subject
from slimqwen.models.shape import ShapeError
from slimqwen.plan import shapes
from slimqwen.plan.devices import Gpu
from slimqwen.records.table import Table
from slimqwen.variant import Variant

CheckpointStage = tuple[str, Mapping[str, TensorInfo], Mapping[str, Any]]
"""Name, tensors and config.json of a checkpoint: the recipe's base, or the output of a stage with that name."""


@dataclass(frozen=True)
class WaterfallStep:
    """A decode step of one sequence with one more optimisation than the step before.

    Attributes:
        optimisation: the last optimisation, such as a stage of the recipe or "drafts, K = 4".
        num_speculative_tokens: drafted tokens of the step (K).
        part_bytes: memory traffic by part of `cost.PARTS`.
        seconds: shortest duration.
    """

    optimisation: str
    num_speculative_tokens: int
    part_bytes: Mapping[str, int]
    seconds: float

    @property
    def bytes(self) -> int:
        """Memory traffic of the whole step."""
        return sum(self.part_bytes.values())


def list_steps(
    subject: Subject, settings: ServerSettings, gpu: Gpu, context_len: int
) -> Iterator[WaterfallStep]:
    """Yield the step of the recipe's base without drafts, then a step for each optimisation that changes bytes.

    Raises:
        FitError: the subject is no variant, or has an unsupported checkpoint or dtype.
        ShapeError: no checkpoint is here, and its dimensions are not known.
    """
    if subject.variant is None:
        raise FitError(
            f"{subject.name} has no recipe whose stages --waterfall could show; name a variant, or leave out "
            "--waterfall"
        )
    before: dict[str, int] = {}
    for name, model, depth in _optimisations(_list_stages(subject.variant), settings):
        parts = cost.count_part_bytes(model, depth, context_len)
        if parts != before:
            yield WaterfallStep(
                name, depth, parts, cost.bound_decode_step(model, gpu, 1, context_len, depth).seconds
            )
            before = parts


def _optimisations(
    stages: Sequence[CheckpointStage], settings: ServerSettings
) -> Iterator[tuple[str, Model, int]]:
    """Yield each optimisation, the model with this one and all before, and K."""
    depth = settings.depth
    name, tensors, config = stages[0]
    yield name, read_model(tensors, config), 0
    if depth:
        yield f"drafts, K = {depth}", read_model(tensors, config), depth
    names = [name for name, *_ in stages[1:]]
    for number, (name, tensors, config) in enumerate(stages[1:]):
        yield f"{name}{' again' if name in names[:number] else ''}", read_model(tensors, config), depth
    states, cache = settings.state_dtype, settings.kv_cache_dtype
    yield f"states in {states}", read_model(tensors, config, state_dtype=states), depth
    whole = read_model(tensors, config, state_dtype=states, kv_cache_dtype=cache)
    yield f"KV cache in {cache}", whole, depth


def _list_stages(variant: Variant) -> list[CheckpointStage]:
    """The base of the recipe and the output of each stage; the last is the checkpoint on this machine if it is here."""
    is_here = (variant.weights / "config.json").is_file()
    stages: list[CheckpointStage] = []
    try:
        for name, shape in shapes.shape_by_stage(variant):
            stages.append((name, shape_tensors(shape.tensors), shape.config_json))
    except ShapeError:
        if not is_here:
            raise
    if is_here:
        name = stages.pop()[0] if stages else variant.weights.name
        stages.append((name, list_tensors(variant.weights), checkpoint.read_config(variant.weights)))
    return stages


def waterfall_table(subject: Subject, settings: ServerSettings, gpu: Gpu) -> Table:
    """A row per optimisation of a variant's recipe: what a decode step reads by part, and its shortest time.

    Raises:
        FitError: the subject is no variant, or has an unsupported checkpoint or dtype.
        ShapeError: no checkpoint is here, and its dimensions are not known.
    """
    context_len = min(SPEED_CONTEXT_LEN, settings.context_len)
    steps = list(list_steps(subject, settings, gpu, context_len))
    first = steps[0]
    # The embedded model is a thousand times smaller than those that GPUs are bought for.
    unit, size, digits = ("GB", 1e9, 1) if max(step.bytes for step in steps) >= 1e8 else ("MB", 1e6, 3)
    columns: dict[str, Callable[[WaterfallStep], object]] = {
        "optimisation": lambda step: step.optimisation,
        "K": lambda step: step.num_speculative_tokens,
    }
    for part in cost.PARTS:
        columns[f"{part}, {unit}"] = lambda step, part=part: f"{step.part_bytes[part] / size:.2f}"  # type: ignore[misc]
    columns |= {
        f"step, {unit}": lambda step: f"{step.bytes / size:.2f}",
        "step, ms": lambda step: f"{1e3 * step.seconds:.{digits}f}",
        "step ratio": lambda step: f"{step.seconds / first.seconds:.2f}x",
    }
    return Table.from_rows(
        f"A decode step of {subject.name} on {gpu.name}, optimisation by optimisation",
        steps,
        columns,
        f"One sequence of {context_len:,} cached tokens at {gpu.memory_bandwidth_gb_per_s:g} GB/s ({gpu.source}); each "
        "row adds an optimisation to the one above. Computed, not timed.",
        "Drafts pay where the acceptance length exceeds the step ratio to the same model without drafts.",
        f"Dimensions: {subject.source}.",
    )
