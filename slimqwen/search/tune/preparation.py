"""Finds the arms that cannot be served here before anything is timed: by vLLM's parser, plans and known trouble."""

from collections.abc import Sequence
from pathlib import Path

from slimqwen.errors import SlimqwenError
from slimqwen.plan import rehearsal, start
from slimqwen.plan.devices import UnknownGpuError
from slimqwen.plan.facts import Plan
from slimqwen.plan.host_gpus import choose_gpu
from slimqwen.progress import Progress
from slimqwen.records import provenance
from slimqwen.search import SearchError
from slimqwen.search.tune.arms import Arm, find_refused_fields
from slimqwen.search.tune.changes import figures_of
from slimqwen.search.tune.subject import TuneSubject
from slimqwen.serving import checks
from slimqwen.serving.command import ServerCommand

Prepared = tuple[dict[str, str], dict[str, dict[str, str]]]
"""By the arm's name: reasons of arms that cannot be served; and figures of the plans of all that were planned."""


def prepare_arms(subject: TuneSubject, arms: Sequence[Arm], log: Path, progress: Progress) -> Prepared:
    """Find the arms that cannot be served on this device, or that change nothing there; plan the others.

    Args:
        arms: all arms, the reference first.
        log: file for vLLM's output while it plans.

    Returns:
        By the arm's name: the reason why it is left out; and for an arm with a plan, the figures that
        `changes.list_changes` fills in.
    """
    refused: dict[str, str] = {}
    commands: dict[str, ServerCommand] = {}
    needed = find_refused_fields(subject.workload, subject.variant.root, subject.served.platform)
    for arm in arms:
        try:
            command = _resolve(subject, arm, needed)
        except SlimqwenError as error:
            refused[arm.name] = shorten(error, subject)
            continue
        first = commands.get(arms[0].name)
        if arm.parts and first and _decisive(command) == _decisive(first):
            refused[arm.name] = "it changes nothing on this device"
        else:
            commands[arm.name] = command
    planned = [arm for arm in arms if arm.name in commands]
    plans = _plan(subject, planned, log, progress)
    for arm in planned:
        try:
            _refuse(arm, plans.get(arm.name), commands[arm.name])
        except SlimqwenError as error:
            refused[arm.name] = shorten(error, subject)
    return refused, {name: figures_of(plan) for name, plan in plans.items()}


def shorten(error: SlimqwenError, subject: TuneSubject) -> str:
    """The error's message with paths of this machine shortened, so that a record can hold it.

    Args:
        subject: what is tuned; its repository and checkpoint have the paths.
    """
    return str(provenance.portable(str(error), subject.variant.root))


def _resolve(subject: TuneSubject, arm: Arm, needed: str) -> ServerCommand:
    if arm.drafts and needed:
        raise SearchError(needed)
    command = subject.resolve(arm)
    checks.check_weights(command)
    return command


def _decisive(command: ServerCommand) -> object:
    return command.argv, command.variables


def _plan(subject: TuneSubject, arms: Sequence[Arm], log: Path, progress: Progress) -> dict[str, Plan]:
    """Plans of arms on this machine, by name; none on a GPU without a data sheet, where an arm's server says it."""
    try:
        chosen = choose_gpu(None, subject.variant.root) if subject.served.platform == "cuda" else None
    except UnknownGpuError:
        return {}
    plans: dict[str, Plan] = {}
    progress("planning", 0, len(arms))
    variants = [subject.with_arm(arm) for arm in arms]
    for arm, plan in zip(
        arms, rehearsal.rehearse_variants(variants, chosen and chosen.gpu, log=log), strict=True
    ):
        plans[arm.name] = plan
        progress("planning", len(plans), len(arms))
    return plans


def _refuse(arm: Arm, plan: Plan | None, command: ServerCommand) -> None:
    """Refuse an arm that vLLM refuses, that is known to die or to give other tokens, or that has no effect.

    Raises:
        SlimqwenError: the reason.
    """
    if plan is None:
        checks.refuse_trouble(command, start.match_flag_trouble(command).dies)
        return
    if plan.error:
        raise SearchError(plan.error)
    for part in arm.parts:
        if obstacle := part.find_obstacle(plan, command.variant.weights):
            raise SearchError(obstacle)
    known = start.match_start_trouble(plan, command, compiles=start.compiles_here(command))
    checks.refuse_trouble(command, known.dies)
