"""Functions of a sweep's tasks: they make stages, and return measurements without recording them.

Each takes the repository, the task's argument, and what receives its progress.
"""

import tempfile
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from slimqwen import variant as variants
from slimqwen.bench import latency
from slimqwen.bench.workload import Workload
from slimqwen.evals import acceptance, fidelity, quality
from slimqwen.evals.drafting import AcceptanceSettings
from slimqwen.evals.engine import measure_engine
from slimqwen.evals.suites.lm_eval_run import Part
from slimqwen.evals.suites.suite import Suite
from slimqwen.progress import Progress
from slimqwen.recipe import variant_recipe
from slimqwen.records import store
from slimqwen.serving.server import free_port

UnwrittenRecord = Mapping[str, Any]
"""A record that is not written yet: {"variant": name, "record": its fields, "items": its items}."""


def make_stage(root: Path, argument: Mapping[str, Any], progress: Progress) -> None:
    """Run the first stages of a variant's recipe; the store publishes each by one rename.

    Args:
        argument: {"variant": name, "stages": number of stages}.
    """
    subject = variants.load(argument["variant"], root)
    variant_recipe.run_recipe(subject, argument["stages"], progress=progress)


def check_fidelity(root: Path, argument: Mapping[str, Any], progress: Progress) -> list[UnwrittenRecord]:
    """Compare variants' distributions with their baselines'; argument as for `_measure_all`."""
    return _measure_all(
        root,
        argument,
        progress,
        partial(fidelity.measure_fidelity, split=argument["split"], port=free_port()),
    )


def check_acceptance(root: Path, argument: Mapping[str, Any], progress: Progress) -> list[UnwrittenRecord]:
    """Count the drafts of variants greedily at the gate's depth; argument as for `_measure_all`."""
    depth = AcceptanceSettings.load(argument["settings_name"], root).gate_depth
    return _measure_all(
        root,
        argument,
        progress,
        partial(acceptance.measure_acceptance, depths=[depth], greedy_only=True, split=argument["split"]),
    )


def check_engine(root: Path, argument: Mapping[str, Any], progress: Progress) -> list[UnwrittenRecord]:
    """Compare variants' engines with plain ones; argument as for `_measure_all`."""
    return _measure_all(root, argument, progress, measure_engine)


def _measure_all(
    root: Path, argument: Mapping[str, Any], progress: Progress, measure: Callable[..., Path]
) -> list[UnwrittenRecord]:
    """Measure variants one after another on this node.

    Args:
        argument: {"variants": names, "settings_name": name, "split": side or None, "command": words}.
        measure: measure(variant, settings_name, command=…, records_folder=…, progress=…) -> path of the record.
    """
    records = []
    for name in argument["variants"]:
        with tempfile.TemporaryDirectory() as folder:
            path = measure(
                variants.load(name, root),
                argument["settings_name"],
                command=argument["command"],
                records_folder=Path(folder),
                progress=progress,
            )
            records.append(_unwritten_record(path))
    return records


def ask_part(root: Path, argument: Mapping[str, Any], progress: Progress) -> dict[str, Any]:
    """Score variants on a part of a suite, one after another on this node.

    Args:
        argument: {"variants": names, "suite": name, "limit": limit, "part": [number, count], "split": side or None,
            "command": words}.

    Returns:
        `ScoredPart` of each variant as JSON, by name.
    """
    suite = Suite.load(argument["suite"], root)
    return {
        name: quality.score_part(
            variants.load(name, root),
            suite,
            Part(*argument["part"]),
            command=argument["command"],
            limit=argument["limit"],
            split=argument["split"],
            progress=progress,
        ).as_json()
        for name in argument["variants"]
    }


def time_pair(root: Path, argument: Mapping[str, Any], progress: Progress) -> list[UnwrittenRecord]:
    """Time variants over a workload in turns, on this node alone.

    Args:
        argument: {"variants": names, "workload": name, "rounds": rounds or None, "command": words}.
    """
    with tempfile.TemporaryDirectory() as folder:
        paths: Sequence[Path] = latency.measure(
            [variants.load(name, root) for name in argument["variants"]],
            Workload.load(argument["workload"], root),
            command=argument["command"],
            rounds=argument["rounds"],
            port=free_port(),
            records_folders=[Path(folder) / name for name in argument["variants"]],
            progress=progress,
        )
        return [_unwritten_record(path) for path in paths]


def _unwritten_record(path: Path) -> UnwrittenRecord:
    record = store.read_record(path)
    fields = {name: value for name, value in record.as_json().items() if name != "items"}
    return {"variant": record.variant, "record": fields, "items": store.read_items(path)}
