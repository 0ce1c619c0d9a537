"""Measurements of a variant and its baseline as tasks of an executor, for the demo and the proof of finalists.

Such a task writes its record into the repository, which all nodes of a cluster share. A repeated task finds the record
of the first run and reuses it, unless an input of the measurement has changed since.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from slimqwen import host
from slimqwen import variant as variants
from slimqwen.bench import latency
from slimqwen.bench.latency import Latency
from slimqwen.bench.workload import Workload
from slimqwen.checkpoint.files import bytes_on_disk
from slimqwen.evals import gate
from slimqwen.evals.checks import Check, GateSettings, Pair
from slimqwen.evals.invocation import Invocation
from slimqwen.evals.preconditions import find_baseline
from slimqwen.processes import ENGINE_BYTES, Resources, Task
from slimqwen.progress import Progress, silent
from slimqwen.recipe import variant_recipe
from slimqwen.records import store
from slimqwen.records.reuse import find_reusable
from slimqwen.records.split import Side
from slimqwen.serving.checks import widening_bytes
from slimqwen.serving.command import ServerCommand
from slimqwen.serving.server import free_port
from slimqwen.variant import Variant

WORKLOAD = "classes"
"""Workload of the latency measurement."""

_PARALLEL = ("tensor-parallel-size", "pipeline-parallel-size", "data-parallel-size")


@dataclass(frozen=True)
class RecordSettings:
    """Settings that all records of a run share.

    Attributes:
        command: command line that the records state as their origin.
        folder: folder with a folder of records for each variant, relative to the repository.
        split_side: side of the split whose items are measured; None for the items of both sides.
    """

    command: tuple[str, ...]
    folder: str = "experiments"
    split_side: Side | None = None

    def load_checks(self, variant: Variant, progress: Progress = silent) -> Mapping[str, Check[Any]]:
        """The checks of the gate that the variant's EVALUATION names, by name; their servers use a free port."""
        gate_settings = GateSettings.load(variant.evaluation, variant.root)
        split = gate_settings.split(self.split_side, variant.root)
        invocation = Invocation(self.command, self.folder, split, free_port(), progress)
        return gate_settings.checks(Pair(variant, find_baseline(variant), invocation))


@dataclass(frozen=True)
class Measured:
    """Result of a task that measures.

    Attributes:
        paths: files of the task's records, one for each measured variant.
        reused: whether the records existed before the task.
    """

    paths: Sequence[Path]
    reused: bool = False


def recipe_task(variant: Variant, stages: int | None = None, *, alone: bool = False) -> Task:
    """The task that runs the stages of a variant's recipe.

    Args:
        stages: number of stages to run, from the first one; None for all.
        alone: whether the task needs its node to itself. Baking does: a compile cache fits one number of threads.
    """
    title = f"recipe of {variant.name}"
    needs = Resources(1 if host.detect() == "cuda" else 0, ENGINE_BYTES, whole_node=alone)
    return Task(f"{title}, stages {stages}", title, run_stages, (variant.name, stages), needs, urgent=True)


def run_stages(root: Path, argument: tuple[str, int | None], progress: Progress) -> None:
    """Function of the task from `recipe_task`: run stages of a variant's recipe.

    Args:
        argument: the variant's name, and the number of stages; None for all.
    """
    name, stages = argument
    variant_recipe.run_recipe(variants.load(name, root), stages, progress=progress)


def check_task(check: Check[Any], side: Variant, settings: RecordSettings) -> Task:
    """The task that measures a check on one side: the variant or its baseline.

    Variants with the same baseline and settings get the same task for the baseline, so it runs once.

    Args:
        check: one of `settings.load_checks`.
        side: the variant to measure.
        settings: settings of the record.

    Raises:
        SlimqwenError: a config.env or a checkpoint cannot be used.
    """
    title = f"{check.name} of {side.name}"
    return Task(
        f"{title}, {check.setup}",
        title,
        measure_check,
        (check.name, side.name, check.pair.variant.name, settings),
        estimate_resources([side], loaded=check.pair.baseline if check.loads_baseline else None),
    )


