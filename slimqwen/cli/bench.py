"""`slimqwen bench`: is a variant fast?"""

import sys
from typing import Annotated

import typer

from slimqwen import variant as variants
from slimqwen.cli.console import EXIT_CODES, Judge, command, console, progress_bar, show_record
from slimqwen.cli.options import (
    EvenIfBusy,
    LengthSweepSettingsName,
    Port,
    RecordsFolder,
    Rounds,
    VariantOption,
    WorkloadName,
)
from slimqwen.variant import Variant

app = typer.Typer(
    help="Is a variant fast? Latency, start-up, first request, soak, fuzz.", no_args_is_help=True
)

Minutes = Annotated[float, typer.Option(help="minutes of load")]
Examples = Annotated[
    int, typer.Option(min=1, help="largest number of valid requests, and of invalid ones, for each endpoint")
]


@app.command()
def latency(
    variant: VariantOption,
    against: Annotated[
        list[Variant] | None,
        typer.Option(
            metavar="NAME", help="further variant, on fresh servers in turns; repeat it", parser=variants.load
        ),
    ] = None,
    baseline: Annotated[
        bool, typer.Option("--baseline", help="time the variant's baseline in turns with it, baseline first")
    ] = False,
    workload: WorkloadName = "classes",
    rounds: Annotated[int | None, typer.Option(help="rounds, instead of the workload's")] = None,
    records_dir: RecordsFolder = None,
    port: Port = None,
    even_if_busy: EvenIfBusy = False,
) -> None:
    """Time variants over a workload, in turns: TTFT, TPOT, ITL, end-to-end latency, throughput."""
    from slimqwen.bench import latency
    from slimqwen.bench.workload import Workload

    subjects = [variant, *(against or ())]
    if baseline:
        if len(subjects) > 1 or subjects[0].baseline is None:
            raise typer.BadParameter("--baseline takes one variant, and one that has a baseline")
        subjects.insert(0, variants.load(subjects[0].baseline))
    with progress_bar() as progress:
        paths = latency.measure(
            subjects,
            Workload.load(workload, variant.root),
            command=command(),
            rounds=rounds,
            port=port,
            records_folders=[records_dir / each.name for each in subjects] if records_dir else None,
            even_if_busy=even_if_busy,
            progress=progress,
        )
    busy = [show_record(path).provenance.host_was_busy for path in paths]
    for path in paths[1:] if not any(busy) else ():
        console.print(latency.comparison(paths[0], path).as_rich())


@app.command()
def startup(variant: VariantOption, rounds: Rounds = 6, even_if_busy: EvenIfBusy = False) -> None:
    """Time a start phase by phase: cold, warm, from the baked compile cache."""
    from slimqwen.bench import start_up

    log = variant.root / "logs" / f"start-up-{variant.name}.log"
    with progress_bar() as progress:
        path = start_up.write(
            variant, rounds, log, command=command(), even_if_busy=even_if_busy, progress=progress
        )
    show_record(path, log)


@app.command()
def first_request(variant: VariantOption, rounds: Rounds = 6, even_if_busy: EvenIfBusy = False) -> None:
    """Time the first requests after readiness against later ones, with and without warm-up."""
    from slimqwen.bench import first_request

    with progress_bar() as progress:
        path = first_request.write(
            variant, rounds, command=command(), even_if_busy=even_if_busy, progress=progress
        )
    show_record(path)


@app.command()
def middleware(
    variant: VariantOption,
    rounds: Rounds = 6,
    pairs: Annotated[int, typer.Option(help="requests to each server per round")] = 50,
    even_if_busy: EvenIfBusy = False,
) -> None:
    """Time a variant's server in turns with bare vLLM under the same flags."""
    from slimqwen.bench import middleware

    with progress_bar() as progress:
        path = middleware.write(
            variant,
            rounds,
            pairs,
            command=command(),
            even_if_busy=even_if_busy,
            progress=progress,
        )
    show_record(path)


@app.command(cls=Judge)
def soak(variant: VariantOption, minutes: Minutes = 15) -> None:
    """Load the server for minutes: does its memory stay flat, does every request end?

    Exit code 0: yes, 1: something is wrong, 2: too short to tell, 3: error.
    """
    from slimqwen.bench import soak

    log = variant.root / "logs" / f"soak-{variant.name}.log"
    with progress_bar() as progress:
        path = soak.write(variant, 60 * minutes, log, command=command(), progress=progress)
    raise typer.Exit(EXIT_CODES[show_record(path, log).outcome])


@app.command(cls=Judge)
def fuzz(variant: VariantOption, examples: Examples = 20) -> None:
    """Send the server malformed requests: is each refused with a reason, and does it serve as before?

    Exit code 0: yes, 1: something is wrong, 3: error.
    """
    from slimqwen.bench import fuzz

    log = variant.root / "logs" / f"fuzz-{variant.name}.log"
    with progress_bar() as progress:
        path = fuzz.write(variant, examples, log, command=command(), progress=progress)
    raise typer.Exit(EXIT_CODES[show_record(path, log).outcome])


def release_check(
    variant: VariantOption,
    minutes: Minutes = 15,
    examples: Examples = 20,
    settings: LengthSweepSettingsName = None,
) -> None:
    """Check a variant before a release: length sweep, malformed requests, soak; one page, one verdict.

    Measurements with the same code, checkpoint, flags and machine are reused.
    Exit code 0: pass, 1: fail, 2: inconclusive, 3: error.
    """
    from slimqwen.search import release_check

    with progress_bar() as progress:
        path = release_check.write(
            variant,
            settings or variant.evaluation,
            minutes=minutes,
            examples=examples,
            command=command(),
            progress=progress,
        )
    raise typer.Exit(EXIT_CODES[show_record(path).outcome])


@app.command()
def prune_vocab(
    rounds: Annotated[int, typer.Option(min=1, help="rounds of one copy and one prune")] = 3,
    layers: Annotated[int, typer.Option(min=1, help="transformer layers of the checkpoint")] = 32,
    yes: Annotated[bool, typer.Option("--yes", help="do not ask before 18 GB of disk are used")] = False,
) -> None:
    """Time pruning a 4B-shaped checkpoint against copying it (18 GB of disk, removed again)."""
    from slimqwen.bench import pruning_time

    if not yes and not sys.stdin.isatty():
        raise typer.BadParameter(
            "this uses up to 18 GB of disk, and there is no terminal to ask at; give --yes"
        )
    if not yes and not typer.confirm("This uses up to 18 GB of disk and frees them again; go on?"):
        raise typer.Exit(1)
    root = variants.repository_root()
    with progress_bar() as progress:
        path = pruning_time.write(root, rounds, layers, command=command(), progress=progress)
    show_record(path)
