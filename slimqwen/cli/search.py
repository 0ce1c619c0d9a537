"""`slimqwen search` and `slimqwen sweep`: many variants on this machine or on a Ray cluster."""

import math
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from slimqwen import variant as variants
from slimqwen.cli.console import (
    EXIT_CODES,
    Judge,
    command,
    console,
    progress_bar,
    relative,
    say,
    show_record,
    table,
)
from slimqwen.cli.options import WorkloadName
from slimqwen.progress import Progress

if TYPE_CHECKING:
    from slimqwen.search.executors import Executor

_LISTS = ("--variants", "--measure")
_FAILED = 1

Width = Annotated[
    int | None,
    typer.Option(
        min=1,
        help="tasks at a time (default: one per core here, one on a GPU; every node of a Ray cluster)",
    ),
]
RayAddress = Annotated[
    str | None,
    typer.Option(metavar="ADDRESS", help="Ray cluster, host:port or auto (default: this machine alone)"),
]


def search(
    base: Annotated[str, typer.Option("--base", "--variant", metavar="NAME", help="variant to start from")],
    gpu: Annotated[str, typer.Option(metavar="NAME", help="GPU of eval/devices.yaml to serve on")],
    budget: Annotated[
        str | None,
        typer.Option(metavar="NAME", help="limits of eval/gates/ (default: the base's EVALUATION)"),
    ] = None,
    space: Annotated[
        str | None, typer.Option(metavar="NAME", help="file of eval/search/ (default: that of the budget)")
    ] = None,
    trials: Annotated[
        int | None, typer.Option(min=1, help="candidates, instead of the space's number")
    ] = None,
    minutes: Annotated[
        float | None, typer.Option(min=0, help="begin no candidate after this many minutes")
    ] = None,
    finalists: Annotated[
        int | None, typer.Option(min=0, help="candidates to prove, instead of the space's number")
    ] = None,
    ray: RayAddress = None,
    width: Width = None,
) -> None:
    """Find the fastest variant within a quality budget among recipes and flags, cheap checks before expensive ones.

    Ctrl-C keeps what has been measured; the same command continues.
    """
    from slimqwen.search.driver import Extent, search_variants
    from slimqwen.search.space import SearchSettings

    root = variants.repository_root()
    subject = variants.load(base, root)
    limits = budget or subject.evaluation
    settings = SearchSettings.load(space or limits, root)
    extent = Extent(
        trials or settings.trials,
        settings.finalists if finalists is None else finalists,
        math.inf if minutes is None else 60 * minutes,
        width,
    )
    with progress_bar() as progress:
        executor = _executor(ray, root, progress, width, warm=True)
        path = search_variants(
            subject, gpu, limits, settings, executor, extent, command=command(), progress=progress
        )
    show_record(path)


class Measure(StrEnum):
    """What a sweep measures."""

    GATE = "gate"
    FIDELITY = "fidelity"
    ACCEPTANCE = "acceptance"
    QUALITY = "quality"
    ENGINE = "engine"
    LATENCY = "latency"


class ListOptions(Judge):
    """A verb whose list options take several words: `--variants a b` is `--variants a --variants b`."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        """Repeat the option before every further word of its list."""
        expanded: list[str] = []
        option = None
        for word in args:
            if word.startswith("-"):
                option = word if word in _LISTS else None
                expanded += [] if option else [word]
            else:
                expanded += [option, word] if option else [word]
        return super().parse_args(ctx, expanded)


def sweep(
    variant: Annotated[
        list[str], typer.Option("--variants", metavar="NAME …", help="folders of experiments/")
    ],
    measure: Annotated[
        list[Measure],
        typer.Option("--measure", help="measurements against each variant's baseline, one or several"),
    ],
    ray: RayAddress = None,
    width: Width = None,
    workload: WorkloadName = None,
    rounds: Annotated[
        int | None, typer.Option(min=1, help="latency rounds, instead of the workload's")
    ] = None,
    parts: Annotated[
        int, typer.Option(min=1, help="ranges into which the items of a suite are split, each a task")
    ] = 1,
    limit: Annotated[int | None, typer.Option(min=2, help="items per task of a suite")] = None,
) -> None:
    """Measure variants against their baselines in tasks (stages, shards of items, timings), on one machine or many.

    A record that still holds is not measured again; the same command continues an interrupted sweep.

    Exit code 0: all gates pass, 1: a gate or a variant fails, 2: inconclusive, 3: error.
    """
    from slimqwen.evals.suites.suite import AUTO
    from slimqwen.search.measurements import Options
    from slimqwen.search.sweep import sweep as run_sweep

    if ray is not None and width is not None:
        raise typer.BadParameter(
            "--width is for this machine; every node or GPU of a Ray cluster gets a task"
        )
    root = variants.repository_root()
    options = Options(
        measures=tuple(each.value for each in dict.fromkeys(measure)),
        command=tuple(command()),
        workload=workload or "classes",
        rounds=rounds,
        parts=parts,
        limit=limit or AUTO,
    )
    with progress_bar() as progress:
        results = run_sweep(variant, options, _executor(ray, root, progress, width), root)
    shown = table(("variant", "outcome", "records"), ())
    for result in results:
        files = ", ".join(str(relative(path)) for paths in result.records.values() for path in paths)
        shown.add_row(result.variant, "failed" if result.failure else result.outcome or "measured", files)
    console.print(shown)
    for result in results:
        if result.failure:
            say(f"{result.variant}: {result.failure}")
    codes = [_FAILED if each.failure else EXIT_CODES.get(each.outcome, 0) for each in results]
    raise typer.Exit(_FAILED if _FAILED in codes else max(codes))


def _executor(
    ray: str | None, root: Path, progress: Progress, width: int | None, *, warm: bool = False
) -> "Executor":
    from slimqwen.search.executors.local import LocalExecutor, default_width

    if ray is None:
        return LocalExecutor(root, progress, warm=warm, width=width or default_width())
    from slimqwen.search.executors.ray import RayExecutor

    return RayExecutor(root, ray, progress)
