"""Tasks of a sweep: what makes a stage, and what measures a variant and returns the record unwritten."""

import math
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from slimqwen import checkpoint
from slimqwen import variant as variants
from slimqwen.bench import latency
from slimqwen.bench.latency import Latency
from slimqwen.bench.workload import Workload
from slimqwen.checkpoint.files import bytes_on_disk
from slimqwen.evals import acceptance, engine, fidelity, quality
from slimqwen.evals.acceptance import Acceptance
from slimqwen.evals.drafting import AcceptanceSettings
from slimqwen.evals.engine import EngineCheck
from slimqwen.evals.engine_process import EngineSettings
from slimqwen.evals.fidelity import Fidelity
from slimqwen.evals.fidelity_figures import FidelitySettings
from slimqwen.evals.quality import Quality
from slimqwen.evals.suites.lm_eval_run import Part
from slimqwen.evals.suites.suite import AUTO, Limit, Suite
from slimqwen.models.outline import Outline
from slimqwen.progress import Progress
from slimqwen.recipe import variant_recipe
from slimqwen.records import provenance, store
from slimqwen.records.record import Record
from slimqwen.records.settings import Settings
from slimqwen.records.split import Side, Split
from slimqwen.search.executors import ENGINE_BYTES, Resources, Task, content_key
from slimqwen.serving import platform
from slimqwen.serving.command import ServerCommand
from slimqwen.serving.server import free_port
from slimqwen.variant import Variant

Measure = Literal["gate", "fidelity", "acceptance", "quality", "engine", "latency"]

KINDS: Mapping[str, tuple[type[Record], type[Settings]]] = {
    "engine": (EngineCheck, EngineSettings),
    "quality": (Quality, Suite),
    "fidelity": (Fidelity, FidelitySettings),
    "acceptance": (Acceptance, AcceptanceSettings),
    "latency": (Latency, Workload),
}
"""Record kind and settings of each measurement; the checks that take longest come first."""

WORKLOAD = "classes"
"""Workload of latency."""

UnwrittenRecord = Mapping[str, Any]
"""A record that is not written yet: {"variant": name, "record": its fields, "items": its items}."""

_PARALLEL = ("tensor-parallel-size", "pipeline-parallel-size", "data-parallel-size")


@dataclass(frozen=True)
class Options:
    """The measurements of a sweep.

    Attributes:
        measures: gate, which is all of its checks and a verdict; checks alone; latency.
        rounds: rounds of latency, instead of those of `WORKLOAD`.
        parts: number of ranges into which the items of a suite are split.
        limit: items of each task.
        split: side of the split of items that gates are measured on; None for both.
        records: folder of the repository that has a folder of records for each variant.
    """

    measures: tuple[Measure, ...]
    command: tuple[str, ...]
    rounds: int | None = None
    parts: int = 1
    limit: Limit = AUTO
    split: Side | None = None
    records: str = "experiments"


@dataclass(frozen=True)
class Measurement:
    """What one task measures.

    Attributes:
        name: key of `KINDS`.
        sides: names of the variants: one for a check, baseline and variant for latency.
        settings_name: file of its settings in eval/.
        split: side of the split of items; None for all.
        part: number of the part of a suite, from 0.
        depth: K of acceptance; None for other measurements.
    """

    name: str
    sides: tuple[str, ...]
    settings_name: str
    split: Split | None
    options: Options
    part: int = 0
    depth: int | None = None


def next_stage(variant: Variant) -> Task | None:
    """The task of the first stage of a variant's recipe that the store lacks; None where there is none, or no recipe.

    Where the store has all of them from another variant, the task links weights/<variant> to the last one.

    Raises:
        SlimqwenError: the recipe or its base cannot be used.
    """
    if variant.recipe is None:
        return None
    recipe = variant_recipe.read_recipe(variant)
    source = variant_recipe.base_folder(recipe.base, variant.root)
    for number, (step, forecast) in enumerate(
        zip(recipe.steps, variant_recipe.forecast_recipe(variant), strict=True), 1
    ):
        if not forecast.reused:
            needs = Resources(
                gpus=1 if platform.detect() == "cuda" else 0,
                memory_bytes=step.stage.needs(Outline.read(source), step.parameters).memory_bytes,
                # Every measurement of the variant waits for it, and a compilation takes all cores.
                whole_node=step.stage.only_caches(step.parameters),
            )
            title = f"{forecast.stage} of {variant.name}"
            return Task(
                f"{forecast.key}-stage", title, make_stages, (variant.name, number), needs, urgent=True
            )
        source = variant.root / "weights" / "store" / str(forecast.key)
    if variant.weights.exists():
        return None
    key, title = f"{source.name}-link-{variant.name}", f"link of {variant.name}"
    return Task(key, title, make_stages, (variant.name, len(recipe.steps)))


