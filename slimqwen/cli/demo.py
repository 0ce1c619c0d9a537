"""`slimqwen demo`: runs the whole pipeline on the embedded model, or on a pretrained one, and gives a verdict."""

import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal, NamedTuple

import typer

from slimqwen import variant as variants
from slimqwen.cli.console import command, console, duration, progress_bar, relative, say
from slimqwen.cli.downloads import take_data, unpack_checkpoint
from slimqwen.workspace import create_workspace, find_workspace, is_checkout

if TYPE_CHECKING:
    from slimqwen.evals.checks import Check
    from slimqwen.processes import Outcome, Task
    from slimqwen.search.measurements import RecordSettings
    from slimqwen.stats.verdict import Verdict


class DemoModel(NamedTuple):
    """A model that a demo runs on.

    Attributes:
        baseline, variant: names of the variants.
        recipe: what the variant's recipe does, in words.
        minutes: minutes that the demo takes on two quiet cores, in words, such as "about 12".
        note: a line below the table; empty for none.
        is_packaged: whether the baseline's weights come from a Python package, not from the repository.
    """

    baseline: str
    variant: str
    recipe: str
    minutes: str
    note: str = ""
    is_packaged: bool = False


MODELS: Mapping[str, DemoModel] = {
    "tiny": DemoModel(
        "tiny",
        "tiny-best",
        "4- and 8-bit weights by AWQ, MTP head taught a small draft vocabulary, compile cache baked",
        "about 12",
        "TTFT: the MTP head of tiny-best reads the prompt, too, before its first token: one layer beside the "
        "four here, beside 24 to 64 in published models.",
    ),
    "smollm2": DemoModel(
        "smollm2-135m",
        "smollm2-135m-best",
        "8-bit weights by AWQ, compile cache baked",
        "about 25",
        is_packaged=True,
    ),
}
"""The demos, by the name of the model."""

_FAILED = "failed"


def demo(
    rounds: Annotated[int, typer.Option(min=2, help="latency rounds")] = 3,
    model: Annotated[
        Literal["tiny", "smollm2"], typer.Option(help="the embedded model, or SmolLM2-135M")
    ] = "tiny",
    data: Annotated[
        Path | None, typer.Option(metavar="FOLDER", help="smollm2: folder with WikiText and BLiMP")
    ] = None,
) -> None:
    """Make a variant of the embedded model, judge it, time it, and say what to serve (12 minutes on two cores).

    With --model smollm2 the same on a pretrained model and real text: about 25 minutes, and a download of 93 MB.
    """
    from slimqwen.evals.suites.suite import Suite
    from slimqwen.report import site, tables
    from slimqwen.search import SearchError

    subject = MODELS[model]
    root = _find_root()
    started = time.monotonic()
    baseline = variants.load(subject.baseline)
    if subject.is_packaged and not baseline.weights.is_dir():
        unpack_checkpoint(baseline)
    if data:
        take_data(baseline.evaluation, data)
    if left_out := Suite.load(baseline.evaluation, root).describe_left_out():
        say(left_out)

    def step(number: int, activity: str) -> None:
        console.print(f"[bold]{number}/2 {activity}[/bold] (after {time.monotonic() - started:.0f} s)")

    step(
        1,
        f"make {subject.variant} ({subject.recipe}), check its quality beside its baseline's, then time both in "
        f"turns, {rounds} rounds with a fresh server each: {subject.minutes} minutes on two quiet cores",
    )
    result = _measure(root, subject, rounds)
    step(2, "build the report")
    with progress_bar() as progress:
        report = site.build_page(root, root / "report", progress)
    console.print(
        f"[bold]{subject.variant} beside its baseline {subject.baseline}; this run took "
        f"{duration(time.monotonic() - started)}"
        "[/bold]"
    )
    if "quality" in result.records:
        console.print(tables.summary_table(root, subject.baseline, subject.variant, site.DEMO).as_rich())
        if subject.note:
            say(subject.note)
    for line in _conclude(subject, result):
        say(line)
    say(
        f"records: {site.DEMO}/{subject.baseline}, {site.DEMO}/{subject.variant}; all variants: "
        f"{relative(report.index)}"
    )
    if broken := [name for name, reason in result.missing.items() if reason.startswith(_FAILED)]:
        raise SearchError(
            f"failed: {', '.join(broken)}; read why above, then run the same command again, which reuses the rest"
        )


@dataclass(frozen=True)
class DemoRecords:
    """The records of the demo, by part: each check of the gate, and the speed.

    Attributes:
        records: records of each part by its name; if the baseline has one, it is first.
        missing: reason why a part has no record, by the part's name.
    """

    records: Mapping[str, Sequence[Path]]
    missing: Mapping[str, str]


def _find_root() -> Path:
    """The workspace; an empty working folder becomes one."""
    here = Path.cwd()
    if not is_checkout() and find_workspace() is None and not any(here.iterdir()):
        create_workspace(here)
        say(f"{here} is a workspace now")
    return variants.repository_root()


