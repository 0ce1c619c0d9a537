"""The tasks of a sweep: which stages are missing, which measurements a variant needs, and the resources of each."""

import hashlib
import json
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from slimqwen import checkpoint
from slimqwen.bench.workload import Workload
from slimqwen.checkpoint.files import bytes_on_disk
from slimqwen.evals import gate
from slimqwen.evals.acceptance import Acceptance
from slimqwen.evals.drafting import AcceptanceSettings
from slimqwen.evals.engine import EngineCheck
from slimqwen.evals.engine_process import EngineSettings
from slimqwen.evals.fidelity import Fidelity
from slimqwen.evals.fidelity_figures import FidelitySettings
from slimqwen.evals.gate import GateSettings
from slimqwen.evals.quality import Quality
from slimqwen.evals.suites.suite import AUTO, Limit, Suite
from slimqwen.recipe import variant_recipe
from slimqwen.recipe.outline import Outline
from slimqwen.records import provenance
from slimqwen.records.record import Record
from slimqwen.records.settings import Settings
from slimqwen.records.split import Side, Split
from slimqwen.search.executors import ENGINE_BYTES, Resources, Task
from slimqwen.search.sweep import tasks
from slimqwen.serving import platform
from slimqwen.serving.command import ServerCommand
from slimqwen.variant import Variant

Measure = Literal["gate", "fidelity", "acceptance", "quality", "engine", "latency"]

Pair = tuple[Variant, Variant]
"""A baseline and a variant."""

_CHECKS: Mapping[str, tuple[type[Record], Callable[..., Any], type[Settings]]] = {
    "fidelity": (Fidelity, tasks.check_fidelity, FidelitySettings),
    "acceptance": (Acceptance, tasks.check_acceptance, AcceptanceSettings),
    "engine": (EngineCheck, tasks.check_engine, EngineSettings),
}
"""Record kind, task and settings of the gate's checks; quality is asked in parts."""

_OF_BOTH_SIDES = ("quality", "acceptance")
"""Checks that compare a record of the variant with one of its baseline."""

_LONGEST_FIRST = ("engine", "quality", "fidelity", "acceptance")
"""The gate's checks in the order in which tasks that run beside each other end soonest."""

_PARALLEL = ("tensor-parallel-size", "pipeline-parallel-size", "data-parallel-size")


@dataclass(frozen=True)
class Options:
    """The measurements of a sweep.

    Attributes:
        measures: gate, which is all of its checks and a verdict; checks alone; latency.
        rounds: rounds of latency, instead of the workload's.
        parts: number of ranges into which the items of a suite are split.
        limit: items of each task.
        split: side of the split of items that gates are measured on; None for both.
        records: folder of the repository that has a folder of records for each variant.
    """

    measures: tuple[Measure, ...]
    command: tuple[str, ...]
    workload: str = "classes"
    rounds: int | None = None
    parts: int = 1
    limit: Limit = AUTO
    split: Side | None = None
    records: str = "experiments"


@dataclass(frozen=True)
class Checks:
    """The checks of one side of a pair.

    Attributes:
        tasks: tasks by the name of the check; quality has one for each part.
        records: records that need not be measured again, by the name of the check.
    """

    tasks: dict[str, list[Task]] = field(default_factory=dict)
    records: dict[str, Path] = field(default_factory=dict)


def next_stage(variant: Variant) -> Task | None:
    """The first stage of a variant's recipe that the store lacks; None where there is none, or no recipe.

    Where the store has all of them from another variant, the last one, whose task links weights/<variant> to it.

    Raises:
        SlimqwenError: the recipe or its base cannot be used.
    """
    if variant.recipe is None:
        return None
    recipe = variant_recipe.read_recipe(variant)
    source = variant_recipe.base_folder(recipe.base, variant.root)
    forecasts = variant_recipe.forecast_recipe(variant)
    for number, (step, forecast) in enumerate(zip(recipe.steps, forecasts, strict=True), 1):
        assert forecast.key is not None, "only stages after a missing one have no key"
        entry = variant.root / "weights" / "store" / forecast.key
        if not forecast.reused:
            needs = step.stage.needs(Outline.read(source), step.parameters)
            return Task(
                key=f"{forecast.key}-stage",
                title=f"{forecast.stage} of {variant.name}",
                function=tasks.make_stage,
                argument={"variant": variant.name, "stages": number},
                resources=Resources(
                    gpus=1 if platform.detect() == "cuda" else 0,
                    memory_bytes=needs.memory_bytes,
                    # A compile cache fits only as many threads as its stage had.
                    every_cpu=step.stage.only_caches(step.parameters),
                ),
                urgent=True,
            )
        source = entry
    if variant.weights.exists():
        return None
    return Task(
        key=f"{source.name}-link-{variant.name}",
        title=f"link of {variant.name}",
        function=tasks.make_stage,
        argument={"variant": variant.name, "stages": len(recipe.steps)},
    )


def answers_are_decided(variant: Variant) -> bool:
    """Whether weights/<variant> answers as its recipe's result will: the stages that are left add a cache alone."""
    recipe = variant_recipe.read_recipe(variant)
    made = variant.root / "weights"
    for step, forecast in zip(recipe.steps, variant_recipe.forecast_recipe(variant), strict=True):
        if forecast.reused:
            made = variant.root / "weights" / "store" / str(forecast.key)
        elif not step.stage.only_caches(step.parameters):
            return False
    return variant.weights.exists() and checkpoint.digest(variant.weights) == checkpoint.digest(made)


