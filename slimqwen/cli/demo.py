"""`slimqwen demo`: the whole pipeline on the embedded model, and its verdict on the variant."""

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, Annotated

import typer

from slimqwen import variant as variants
from slimqwen.cli.console import command, console, progress_bar, relative, say

if TYPE_CHECKING:
    from slimqwen.stats.verdict import Verdict

_BASELINE, _VARIANT = "tiny", "tiny-best"
_GPU, _CONTEXT_LEN = "a10g", 2048
"""The GPU of the roofline at the end, and its cached tokens."""

_FAILED = "failed"


def demo(
    rounds: Annotated[int, typer.Option(min=2, help="latency rounds")] = 3,
) -> None:
    """Make a variant of the embedded model, judge its quality, time it, and say what to serve (6 to 10 minutes)."""
    from slimqwen.report import site
    from slimqwen.search import SearchError

    root = variants.repository_root()
    started = time.monotonic()

    def step(number: int, activity: str) -> None:
        console.print(f"[bold]{number}/2 {activity}[/bold] (after {time.monotonic() - started:.0f} s)")

    step(
        1,
        f"make {_VARIANT} (4- and 8-bit weights by AWQ, MTP head taught a small draft vocabulary, compile cache "
        "baked), check its quality beside its baseline's, then time both in turns, "
        f"{rounds} rounds with a fresh server each",
    )
    result = _measure(root, rounds)
    step(2, "build the report")
    with progress_bar() as progress:
        report = site.build_page(root, root / "report", progress)
    console.print(
        f"[bold]{_VARIANT} beside its baseline {_BASELINE}; this run took {_duration(started)}[/bold]"
    )
    for line in _summary(result):
        say(line)
    say(f"records: {site.DEMO}/{_BASELINE}, {site.DEMO}/{_VARIANT}; all variants: {relative(report.index)}")
    if broken := [name for name, reason in result.missing.items() if reason.startswith(_FAILED)]:
        raise SearchError(
            f"failed: {', '.join(broken)}; the lines above say why; run `slimqwen demo` again, which keeps the rest"
        )


@dataclass(frozen=True)
class DemoRecords:
    """The records of the demo.

    Attributes:
        records: by part of the summary, of pairs the baseline's first.
        missing: why a part has none, by its name.
    """

    records: Mapping[str, Sequence[Path]]
    missing: Mapping[str, str]


def _measure(root: Path, rounds: int) -> DemoRecords:
    """Make, judge and time the variant; prints the age of stages and records that still hold and are reused.

    Raises:
        SearchError: a stage failed, or nothing could be measured.
    """
    from slimqwen.host_load import HostBusyError
    from slimqwen.recipe import variant_recipe
    from slimqwen.report.site import DEMO
    from slimqwen.search import SearchError
    from slimqwen.search.executors.local import LocalExecutor, default_width
    from slimqwen.search.measurements import Options
    from slimqwen.search.sweep import SETUP, sweep

    variant = variants.load(_VARIANT)
    reused_keys = {forecast.key for forecast in variant_recipe.forecast_recipe(variant) if forecast.reused}
    width = default_width()
    # Quality takes longer than the other checks together: as many parts as tasks run at a time share it.
    options = Options(
        ("fidelity", "acceptance", "quality", "latency"),
        tuple(command()),
        rounds=rounds,
        parts=width,
        records=DEMO,
    )
    with progress_bar() as progress:
        executor = LocalExecutor(root, progress, warm=True, width=width)
        (result,) = sweep([_VARIANT], options, executor, root)
    if SETUP in result.failures:
        raise SearchError(str(result.failure))
    for path in result.reused:
        say(f"    reused: {relative(path)}, made {_age(path)} ago")
    for outcome in variant_recipe.run_recipe(variant):
        duration = f"{outcome.manifest.wall_seconds:.0f} s"
        is_reused = outcome.manifest.key in reused_keys
        state = f"reused, made {_age(outcome.folder)} ago in {duration}" if is_reused else duration
        sizes = f"{outcome.bytes_before / 1e6:.1f} -> {outcome.bytes_after / 1e6:.1f} MB"
        say(f"    {outcome.stage}: {state}, {sizes}")
    missing = {
        _title(measure): f"not decided: {failure.error.cause}"
        if isinstance(failure.error, HostBusyError)
        else f"{_FAILED}: {failure.reason}"
        for measure, failure in result.failures.items()
    }
    return DemoRecords({_title(measure): paths for measure, paths in result.records.items()}, missing)


def _title(measure: str) -> str:
    return "speed" if measure == "latency" else measure


def _summary(found: DemoRecords) -> Iterator[str]:
    """Lines on size, speed, quality, and the variant to serve."""
    from slimqwen.checkpoint.files import bytes_on_disk
    from slimqwen.stats.verdict import Verdict, overall

    sizes = [bytes_on_disk(variants.load(name).weights) / 1e6 for name in (_BASELINE, _VARIANT)]
    yield f"  {'size':<11} {sizes[0]:.1f} -> {sizes[1]:.1f} MB: {sizes[0] / sizes[1]:.2f}x smaller"
    verdicts = {}
    for part, describe in _PARTS.items():
        if reason := found.missing.get(part):
            yield f"  {part:<11} {reason}"
        else:
            lines, verdicts[part] = describe(*found.records[part])
            yield from lines
    is_faster = verdicts.pop("speed", None)
    verdict = overall(list(verdicts.values()))
    unchecked = [part for part in found.missing if part != "speed"]
    if verdict == Verdict.FAIL:
        answer = f"slimqwen serve --variant {_BASELINE}: {_VARIANT} lost more than a limit allows"
    elif unchecked:
        answer = f"not decided: no verdict on {', '.join(unchecked)}"
    elif verdict == Verdict.INCONCLUSIVE:
        answer = f"not decided: `slimqwen gate --variant {_VARIANT}` goes on with all items"
    elif is_faster is None:
        answer = f"not decided: {_VARIANT} is as good; when nothing else runs, `slimqwen demo` times it again"
    elif is_faster == Verdict.PASS:
        answer = f"slimqwen serve --variant {_VARIANT}: faster; no check saw a loss beyond its limit"
    else:
        answer = f"slimqwen serve --variant {_BASELINE}: {_VARIANT} is as good, but not surely faster here"
    yield f"  {'serve':<11} {answer}"