def measure_check(root: Path, argument: tuple[str, str, str, RecordSettings], progress: Progress) -> Measured:
    """Function of the task from `check_task`: measure one side of a check, or find its record with unchanged inputs.

    Args:
        argument: names of the check, of the side to measure and of the variant that is checked; settings of the record.
    """
    name, side_name, variant_name, settings = argument
    check = settings.load_checks(variants.load(variant_name, root), progress)[name]
    side = variants.load(side_name, root)
    known = check.find(side)
    return Measured([known or check.measure(side)], reused=known is not None)


def gate_task(variant: Variant, settings: RecordSettings) -> Task:
    """The task that writes a variant's gate record from the records of its checks, which must have been measured."""
    return Task(
        f"gate of {variant.name}",
        f"gate of {variant.name}",
        measure_gate,
        (variant.name, settings),
        estimate_resources([variant]),
    )


def measure_gate(root: Path, argument: tuple[str, RecordSettings], progress: Progress) -> Path:
    """Function of the task from `gate_task`: write a variant's gate record; returns its path.

    Args:
        argument: the variant's name; settings of the record.
    """
    name, settings = argument
    variant = variants.load(name, root)
    return gate.measure_gate(
        variant,
        GateSettings.load(variant.evaluation, root),
        command=settings.command,
        split_side=settings.split_side,
        progress=progress,
    )


def latency_task(sides: Sequence[Variant], rounds: int, settings: RecordSettings) -> Task:
    """The task that times variants in turns with the workload `classes`; no other task runs beside it.

    Args:
        sides: the variants; the record of each is written into its own folder.
        rounds: number of rounds, in each of which every variant is timed once.
        settings: settings of the records.
    """
    names = tuple(side.name for side in sides)
    title = f"latency of {names[-1]}"
    needs = estimate_resources(sides, alone=True)
    return Task(title, title, measure_latency, (names, rounds, settings), needs)


def measure_latency(
    root: Path, argument: tuple[tuple[str, ...], int, RecordSettings], progress: Progress
) -> Measured:
    """Function of the task from `latency_task`: time variants, unless records of one earlier run have unchanged inputs.

    Args:
        argument: names of the variants; number of rounds; settings of the records.
    """
    names, rounds, settings = argument
    sides = [variants.load(name, root) for name in names]
    folders = [root / settings.folder / name for name in names]
    workload = Workload.load(WORKLOAD, root)
    known = [
        find_reusable(
            side,
            Latency,
            folder,
            None,
            lambda each: (each.workload, each.rounds) == (WORKLOAD, rounds),
            workload.inputs(root),
            progress,
        )
        for side, folder in zip(sides, folders, strict=True)
    ]
    paths = [path for path in known if path]
    if len(paths) == len(sides) and len({store.read_record(path, Latency).run for path in paths}) == 1:
        return Measured(paths, reused=True)
    paths = latency.measure_latency(
        sides,
        workload,
        command=settings.command,
        rounds=rounds,
        port=free_port(),
        records_folders=folders,
        progress=progress,
    )
    return Measured(paths)


def estimate_resources(
    sides: Sequence[Variant], *, loaded: Variant | None = None, alone: bool = False
) -> Resources:
    """GPUs and memory that a node needs to measure these variants, one at a time.

    Args:
        loaded: a variant whose weights are in memory in float32 beside the measured one; None for none.
        alone: whether the task needs the node to itself.
    """
    gpus, memory = 0, 0
    for server in map(ServerCommand.resolve, sides):
        count = math.prod(int(server.flags.get(flag) or 1) for flag in _PARALLEL)
        gpus = max(gpus, count if server.platform == "cuda" else 0)
        cache = float(server.environment.get("VLLM_CPU_KVCACHE_SPACE") or 0)
        size = bytes_on_disk(server.variant.weights) + round(cache * 2**30)
        # Tasks are planned before the recipe has made the variant.
        if server.platform == "cpu" and server.variant.weights.is_dir():
            size += widening_bytes(server.variant.weights)
        memory = max(memory, size + ENGINE_BYTES)
    memory += 2 * bytes_on_disk(loaded.weights) if loaded else 0
    return Resources(gpus=gpus, memory_bytes=memory, whole_node=alone)
