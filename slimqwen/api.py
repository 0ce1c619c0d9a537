"""Slimqwen in Python, for a notebook or a pipeline: load a variant, run its recipe, judge the result.

docs/python.md has an example. The commands `recipe run` and `gate` call the same functions. Each raises a SlimqwenError
that names cause and cure. Functions import what is slow to import.
"""

import warnings
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from slimqwen.progress import Progress, silent
from slimqwen.variant import Variant
from slimqwen.variant import load as load_variant

if TYPE_CHECKING:
    from slimqwen.evals.gate import Gate
    from slimqwen.evals.suites.suite import Suite
    from slimqwen.recipe.runner import Outcome
    from slimqwen.records.record import Finding

__all__ = ["Judged", "judge", "load_variant", "run_recipe"]


class Judged(NamedTuple):
    """The verdict of `judge` on a variant, with its evidence.

    `record.verdict` is pass, fail or inconclusive; `record.verdicts` has the verdict of each check.

    Attributes:
        path: file of the gate record.
        record: the gate record.
        findings: every figure with its value, interval, limit and verdict.
        suite: the suite by which quality was judged.
        log: file with the output of the libraries.
    """

    path: Path  # of the record; its items are in a file beside it
    record: "Gate"
    findings: "tuple[Finding, ...]"  # every figure with value, interval, limit and verdict
    suite: "Suite"  # by which quality was judged
    log: Path  # what libraries printed


def run_recipe(variant: Variant, *, until: str | None = None, progress: Progress = silent) -> "list[Outcome]":
    """Run a variant's recipe.yaml and write weights/<name>; outputs of stages that are up to date are reused.

    Args:
        until: name of the last stage to run; None for all.
        progress: is called with (activity, done, total).

    Returns:
        An outcome for each stage, in their order.

    Raises:
        RecipeError: the recipe, or the evaluation in eval/own/ that the variant names, has faults (all are named before
            anything runs); or a stage failed.
        MissingCheckpointError, CorruptCheckpointError: the base's weights are missing or damaged.
    """
    from slimqwen.recipe import variant_recipe

    stages = None if until is None else variant_recipe.stages_until(variant, until)
    return variant_recipe.run_recipe(variant, stages, progress, other_faults=list_evaluation_faults(variant))


def list_evaluation_faults(variant: Variant) -> list[str]:
    """Find the faults of the own evaluation (a folder of eval/own/) by which the variant will be judged and timed.

    Returns:
        A line for each fault; empty if there is none, or if the variant's EVALUATION names no such folder.
    """
    from slimqwen.records.settings import find_own_evaluation

    folder = find_own_evaluation(variant)
    if folder is None:
        return []
    from slimqwen.bench.workload import Workload, name_workload
    from slimqwen.evals import own_evaluation

    is_timed = name_workload(variant) == folder.name
    timing = [lambda: Workload.load(folder.name, variant.root)] if is_timed else []
    return own_evaluation.list_faults(variant, folder, timing)


def judge(
    variant: Variant,
    settings_name: str | None = None,
    *,
    progress: Progress = silent,
    warn: Callable[[str], None] = warnings.warn,
) -> Judged:
    """Judge a variant by the checks of the gate, and write its gate record.

    A check is not measured again if it has a record whose inputs are all unchanged. A check that fails or stays
    inconclusive raises nothing: the verdict of the result says so.

    Args:
        settings_name: a file of eval/gates/ without its suffix, or a folder of eval/own/; None for the variant's
            EVALUATION.
        progress: is called with (activity, done, total).
        warn: is called with each known trouble of vLLM that costs time or memory.

    Raises:
        EvalError: the variant has no baseline, a folder for records cannot be written, or data are not fetched.
        SettingsError: there are no such settings, or they cannot be used.
        MissingCheckpointError, CorruptCheckpointError: weights are missing or damaged.
        ServingError: the start is known to die, or the variant's weights are random.
    """
    from slimqwen.captured_log import capture_output
    from slimqwen.evals.preconditions import check_preconditions, find_baseline

    # What takes no vLLM to find out is found out before its import.
    check_preconditions(find_baseline(variant), variant)
    from slimqwen.evals import gate
    from slimqwen.evals.checks import GateSettings
    from slimqwen.plan import start
    from slimqwen.records import store
    from slimqwen.serving import checks
    from slimqwen.serving.command import ServerCommand

    server = ServerCommand.resolve(variant)
    checks.refuse_trouble(server, start.find_recorded_plan(server, warn)[1])
    settings = GateSettings.load(settings_name or variant.evaluation, variant.root)
    command = ["slimqwen", "gate", "--variant", variant.name, "--settings", settings.name]
    log = variant.root / "logs" / f"gate-{variant.name}.log"
    with capture_output(log):
        path = gate.measure_gate(variant, settings, command=command, progress=progress)
    record, findings = store.read_record(path, gate.Gate), tuple(gate.read_findings(path))
    return Judged(path, record, findings, settings.suite(variant.root), log)
