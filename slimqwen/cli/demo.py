"""`slimqwen demo`: the whole pipeline on the embedded model, and its verdict on the variant."""

import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from slimqwen import variant as variants
from slimqwen.cli.console import command, console, progress_bar, relative, say

if TYPE_CHECKING:
    from slimqwen.records.record import Record

_BASELINE, _VARIANT = "tiny", "tiny-best"
_GPU, _CONTEXT_LEN = "a10g", 2048
"""The GPU of the roofline at the end, and its cached tokens."""


def demo(
    rounds: Annotated[int, typer.Option(min=2, help="latency rounds")] = 3,
) -> None:
    """Make a variant of the embedded model, judge its quality, time it, and say what to serve (6 to 10 minutes)."""
    from slimqwen.report import site

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
    evidence = _measure(root, rounds)
    step(2, "build the report")
    with progress_bar() as progress:
        report = site.build(root, root / "report", progress)
    console.print(
        f"[bold]{_VARIANT} beside its baseline {_BASELINE}; this run took {_duration(started)}[/bold]"
    )
    for line in _summary(evidence):
        say(line)
    say(f"records: {site.DEMO}/{_BASELINE}, {site.DEMO}/{_VARIANT}; all variants: {relative(report.index)}")


@dataclass(frozen=True)
class Evidence:
    """Records of the demo; of pairs the baseline's comes first."""

    fidelity: Path
    acceptance: tuple[Path, Path]
    quality: tuple[Path, Path]
    latency: tuple[Path, Path]


def _measure(root: Path, rounds: int) -> Evidence:
    """Make, judge and time the variant; prints the age of stages and records that still hold and are reused.

    Raises:
        SearchError: a stage or a measurement failed.
    """
    from slimqwen.bench.latency import Latency
    from slimqwen.evals import gate
    from slimqwen.evals.acceptance import Acceptance
    from slimqwen.evals.fidelity import Fidelity
    from slimqwen.evals.quality import Quality
    from slimqwen.recipe import variant_recipe
    from slimqwen.records import store
    from slimqwen.report.site import DEMO
    from slimqwen.search import SearchError
    from slimqwen.search.executors.local import LocalExecutor, default_width
    from slimqwen.search.sweep.driver import sweep
    from slimqwen.search.sweep.required_tasks import Measure, Options

    baseline, variant = (variants.load(name) for name in (_BASELINE, _VARIANT))
    pair = baseline, variant
    kinds: dict[Measure, tuple[type[Record], tuple[variants.Variant, ...]]] = {
        "fidelity": (Fidelity, (variant,)),
        "acceptance": (Acceptance, pair),
        "quality": (Quality, pair),
        "latency": (Latency, pair),
    }
    missing = []
    for measure, (kind, sides) in kinds.items():
        fields: dict[str, Any] = {"rounds": rounds} if measure == "latency" else {}
        reusable = [
            gate.find_reusable(side, kind, folder=root / DEMO / side.name, **fields)
            if side.weights.exists()
            else None
            for side in sides
        ]
        if all(reusable):
            for path in filter(None, reusable):
                say(f"    reused: {relative(path)}, made {_age(path)} ago")
        else:
            missing.append(measure)
    reused_keys = {forecast.key for forecast in variant_recipe.status(variant) if forecast.reused}
    width = default_width()
    # Quality takes longer than the other checks together: as many parts as tasks run at a time share it.
    options = Options(tuple(missing), tuple(command()), rounds=rounds, parts=width, records=DEMO)
    with progress_bar() as progress:
        executor = LocalExecutor(root, progress, warm=True, width=width)
        (result,) = sweep([_VARIANT], options, executor, root)
    if result.failure:
        raise SearchError(result.failure)
    if result.earlier:
        say(f"    finished by an interrupted run: {', '.join(result.earlier)}")
    for outcome in variant_recipe.run(variant):
        duration = f"{outcome.manifest.wall_seconds:.0f} s"
        is_reused = outcome.manifest.key in reused_keys
        state = f"reused, made {_age(outcome.folder)} ago in {duration}" if is_reused else duration
        sizes = f"{outcome.bytes_before / 1e6:.1f} -> {outcome.bytes_after / 1e6:.1f} MB"
        say(f"    {outcome.stage}: {state}, {sizes}")
    newest = {
        measure: [next(iter(store.records(root / DEMO / side.name, kind))) for side in sides]
        for measure, (kind, sides) in kinds.items()
    }
    return Evidence(
        newest["fidelity"][0],
        (newest["acceptance"][0], newest["acceptance"][1]),
        (newest["quality"][0], newest["quality"][1]),
        (newest["latency"][0], newest["latency"][1]),
    )


