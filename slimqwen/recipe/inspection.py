"""Inspection of a whole recipe before it runs: finds all faults at once, and estimates the cost of each stage.

The input of a later stage does not exist yet: its outline is that of the base as changed by the stages before.
"""

import shutil
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from slimqwen import host
from slimqwen.checkpoint import Manifest
from slimqwen.checkpoint.files import MANIFEST
from slimqwen.models.outline import Outline
from slimqwen.recipe.recipe_file import Step
from slimqwen.recipe.stage import Needs

OPERATIONS = "computed_operations"
"""Name of a fact in a manifest: `Needs.operations` of the run that made the output; another name where a stage counts
otherwise than before, because times are scaled by it."""

_OPERATIONS_PER_CORE = 15e9
_OPERATIONS_PER_GPU = 30e12
_WRITTEN_BYTES_PER_SECOND = 200e6
_SHARE = 0.4
"""Assumed share of a data sheet's figures that a stage reaches."""

_COMPARABLE = 30
"""Largest factor in operations between two runs at which the time of one predicts that of the other; beyond it, fixed
costs and caches differ too much."""


@dataclass(frozen=True)
class Processor:
    """Speed of a processor by its data sheet: operations per second, and memory bandwidth in bytes per second."""

    operations: float
    bandwidth: float

    def seconds(self, needs: Needs) -> float:
        """Approximate time of a stage on this processor, seconds, at 40 % of both speeds."""
        computed = needs.operations / (_SHARE * self.operations)
        read = needs.read_bytes / (_SHARE * self.bandwidth)
        return needs.fixed_seconds + needs.disk_bytes / _WRITTEN_BYTES_PER_SECOND + max(computed, read)


@dataclass(frozen=True)
class StageCost:
    """Estimated cost of a stage of a recipe.

    Attributes:
        seconds: estimated time.
        was_measured: whether the time comes from an earlier run in the store, scaled by the number of operations.
    """

    step: Step
    needs: Needs
    seconds: float
    was_measured: bool


def inspect_steps(
    steps: Iterable[Step], base: Outline, store: Path, to_fetch: list[str] | None = None
) -> tuple[tuple[str, ...], tuple[StageCost, ...]]:
    """Find every fault of the steps, one line each, and estimate the cost of each step.

    Args:
        base: outline of the first step's input.
        store: folder with the outputs and manifests of earlier runs.
        to_fetch: list that gets the lines about missing texts that a command fetches; None makes them faults.

    Returns:
        The faults, and the costs; a step that does not fit its input has no cost.
    """
    manifests = [Manifest.read(file.parent) for file in manifest_files(store)]
    faults: list[str] = []
    costs: list[StageCost] = []
    outline = base
    for step in steps:
        found = [
            fault
            for fault in step.stage.inspect(outline, step.parameters)
            # Faulty parameters were replaced by defaults, in which faults would not be the user's.
            if step.is_whole or fault.field.partition(".")[0] in {"", *step.parameters.model_fields_set}
        ]
        for fault in found:
            is_no_fault = fault.is_fetched and to_fetch is not None
            (to_fetch if is_no_fault else faults).append(step.located(fault))  # type: ignore[union-attr]
        fits_input = all(fault.field for fault in found)
        if fits_input:
            needs = step.stage.needs(outline, step.parameters)
            costs.append(StageCost(step, needs, *_seconds(step.stage.name, needs, manifests)))
            reshaped = step.stage.reshape(outline, step.parameters)
            outline = replace(reshaped, name=f"the output of {step.stage.name}")
    return tuple(faults), tuple(costs)


def lacking_space(costs: Sequence[StageCost], store: Path) -> list[str]:
    """List a line for each stage that lacks memory, or disk space after the outputs of the stages before it.

    Args:
        costs: costs of the stages, in their order.
        store: folder whose disk the outputs take.
    """
    existing = next(folder for folder in (store, *store.parents) if folder.exists())
    memory, disk = host.available_memory(), shutil.disk_usage(existing).free
    lines = []
    for cost in costs:
        name, needed = cost.step.stage.name, cost.needs.memory_bytes
        place = f"{cost.step.places['']}: " if cost.step.places else ""
        if needed > memory:
            lines.append(
                f"{place}{name} needs about {needed / 2**30:.1f} GiB of memory, but {memory / 2**30:.1f} GiB are free; "
                "end other programs, or make the checkpoint on a machine with more"
            )
        disk -= cost.needs.disk_bytes
        if disk < 0 <= disk + cost.needs.disk_bytes:
            lines.append(
                f"{place}{name} needs about {-disk / 2**30:.1f} GiB of disk more than are free; "
                "`slimqwen recipe clean` deletes outputs that no variant uses"
            )
    return lines


def _seconds(stage: str, needs: Needs, manifests: Iterable[Manifest]) -> tuple[float, bool]:
    """Time of a stage in seconds, by the newest comparable run (then the second value is True), else nominal rates."""
    for manifest in manifests:
        operations = manifest.facts.get(OPERATIONS) if manifest.stage == stage else None
        if isinstance(operations, int | float) and operations > 0:
            ratio = needs.operations / operations
            if 1 / _COMPARABLE < ratio < _COMPARABLE:
                return manifest.wall_seconds * ratio, True
    rate = _OPERATIONS_PER_GPU if host.has_nvidia_driver() else _OPERATIONS_PER_CORE * host.physical_cores()
    written = needs.disk_bytes / _WRITTEN_BYTES_PER_SECOND
    return needs.fixed_seconds + written + needs.operations / rate, False


def describe_processor() -> str:
    """The processor for which times are computed, in words: this machine's GPU or its cores."""
    if host.has_nvidia_driver():
        return "this machine's GPU"
    return f"this machine's {host.physical_cores()} cores (`--gpu NAME`: on a GPU)"


def manifest_files(store: Path) -> list[Path]:
    """Files of the manifests in a store, the newest first."""
    return sorted(store.glob(f"[!.]*/{MANIFEST}"), key=lambda file: file.stat().st_mtime_ns, reverse=True)
