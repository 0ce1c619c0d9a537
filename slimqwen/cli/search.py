"""`slimqwen search`: the fastest variant of a model on a GPU within a quality budget."""

from pathlib import Path
from typing import Annotated

import typer

from slimqwen import variant as variants
from slimqwen.cli.console import command, progress_bar, show_record


def search(
    base: Annotated[str, typer.Option("--base", "--variant", metavar="NAME", help="variant to start from")],
    gpu: Annotated[str, typer.Option(metavar="NAME", help="GPU of eval/devices.yaml to serve on")],
    budget: Annotated[
        str | None,
        typer.Option(metavar="NAME", help="limits of eval/gates/ (default: the base's EVALUATION)"),
    ] = None,
    space: Annotated[
        Path | None,
        typer.Option(metavar="FILE", help="space instead of eval/search/<budget>.yaml"),
    ] = None,
    trials: Annotated[int | None, typer.Option(min=1, help="candidates, instead of the space's")] = None,
    minutes: Annotated[
        float | None, typer.Option(min=0, help="begin no candidate after so many minutes")
    ] = None,
    finalists: Annotated[
        int | None, typer.Option(min=0, help="candidates that are proven, instead of the space's")
    ] = None,
    ray: Annotated[
        str | None,
        typer.Option(metavar="ADDRESS", help="Ray cluster, host:port or auto (default: this machine alone)"),
    ] = None,
    width: Annotated[int, typer.Option(min=1, help="candidates at a time, on a Ray cluster")] = 1,
) -> None:
    """Find the fastest variant within a quality budget: levers of recipe and flags, from cheap checks to dear ones.

    Ctrl-C keeps what is known; the same command goes on.
    """
    from slimqwen.search.driver import search as run_search
    from slimqwen.search.executors import Executor, LocalExecutor
    from slimqwen.search.space import SearchSettings

    root = variants.repository_root()
    subject = variants.load(base, root)
    limits = budget or subject.evaluation
    settings = SearchSettings.load_file(space) if space else SearchSettings.load(limits, root)
    with progress_bar() as progress:
        executor: Executor = LocalExecutor(root, progress, warm=True)
        if ray is not None:
            from slimqwen.search.executors.ray import RayExecutor

            executor = RayExecutor(root, ray, progress)
        path = run_search(
            subject,
            gpu,
            limits,
            settings,
            executor,
            command=command(),
            trials=trials,
            minutes=minutes,
            finalists=finalists,
            width=width,
            progress=progress,
        )
    show_record(path)
