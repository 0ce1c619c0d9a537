"""The tasks of a sweep: which stages are missing, which measurements a variant needs, and the resources of each."""

import hashlib
import json
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
from slimqwen.evals.engine.modes import EngineModes
from slimqwen.evals.engine.scenarios import EngineSettings
from slimqwen.evals.fidelity import Fidelity
from slimqwen.evals.fidelity_figures import FidelitySettings
from slimqwen.evals.gate import GateSettings
from slimqwen.evals.quality import Quality
from slimqwen.evals.suites.suite import DECIDING, Limit, Suite
from slimqwen.recipe import variant_recipe
from slimqwen.records import provenance
from slimqwen.records.record import Record
from slimqwen.records.settings import LimitSettings
from slimqwen.records.split import Side, SplitRecord
from slimqwen.search.executors import Resources, Task
from slimqwen.search.sweep import tasks
from slimqwen.serving.command import ServerCommand
from slimqwen.variant import Variant

Measure = Literal["gate", "fidelity", "acceptance", "quality", "engine", "latency"]

Pair = tuple[Variant, Variant]
"""A baseline and a variant."""

_CHECKS: Mapping[str, tuple[type[Record], Callable[..., Any], type[LimitSettings]]] = {
    "fidelity": (Fidelity, tasks.check_fidelity, FidelitySettings),
    "acceptance": (Acceptance, tasks.check_acceptance, AcceptanceSettings),
    "engine": (EngineModes, tasks.check_engine, EngineSettings),
}
"""Record kind, task and settings of the gate's checks; quality is asked in parts."""

_LONGEST_FIRST = ("engine", "quality", "fidelity", "acceptance")
"""The gate's checks in the order in which tasks that run beside each other end soonest."""

_ENGINE_BYTES = 3 << 30
"""Resident size of vLLM's and a measurement's processes without weights and cache."""

_PARALLEL = ("tensor-parallel-size", "pipeline-parallel-size", "data-parallel-size")


