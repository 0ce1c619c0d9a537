"""Waterfall: bytes and shortest time of a decode step of one sequence, lever by lever, from dimensions alone.

The levers are drafts, the stages of a variant's recipe in their order, and the dtypes of states and KV cache that its
config.env sets. No checkpoint is needed: dimensions are those that plans use (`slimqwen.plan.shapes`).
"""

from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

from pydantic import Field, NonNegativeInt, PositiveFloat, PositiveInt

from slimqwen.analysis.roofline import cost
from slimqwen.analysis.roofline import gpu as data_sheets
from slimqwen.analysis.roofline.architecture import Model, shape_model
from slimqwen.analysis.roofline.gpu import Gpu
from slimqwen.checkpoint.files import sha256
from slimqwen.plan import shapes
from slimqwen.records import provenance, store
from slimqwen.records.record import Block, Record
from slimqwen.records.table import Table
from slimqwen.serving import checked_lines
from slimqwen.variant import Variant


class Step(Block):
    """A decode step of one sequence with one more lever than the step before."""

    lever: str = Field(min_length=1)
    num_speculative_tokens: NonNegativeInt
    part_bytes: dict[str, NonNegativeInt] = Field(description="memory traffic of the step by part")
    seconds: PositiveFloat = Field(description="shortest duration of the step")

    @property
    def bytes(self) -> int:
        """Memory traffic of the whole step."""
        return sum(self.part_bytes.values())


class Waterfall(Record):
    """The shortest decode step of a variant on a GPU, lever by lever; computed, not timed."""

    kind = "waterfall"
    verb = "analyze waterfall"

    gpu: Gpu
    context_len: PositiveInt = Field(description="cached tokens")
    dimensions: str = Field(min_length=1, description="where the checkpoint's dimensions come from")
    steps: tuple[Step, ...] = Field(min_length=1)

    @property
    def topic(self) -> str:
        """Its GPU and context length."""
        return f"{self.gpu.name}, {self.context_len}"

    @property
    def _unit(self) -> tuple[str, float]:
        """Unit of tables and charts with its bytes: GB, or MB for the embedded model."""
        return ("GB", 1e9) if max(step.bytes for step in self.steps) >= 1e8 else ("MB", 1e6)

    def tables(self, path: Path) -> list[Table]:
        """A row per lever."""
        first = self.steps[0]
        columns: dict[str, Callable[[Step], object]] = {
            "lever": lambda step: step.lever,
            "K": lambda step: step.num_speculative_tokens,
        }
        unit, size = self._unit
        for part in cost.PARTS:
            columns[f"{part}, {unit}"] = lambda step, part=part: f"{step.part_bytes[part] / size:.2f}"  # type: ignore[misc]
        columns |= {
            f"step, {unit}": lambda step: f"{step.bytes / size:.2f}",
            "step, ms": lambda step: (
                f"{1e3 * step.seconds:.1f}" if unit == "GB" else f"{1e3 * step.seconds:.3f}"
            ),
            "step ratio": lambda step: f"{step.seconds / first.seconds:.2f}x",
        }
        return [
            Table.from_rows(
                f"A decode step of {self.variant} on {self.gpu.name}, lever by lever (roofline)",
                self.steps,
                columns,
                f"One sequence of {self.context_len:,} cached tokens at {self.gpu.memory_bandwidth_gb_per_s:g} GB/s "
                f"({self.gpu.source}); each row adds a lever to the one above. Computed from dimensions, not timed: no "
                "kernel launches, no host.",
                "Drafts pay where the acceptance length exceeds the step ratio to the same model without drafts.",
                f"Dimensions: {self.dimensions}.",
                provenance.source_note(self, path),
            )
        ]


def write(variant: Variant, gpu_name: str, *, context_len: int = 2048, command: Sequence[str]) -> Path:
    """Compute a variant's waterfall and write its record.

    Args:
        gpu_name: name of a GPU in eval/devices.yaml.
        context_len: cached tokens.

    Raises:
        RooflineError: no such GPU, or dimensions that are not counted.
        ShapeError: the dimensions are not known.
    """
    started = provenance.utc_now()
    gpu = data_sheets.read(gpu_name, variant.root)
    record = Waterfall(
        variant=variant.name,
        gpu=gpu,
        context_len=context_len,
        dimensions=shapes.variant_shape(variant).source,
        steps=tuple(steps(variant, gpu, context_len)),
        provenance=provenance.circumstances(
            variant.root, command, started, devices=sha256(variant.root / data_sheets.FILE)
        ),
    )
    return store.write(variant.root / "results", record)


def steps(variant: Variant, gpu: Gpu, context_len: int) -> Iterator[Step]:
    """The step of the recipe's base without drafts, then one for each lever that changes its bytes."""
    previous: Step | None = None
    for lever, model, depth in _levers(variant):
        part_bytes = cost.part_bytes(model, depth, context_len)
        if previous is not None and part_bytes == previous.part_bytes:
            continue
        seconds = cost.decode(model, gpu, 1, context_len, depth).seconds
        previous = Step(lever=lever, num_speculative_tokens=depth, part_bytes=part_bytes, seconds=seconds)
        yield previous


def _levers(variant: Variant) -> Iterator[tuple[str, Model, int]]:
    """Lever, the model with it and all before, and K."""
    flag_values = {name: flag.value for name, flag in checked_lines.resolve(variant).flags.items()}
    depth = int((flag_values.get("speculative-config") or {}).get("num_speculative_tokens", 0))
    stages = shapes.shape_by_stage(variant)
    name, shape = stages[0]
    yield name, shape_model(shape), 0
    yield f"drafts, K = {depth}", shape_model(shape), depth
    names = [stage for stage, _ in stages[1:]]
    for number, (stage, shape) in enumerate(stages[1:]):
        suffix = " again" if stage in names[:number] else ""
        yield f"{stage}{suffix}", shape_model(shape), depth
    state_dtype = str(flag_values.get("mamba-ssm-cache-dtype", "auto"))
    yield f"states in {state_dtype}", shape_model(shape, state_dtype=state_dtype), depth
    kv_dtype = str(flag_values.get("kv-cache-dtype", "auto"))
    yield (
        f"KV cache in {kv_dtype}",
        shape_model(shape, state_dtype=state_dtype, kv_cache_dtype=kv_dtype),
        depth,
    )