def _summary(evidence: Evidence) -> Iterator[str]:
    """Lines on size, speed, quality, and the variant to serve."""
    from slimqwen.bench.latency import speedups
    from slimqwen.checkpoint.files import bytes_on_disk
    from slimqwen.evals import acceptance_share, quality_comparison
    from slimqwen.evals.fidelity import Fidelity
    from slimqwen.records import store
    from slimqwen.stats.verdict import Verdict, overall

    sizes = [bytes_on_disk(variants.load(name).weights) / 1e6 for name in (_BASELINE, _VARIANT)]
    yield f"  size        {sizes[0]:.1f} -> {sizes[1]:.1f} MB: {sizes[0] / sizes[1]:.2f}x smaller"
    rows = speedups.compare_latency(*evidence.latency)
    (total,) = (row for row in rows if row.prompt_class == speedups.ALL_CLASSES and row.measure == "wall_ms")
    yield (
        f"  speed       {total.ratio} as fast over all requests on this CPU [95 % interval]: weights, drafts and "
        "compilation together"
    )
    first_tokens, requests = (
        {row.prompt_class: row for row in rows if row.measure == measure}
        for measure in ("ttft_ms", "e2el_ms")
    )
    for row in rows:
        if row.measure == "tpot_ms" and row.interval:
            yield (
                f"  {row.prompt_class:<11} {row.first:.2f} -> {row.second:.2f} ms a token after the first: "
                f"{row.ratio} as fast; first token {first_tokens[row.prompt_class].ratio}; "
                f"whole requests {requests[row.prompt_class].ratio}"
            )
    fidelity = store.read(evidence.fidelity, Fidelity)
    kl = max(figures.kl_nats.value for figures in fidelity.modes.values() if figures.kl_nats)
    yield f"  fidelity    KL {kl:.5f} nats a token, limit {fidelity.limits.kl_nats:g}: {fidelity.verdict}"
    share = acceptance_share.compare(*evidence.acceptance)
    yield (
        f"  acceptance  {share.first:.2f} -> {share.second:.2f} tokens a step, both drafting: "
        f"{100 * share.ratio.value:.1f} % [{100 * share.ratio.low:.1f}, {100 * share.ratio.high:.1f}] of the "
        f"baseline's: {share.verdict}"
    )
    yield _modelled_speed(share.second)
    tasks = quality_comparison.compare(*evidence.quality)
    verdicts = [task.judgement.verdict for task in tasks]
    task_verdicts = ", ".join(
        f"{task.task.removeprefix('tinyworld_')} {task.judgement.verdict}" for task in tasks
    )
    yield f"  quality     {task_verdicts}"
    verdict = overall([fidelity.verdict, share.verdict, *verdicts])
    if verdict == Verdict.PASS and total.interval and total.interval[0] > 1:
        late = [name for name, row in first_tokens.items() if row.interval and row.interval[1] < 1]
        caveat = f", though the first token comes later ({', '.join(late)})" if late else ""
        yield f"  serve       slimqwen serve --variant {_VARIANT}: faster{caveat}; no check saw a loss beyond its limit"
    elif verdict == Verdict.PASS:
        yield f"  serve       slimqwen serve --variant {_BASELINE}: {_VARIANT} is as good, but not surely faster here"
    elif verdict == Verdict.FAIL:
        yield f"  serve       slimqwen serve --variant {_BASELINE}: {_VARIANT} lost more than a limit allows"
    else:
        yield f"  serve       not decided: `slimqwen gate check --variant {_VARIANT}` goes on with all items"


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
