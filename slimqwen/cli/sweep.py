"""`slimqwen sweep`: the same measurements of many variants, on this machine or on a Ray cluster."""

from enum import StrEnum
from typing import Annotated, Any

import typer

from slimqwen import variant as variants
from slimqwen.cli.console import EXIT_CODES, Judge, command, console, progress_bar, relative, say, table
from slimqwen.cli.options import WorkloadName

_LISTS = ("--variants", "--measure")
_FAILED = 1


class Measure(StrEnum):
    """What a sweep measures."""

    GATE = "gate"
    QUALITY = "quality"
    LATENCY = "latency"


class Sweep(Judge):
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
        typer.Option(
            "--measure", help="what is measured against each variant's baseline; several may follow"
        ),
    ],
    ray: Annotated[
        str | None,
        typer.Option(metavar="ADDRESS", help="Ray cluster, host:port or auto (default: this machine alone)"),
    ] = None,
    workload: WorkloadName = "classes",
    rounds: Annotated[int | None, typer.Option(help="of latency, instead of the workload's")] = None,
    parts: Annotated[
        int, typer.Option(min=1, help="ranges that the items of a suite are asked in, each a task")
    ] = 1,
    limit: Annotated[int | None, typer.Option(min=2, help="items per task of a suite")] = None,
) -> None:
    """Measure variants against their baselines: stages, shards of items and timings are tasks, on one machine or many.

    Exit code 0: all gates pass, 1: a gate or a variant fails, 2: inconclusive, 3: error.
    """
    from slimqwen.evals.suites.suite import DECIDING
    from slimqwen.search.executors import Executor, LocalExecutor
    from slimqwen.search.sweep.driver import sweep as run_sweep
    from slimqwen.search.sweep.plan import Options

    root = variants.repository_root()
    options = Options(
        measures=tuple(each.value for each in dict.fromkeys(measure)),
        command=tuple(command()),
        workload=workload,
        rounds=rounds,
        parts=parts,
        limit=limit or DECIDING,
    )
    with progress_bar() as progress:
        executor: Executor = LocalExecutor(root, progress)
        if ray is not None:
            from slimqwen.search.executors.ray import RayExecutor

            executor = RayExecutor(root, ray, progress)
        results = run_sweep(variant, options, executor, root)
    shown = table(("variant", "outcome", "records"), ())
    for result in results:
        files = ", ".join(str(relative(path)) for path in result.records)
        shown.add_row(result.variant, "failed" if result.failure else result.outcome or "measured", files)
    console.print(shown)
    for result in results:
        if result.failure:
            say(f"{result.variant}: {result.failure}")
    codes = [_FAILED if each.failure else EXIT_CODES.get(each.outcome, 0) for each in results]
    raise typer.Exit(_FAILED if _FAILED in codes else max(codes))