@dataclass(frozen=True)
class Options:
    """The measurements of a sweep.

    Attributes:
        measures: gate, which is all of its checks and a verdict; checks alone; latency.
        command: program and arguments, for records.
        workload: workload of latency.
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
    limit: Limit = DECIDING
    split: Side | None = None
    records: str = "experiments"

    def as_json(self) -> dict[str, Any]:
        """The options that two runs of the same sweep share; the number of parts and the command may differ."""
        return {
            "measures": list(self.measures),
            "workload": self.workload,
            "rounds": self.rounds,
            "limit": self.limit,
            "split": self.split,
            "records": self.records,
        }


@dataclass(frozen=True)
class Measurements:
    """The measurements of a variant against its baseline.

    Attributes:
        by_check: tasks by the name of their measurement; quality has one for each part.
        records: records that need not be measured again, by the name of the measurement.
    """

    by_check: dict[str, list[Task]] = field(default_factory=dict)
    records: dict[str, list[Path]] = field(default_factory=dict)

    def add(self, check: str, reusable: Sequence[Path | None], make: Callable[[], list[Task]]) -> None:
        """Add the records of a check, or the tasks that measure it where one is missing."""
        paths = [path for path in reusable if path]
        if len(paths) == len(reusable):
            self.records[check] = paths
        else:
            self.by_check[check] = make()


def next_stage(variant: Variant) -> Task | None:
    """The first stage of a variant's recipe that the store lacks; None where there is none, or no recipe.

    Where the store has all of them from another variant, the last one, whose task links weights/<variant> to it.

    Raises:
        SlimqwenError: the recipe or its base cannot be used.
    """
    if variant.recipe is None:
        return None
    recipe = variant_recipe.read(variant)
    source = variant_recipe.base_folder(recipe.base, variant.root)
    forecasts = variant_recipe.status(variant)
    for number, (step, forecast) in enumerate(zip(recipe.steps, forecasts, strict=True), 1):
        assert forecast.key is not None, "only stages after a missing one have no key"
        entry = variant.root / "weights" / "store" / forecast.key
        if not forecast.reused:
            needs = step.stage.needs(source, step.parameters)
            return Task(
                key=f"{forecast.key}-stage",
                title=f"{forecast.stage} of {variant.name}",
                function=tasks.make_stage,
                argument={"variant": variant.name, "stages": number},
                # A compile cache fits only as many threads as its stage had.
                resources=Resources(memory_bytes=needs.memory_bytes, whole_node=True),
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


def measurements(variant: Variant, baseline: Variant, options: Options) -> Measurements:
    """The measurements of a variant; its checkpoint and its baseline's have to exist.

    Raises:
        SlimqwenError: settings or a checkpoint cannot be used.
    """
    needed = Measurements()
    has_gate = "gate" in options.measures
    settings = GateSettings.of_variant(variant, variant.evaluation) if has_gate else None
    for check in _LONGEST_FIRST:
        if settings or check in options.measures:
            _add_check(needed, check, (baseline, variant), settings, options)
    if "latency" in options.measures:
        workload = Workload.load(options.workload, variant.root)
        extra_argument = {"workload": options.workload, "rounds": options.rounds}
        inputs = [workload.model_dump(mode="json"), options.rounds]
        needed.by_check["latency"] = [
            _task(
                "latency", (baseline, variant), tasks.time_pair, extra_argument, inputs, options, alone=True
            )
        ]
    return needed


def _add_check(
    needed: Measurements, check: str, pair: Pair, settings: GateSettings | None, options: Options
) -> None:
    """Add the tasks of a check; for a gate, its records instead where they still hold.

    Args:
        settings: the gate's; None where the check is measured alone, by the settings of the variant's EVALUATION.
    """
    baseline, variant = pair
    name: str = getattr(settings, check) if settings else variant.evaluation
    split = settings.split(options.split, variant.root) if settings else None
    if check == "quality":
        fields: dict[str, Any] = {"suite": name, "limit": options.limit, "endpoint": "completions"}
        reusable = (
            [gate.find_reusable(side, Quality, split=split, **fields) for side in pair]
            if settings
            else [None]
        )
        needed.add(check, reusable, lambda: _parts(pair, name, options))
        return
    kind, function, model = _CHECKS[check]
    sides = pair if check == "acceptance" else (variant,)
    if not issubclass(kind, SplitRecord):  # the engine check has no items to split
        split = None
    reusable = (
        [gate.find_reusable(side, kind, settings_name=name, split=split) for side in sides]
        if settings
        else [None]
    )
    settings_fields = model.of_variant(variant, name).model_dump(mode="json")
    extra_argument = {"settings_name": name, "split": split}
    # A pair is measured on one node, even where one side was recorded before.
    needed.add(
        check,
        reusable,
        lambda: [
            _task(
                check,
                sides,
                function,
                extra_argument,
                [settings_fields, str(split)],
                options,
                baseline=baseline,
            )
        ],
    )


def _parts(pair: Sequence[Variant], suite_name: str, options: Options) -> list[Task]:
    suite = Suite.load(suite_name, pair[0].root)
    split = suite.split(options.split)
    settings = [suite.model_dump(mode="json", exclude={"tasks_folder"}), options.limit, options.split]
    return [
        _task(
            f"quality {number + 1}/{options.parts}",
            pair,
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
        count = 1
        for flag in _PARALLEL:
            count *= int(server.flags.get(flag) or 1)
        gpus = max(gpus, count if server.platform == "cuda" else 0)
        cache = float(server.environment.get("VLLM_CPU_KVCACHE_SPACE") or 0)
        size = bytes_on_disk(server.variant.weights) + round(cache * 2**30)
        memory = max(memory, size + _ENGINE_BYTES)
    memory += 2 * bytes_on_disk(baseline.weights) if baseline else 0
    return Resources(gpus=gpus, memory_bytes=memory, whole_node=alone)
