"""`slimqwen eval`: is a variant's output right?"""

from typing import Annotated

import typer

from slimqwen.cli.console import (
    EXIT_CODES,
    Judge,
    command,
    from_here,
    measuring,
    progress_bar,
    say,
    show_record,
)
from slimqwen.cli.options import (
    GateSettingsName,
    Port,
    SuiteName,
    VariantOption,
)

app = typer.Typer(
    help="Is a variant's output right? Scores, distributions, drafts, engine.", no_args_is_help=True
)


@app.command()
def quality(
    variant: VariantOption,
    suite: SuiteName = None,
    limit: Annotated[
        int | None,
        typer.Option(help="items per task (default: as many as a verdict needs, by power analysis)"),
    ] = None,
    full: Annotated[bool, typer.Option("--full", help="every item")] = False,
    port: Port = None,
) -> None:
    """Score a variant over a suite of tasks, served by vLLM."""
    if full and limit is not None:
        raise typer.BadParameter("--full and --limit exclude each other; give only one")
    from slimqwen.evals.preconditions import check_preconditions

    # Missing weights are named before missing data, which may be gigabytes, and before the import of vLLM.
    check_preconditions(variant)
    from slimqwen.evals import quality
    from slimqwen.evals.checks.quality import find_response_limits
    from slimqwen.evals.suites.suite import AUTO, Limit, Suite

    extent: Limit = None if full else AUTO if limit is None else limit
    named = Suite.load(suite or variant.evaluation, variant.root)
    limits = find_response_limits(named.name, variant.root)
    questions = named.describe_questions(variant.root, limits.items_to_decide if limits else None)
    for line in (questions, named.describe_left_out()):
        if line:
            say(from_here(line))
    with progress_bar() as progress:
        path = quality.measure_quality(
            variant,
            named,
            command=command(),
            limit=extent,
            port=port,
            progress=progress,
        )
    record = show_record(path)
    for line in record.undecided():
        say(line)


@app.command(cls=Judge)
def fidelity(
    variant: VariantOption,
    settings: GateSettingsName = None,
) -> None:
    """Compare a variant's next-token distributions with its baseline's.

    Exit code 0: every figure is within its limit, 1: a figure is beyond its limit, 2: inconclusive, 3: error.
    """
    from slimqwen.evals import fidelity
    from slimqwen.evals.fidelity_figures import FidelitySettings

    log = variant.root / "logs" / f"fidelity-{variant.name}.log"
    with measuring(log) as progress:
        path = fidelity.measure_fidelity(
            variant,
            FidelitySettings.load(settings or variant.evaluation, variant.root),
            command=command(),
            progress=progress,
        )
    record = show_record(path, log)
    raise typer.Exit(EXIT_CODES[record.outcome])


@app.command()
def roundings(
    variant: VariantOption,
    settings: Annotated[
        str | None,
        typer.Option(metavar="NAME", help="file of eval/roundings/ (default: the variant's EVALUATION)"),
    ] = None,
) -> None:
    """Measure what each way to round a checkpoint's weights costs on text, beside the others."""
    from slimqwen.evals.roundings import RoundingsSettings, measure_roundings

    log = variant.root / "logs" / f"roundings-{variant.name}.log"
    with measuring(log) as progress:
        path = measure_roundings(
            variant,
            RoundingsSettings.load(settings or variant.evaluation, variant.root),
            command=command(),
            progress=progress,
        )
    show_record(path, log)


@app.command(cls=Judge)
def engine(variant: VariantOption, settings: GateSettingsName = None) -> None:
    """Compare the greedy tokens of the served engine and its neighbours with a plain reference engine's.

    Exit code 0: the served engine's tokens are equal but for near ties, 1: wrong, 2: inconclusive, 3: error.
    """
    from slimqwen.evals import engine
    from slimqwen.evals.engine_process import EngineSettings

    log = variant.root / "logs" / f"engine-{variant.name}.log"
    with measuring(log) as progress:
        path = engine.measure_engine(
            variant,
            EngineSettings.load(settings or variant.evaluation, variant.root),
            command=command(),
            progress=progress,
        )
    record = show_record(path, log)
    raise typer.Exit(EXIT_CODES[record.outcome])


@app.command()
def acceptance(
    variant: VariantOption,
    settings: GateSettingsName = None,
    depth: Annotated[
        list[int] | None, typer.Option(help="num_speculative_tokens K; may be repeated (default: 1 to 7)")
    ] = None,
    greedy: Annotated[bool, typer.Option("--greedy", help="leave out temperatures above 0")] = False,
) -> None:
    """Measure the acceptance length of drafts for each K, prompt class and temperature."""
    from slimqwen.evals import acceptance
    from slimqwen.evals.drafting import AcceptanceSettings

    log = variant.root / "logs" / f"acceptance-{variant.name}.log"
    with measuring(log) as progress:
        path = acceptance.measure_acceptance(
            variant,
            AcceptanceSettings.load(settings or variant.evaluation, variant.root),
            sorted(set(depth or range(1, 8))),
            command=command(),
            greedy_only=greedy,
            progress=progress,
        )
    show_record(path, log)