def _measure(root: Path, subject: DemoModel, rounds: int) -> DemoRecords:
    """Make, judge and time the variant; print the age of reused stages and records.

    Raises:
        SearchError: a stage failed.
    """
    from slimqwen.processes import Failure, run_tasks
    from slimqwen.processes.local import LocalExecutor, default_width
    from slimqwen.recipe import variant_recipe
    from slimqwen.search import SearchError
    from slimqwen.search.measurements import check_task, latency_task, recipe_task

    baseline, variant = variants.load(subject.baseline), variants.load(subject.variant)
    reused_keys = {forecast.key for forecast in variant_recipe.forecast_recipe(variant) if forecast.reused}
    settings = _record_settings()
    # The last of the gate's checks takes longest, so it begins first and the others run beside it.
    gated = reversed([*settings.load_checks(variant).values()])
    checks = [check for check in gated if not check.takes_minutes]
    parts: dict[str, list[Task]] = {}

    def add_checks(side: variants.Variant) -> list["Task"]:
        asked = [check for check in checks if side.name in [each.name for each in check.sides]]
        tasks = [check_task(check, side, settings) for check in asked]
        for check, task in zip(asked, tasks, strict=True):
            parts.setdefault(check.name, []).append(task)
        return tasks

    steps = variant_recipe.read_recipe(variant).steps
    makers = [step for step in steps if not step.stage.only_caches(step.parameters)]
    with (
        progress_bar() as progress,
        LocalExecutor(root, progress, warm=True, width=default_width()) as executor,
    ):
        outcomes: dict[str, Outcome] = {}
        for make, beside in (
            # The baseline is measured while the variant is made.
            (recipe_task(variant, len(makers)), add_checks(baseline)),
            (recipe_task(variant, alone=True), []),
        ):
            outcomes |= run_tasks([make, *beside], executor)
            if isinstance(failure := outcomes[make.key], Failure):
                raise SearchError(failure.reason)
        outcomes |= run_tasks(add_checks(variant), executor)
        parts["speed"] = [latency_task((baseline, variant), rounds, settings)]
        outcomes |= run_tasks(parts["speed"], executor)
    for stage in variant_recipe.run_recipe(variant):
        took = duration(stage.manifest.wall_seconds)
        is_reused = stage.manifest.key in reused_keys
        state = f"reused, made {_age(stage.folder)} ago in {took}" if is_reused else took
        sizes = f"{stage.bytes_before / 1e6:.1f} -> {stage.bytes_after / 1e6:.1f} MB"
        say(f"    {stage.stage}: {state}, {sizes}")
    return _sort_outcomes({part: [outcomes[task.key] for task in tasks] for part, tasks in parts.items()})


def _sort_outcomes(parts: Mapping[str, Sequence["Outcome"]]) -> DemoRecords:
    """Separate the parts with records from those that failed."""
    from slimqwen.host_load import HostBusyError
    from slimqwen.processes import Failure

    records: dict[str, list[Path]] = {}
    missing: dict[str, str] = {}
    for part, outcomes in parts.items():
        for outcome in outcomes:
            if not isinstance(outcome, Failure):
                records.setdefault(part, []).extend(outcome.value.paths)
                for path in outcome.value.paths if outcome.value.reused else ():
                    say(f"    reused: {relative(path)}, made {_age(path)} ago")
            elif isinstance(outcome.error, HostBusyError):
                missing[part] = f"not decided: {outcome.error.cause}"
            else:
                missing[part] = f"{_FAILED}: {outcome.reason}"
    return DemoRecords({part: paths for part, paths in records.items() if part not in missing}, missing)


def _conclude(subject: DemoModel, found: DemoRecords) -> Iterator[str]:
    """Yield a line on each part, then one on the variant to serve."""
    from slimqwen.records import store
    from slimqwen.report import choice
    from slimqwen.stats.verdict import Verdict, overall

    variant = variants.load(subject.variant)
    checks = _record_settings().load_checks(variant)
    verdicts = {part: _judge(checks, part, paths) for part, paths in found.records.items()}
    speed = verdicts.pop("speed", None)
    slow = [name for name, check in checks.items() if check.takes_minutes]
    path, gate = choice.judged_by_gate(variant) or (variant.folder, None)
    before = gate.verdicts if gate else {}
    left_out = ", ".join(name for name in slow if name not in before)
    cure = f" ({left_out} not checked: `slimqwen gate --variant {variant.name}`)" if left_out else ""
    for part, outcome in {**verdicts, **({"speed": speed} if speed else {}), **found.missing}.items():
        yield f"  {part:<11} {outcome}"
    for name in before.keys() & slow:
        yield f"  {name:<11} {before[name]}, by {relative(path)}"
    decision = choice.decide(
        choice.Case(
            variant=subject.variant,
            baseline=subject.baseline,
            verdict=overall([*verdicts.values(), *([gate.verdict] if gate else [])]),
            is_faster=None if speed is None else speed == Verdict.PASS,
            unchecked=[part for part in found.missing if part != "speed"],
            doubts=choice.object_to(store.read_measurements(variant.folder).status),
        )
    )
    is_short = found.missing and not decision.is_final
    again = "; the same command measures again what is missing" if is_short else ""
    yield f"  {'serve':<11} slimqwen serve --variant {decision.serve}: {decision.reason}{again}{cure}"


def _record_settings() -> "RecordSettings":
    from slimqwen.report.site import DEMO
    from slimqwen.search.measurements import RecordSettings

    return RecordSettings(tuple(command()), DEMO)


def _judge(checks: Mapping[str, "Check[Any]"], part: str, paths: Sequence[Path]) -> "Verdict":
    """Verdict on a part; the speed passes if the interval of the speed-up over all requests is wholly above 1."""
    from slimqwen.bench.latency import speedups
    from slimqwen.stats.verdict import Verdict

    if part in checks:
        return checks[part].judge(paths)
    rows = speedups.compare_latency(*paths)
    (total,) = (row for row in rows if row.prompt_class == speedups.ALL_CLASSES and row.measure == "wall_ms")
    is_faster = total.interval is not None and total.interval[0] > 1
    return Verdict.PASS if is_faster else Verdict.INCONCLUSIVE


def _age(path: Path) -> str:
    """Time since a file or folder was written, in words."""
    return duration(max(0.0, time.time() - path.stat().st_mtime))