def make_stages(root: Path, argument: tuple[str, int], progress: Progress) -> None:
    """Run the first stages of a variant's recipe; the store publishes each by one rename.

    Args:
        argument: name of the variant, number of stages.
    """
    name, stages = argument
    variant_recipe.run_recipe(variants.load(name, root), stages, progress=progress)


def measurement_task(what: Measurement, baseline: Variant) -> Task:
    """The task of a measurement; its key covers everything that decides the result on one kind of hardware.

    Args:
        baseline: baseline of the pair; checks but quality may load it beside the side, in float32.

    Raises:
        SlimqwenError: settings or a checkpoint cannot be used.
    """
    root, options = baseline.root, what.options
    servers = [ServerCommand.resolve(variants.load(name, root)) for name in what.sides]
    key = content_key(
        what.name,
        [
            [
                checkpoint.digest(server.variant.weights),
                provenance.portable(provenance.deciding(server.flags), root),
                provenance.redacted(server.environment),
            ]
            for server in servers
        ],
        checkpoint.digest(baseline.weights),
        KINDS[what.name][1].load(what.settings_name, root).model_dump(mode="json", exclude={"tasks_folder"}),
        [str(what.split), what.part, options.parts, options.limit, options.rounds, what.depth],
        provenance.package_versions(),
    )
    name = what.sides[-1]
    title = f"quality {what.part + 1}/{options.parts}" if what.name == "quality" else what.name
    loads_baseline = what.name not in ("quality", "latency")
    needs = estimate_resources(servers, baseline if loads_baseline else None, alone=what.name == "latency")
    function = ask_part if what.name == "quality" else measure_record
    return Task(f"{key}-{what.name}-{name}", f"{title} of {name}", function, what, needs)


def estimate_resources(
    servers: Sequence[ServerCommand], baseline: Variant | None, *, alone: bool
) -> Resources:
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


def measure_record(root: Path, what: Measurement, progress: Progress) -> list[UnwrittenRecord]:
    """Measure on this node what has one record a side."""
    sides = [variants.load(name, root) for name in what.sides]
    with tempfile.TemporaryDirectory() as name:
        folder, side = Path(name), sides[-1]
        common: dict[str, Any] = {"command": what.options.command, "progress": progress}
        if what.name == "latency":
            paths: Sequence[Path] = latency.measure_latency(
                sides,
                Workload.load(what.settings_name, root),
                rounds=what.options.rounds,
                port=free_port(),
                records_folders=[folder / side.name for side in sides],
                **common,
            )
        else:
            common["records_folder"] = folder
            if what.name == "fidelity":
                path = fidelity.measure_fidelity(
                    side, what.settings_name, split=what.split, port=free_port(), **common
                )
            elif what.name == "acceptance":
                assert what.depth is not None
                path = acceptance.measure_acceptance(
                    side,
                    what.settings_name,
                    [what.depth],
                    gate_depth=what.depth,
                    greedy_only=True,
                    split=what.split,
                    **common,
                )
            else:
                path = engine.measure_engine(side, what.settings_name, **common)
            paths = [path]
        return [_unwritten_record(path) for path in paths]


def _unwritten_record(path: Path) -> UnwrittenRecord:
    record = store.read_record(path)
    fields = {name: value for name, value in record.as_json().items() if name != "items"}
    return {"variant": record.variant, "record": fields, "items": store.read_items(path)}


def ask_part(root: Path, what: Measurement, progress: Progress) -> dict[str, Any]:
    """Score a variant on a part of a suite, on this node; returns `ScoredPart` as JSON."""
    return quality.score_part(
        variants.load(what.sides[0], root),
        Suite.load(what.settings_name, root),
        Part(what.part, what.options.parts),
        command=what.options.command,
        limit=what.options.limit,
        split=what.split,
        progress=progress,
    ).as_json()