def _speed(baseline: Path, variant: Path) -> tuple[list[str], "Verdict"]:
    """The speed-ups; passes where the variant is surely faster over all requests."""
    from slimqwen.bench.latency import speedups
    from slimqwen.stats.verdict import Verdict

    rows = speedups.compare_latency(baseline, variant)
    (total,) = (row for row in rows if row.prompt_class == speedups.ALL_CLASSES and row.measure == "wall_ms")
    late = [
        row.prompt_class for row in rows if row.measure == "ttft_ms" and row.interval and row.interval[1] < 1
    ]
    lines = [
        f"  {'speed':<11} {total.ratio} as fast over all requests on this CPU [95 % interval]: weights, drafts and "
        "compilation together" + (f"; the first token comes later: {', '.join(late)}" if late else "")
    ]
    by_measure = {(row.prompt_class, row.measure): row for row in rows}
    for row in rows:
        if row.measure == "tpot_ms" and row.interval:
            first_token, request = (by_measure[row.prompt_class, name] for name in ("ttft_ms", "e2el_ms"))
            lines.append(
                f"  {row.prompt_class:<11} {row.first:.2f} -> {row.second:.2f} ms a token after the first: "
                f"{row.ratio} as fast; first token {first_token.ratio}; whole requests {request.ratio}"
            )
    is_faster = total.interval is not None and total.interval[0] > 1
    return lines, Verdict.PASS if is_faster else Verdict.INCONCLUSIVE


def _fidelity(path: Path) -> tuple[list[str], "Verdict"]:
    from slimqwen.evals.fidelity import Fidelity
    from slimqwen.records import store

    record = store.read_record(path, Fidelity)
    kl = max(figures.kl_nats.value for figures in record.modes.values() if figures.kl_nats)
    limit = f"limit {record.limits.kl_nats:g}"
    return [f"  {'fidelity':<11} KL {kl:.5f} nats a token, {limit}: {record.verdict}"], record.verdict


def _acceptance(baseline: Path, variant: Path) -> tuple[list[str], "Verdict"]:
    """The acceptance lengths, and the speed that they would give on a GPU."""
    from slimqwen.evals import acceptance_share

    share = acceptance_share.compare_acceptance(baseline, variant)
    line = (
        f"  {'acceptance':<11} {share.first:.2f} -> {share.second:.2f} tokens a step, both drafting: "
        f"{100 * share.ratio.value:.1f} % [{100 * share.ratio.low:.1f}, {100 * share.ratio.high:.1f}] of the "
        f"baseline's: {share.verdict}"
    )
    return [line, _modelled_speed(share.second)], share.verdict


def _quality(baseline: Path, variant: Path) -> tuple[list[str], "Verdict"]:
    from slimqwen.evals import quality_comparison
    from slimqwen.stats.verdict import overall

    tasks = quality_comparison.compare_quality(baseline, variant)
    verdicts = [f"{task.task.removeprefix('tinyworld_')} {task.judgement.verdict}" for task in tasks]
    line = f"  {'quality':<11} {', '.join(verdicts)}"
    return [line], overall([task.judgement.verdict for task in tasks])


_PARTS: Mapping[str, Callable[..., tuple[list[str], "Verdict"]]] = MappingProxyType(
    {"speed": _speed, "fidelity": _fidelity, "acceptance": _acceptance, "quality": _quality}
)
"""The parts of the summary: lines and verdict from records, the baseline's first."""


def _modelled_speed(acceptance_length: float) -> str:
    """Decoding speed of the variant relative to the baseline, by a GPU's roofline, and the gain of each optimisation.

    Args:
        acceptance_length: acceptance length of the variant.
    """
    from slimqwen.roofline.bounds import ServedModel
    from slimqwen.roofline.gpu import read_gpu

    variant = variants.load(_VARIANT)
    gpu = read_gpu(_GPU, variant.root)
    steps = list(ServedModel.load(variant).list_waterfall_steps(gpu, _CONTEXT_LEN))
    speeds = [(acceptance_length if step.num_speculative_tokens else 1) / step.seconds for step in steps]
    gains = (
        f"{step.optimisation} {speed / before:.2f}x"
        for step, before, speed in zip(steps[1:], speeds, speeds[1:], strict=False)
    )
    speed = f"{speeds[-1] / speeds[0]:.2f}x as fast by the roofline of that GPU, not measured"
    return f"  {_GPU:<11} {speed}: {'; '.join(gains)}"


def _age(path: Path) -> str:
    """Time since a file or folder was written, in its largest unit."""
    seconds = max(0.0, time.time() - path.stat().st_mtime)
    for unit, length in (("days", 86400), ("hours", 3600), ("minutes", 60)):
        if seconds >= 2 * length:
            return f"{seconds / length:.0f} {unit}"
    return f"{seconds:.0f} seconds"


def _duration(started: float) -> str:
    minutes, seconds = divmod(time.monotonic() - started, 60)
    return f"{minutes:.0f} min {seconds:.0f} s"