def checks(side: Variant, pair: Pair, options: Options) -> Checks:
    """The checks of one side of a pair; its checkpoint has to exist, the other's need not.

    Args:
        side: the baseline, which has the checks that compare two records alone, or the variant.

    Raises:
        SlimqwenError: settings or a checkpoint cannot be used.
    """
    variant = pair[1]
    has_gate = "gate" in options.measures
    settings = GateSettings.load(variant.evaluation, variant.root) if has_gate else None
    needed = Checks()
    for check in _LONGEST_FIRST:
        is_asked = has_gate or check in options.measures
        if not is_asked or (side.name != variant.name and check not in _OF_BOTH_SIDES):
            continue
        # A check without a gate takes the settings of the variant's EVALUATION, and all items.
        name = settings.quality if settings and check == "quality" else variant.evaluation
        # The engine's tokens are no sample: they have no sides.
        split = settings.split(options.split, variant.root) if settings and check != "engine" else None
        record = _reusable_record(check, side, name, split, options) if settings else None
        if record:
            needed.records[check] = record
        elif check == "quality":
            needed.tasks[check] = _parts(side, name, split, options)
        else:
            _, function, model = _CHECKS[check]
            fields = model.load(name, side.root).model_dump(mode="json")
            argument = {"settings_name": name, "split": split}
            task = _task(check, [side], function, argument, [fields, str(split)], options, baseline=pair[0])
            needed.tasks[check] = [task]
    return needed


def timing(variant: Variant, baseline: Variant, options: Options) -> Task:
    """The task that times a variant and its baseline in turns.

    Raises:
        SlimqwenError: the workload or a checkpoint cannot be used.
    """
    workload = Workload.load(options.workload, variant.root)
    return _task(
        "latency",
        (baseline, variant),
        tasks.time_pair,
        {"workload": options.workload, "rounds": options.rounds},
        [workload.model_dump(mode="json"), options.rounds],
        options,
        alone=True,
    )


def _reusable_record(
    check: str, side: Variant, name: str, split: Split | None, options: Options
) -> Path | None:
    """The record of a gate's check of a side that a new measurement would only repeat."""
    if check == "quality":
        return gate.find_reusable(side, Quality, split=split, suite=name, limit=options.limit)
    return gate.find_reusable(side, _CHECKS[check][0], settings_name=name, split=split)


def _parts(side: Variant, suite_name: str, split: Split | None, options: Options) -> list[Task]:
    suite = Suite.load(suite_name, side.root)
    settings = [suite.model_dump(mode="json", exclude={"tasks_folder"}), options.limit, options.split]
    return [
        _task(
            f"quality {number + 1}/{options.parts}",
            [side],
            tasks.ask_part,
            {"suite": suite_name, "limit": options.limit, "part": [number, options.parts], "split": split},
            [*settings, number, options.parts],
            options,
        )
        for number in range(options.parts)
    ]


def _task(
    check: str,
    sides: Sequence[Variant],
    function: Any,
    extra_argument: Mapping[str, Any],
    settings: Any,
    options: Options,
    *,
    baseline: Variant | None = None,
    alone: bool = False,
) -> Task:
    """A task that measures sides; its key covers everything that decides the result on one kind of hardware."""
    servers = [ServerCommand.resolve(side) for side in sides]
    ingredients = [
        check,
        [
            [
                checkpoint.digest(server.variant.weights),
                provenance.portable(provenance.deciding(server.flags), server.variant.root),
                provenance.redacted(server.environment),
            ]
            for server in servers
        ],
        checkpoint.digest(baseline.weights) if baseline else None,
        settings,
        provenance.package_versions(),
    ]
    digest = hashlib.sha256(json.dumps(ingredients, sort_keys=True, default=str).encode()).hexdigest()
    last = sides[-1]
    return Task(
        key=f"{digest[:24]}-{check.partition(' ')[0]}-{last.name}",
        title=f"{check} of {last.name}",
        function=function,
        argument={
            "variants": [side.name for side in sides],
            "command": list(options.command),
            **extra_argument,
        },
        resources=resources(servers, baseline, alone=alone),
    )


def resources(servers: Sequence[ServerCommand], baseline: Variant | None, *, alone: bool) -> Resources:
    """Resources of a node for measuring sides, one side at a time.

    Args:
        servers: commands that serve the sides.
        baseline: baseline that is loaded too, in float32.
        alone: whether nothing else may run on the node.
    """
    gpus, memory = 0, 0
    for server in servers:
        count = math.prod(int(server.flags.get(flag) or 1) for flag in _PARALLEL)
        gpus = max(gpus, count if server.platform == "cuda" else 0)
        cache = float(server.environment.get("VLLM_CPU_KVCACHE_SPACE") or 0)
        size = bytes_on_disk(server.variant.weights) + round(cache * 2**30)
        memory = max(memory, size + ENGINE_BYTES)
    memory += 2 * bytes_on_disk(baseline.weights) if baseline else 0
    return Resources(gpus=gpus, memory_bytes=memory, whole_node=alone)
