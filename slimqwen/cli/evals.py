"""`slimqwen eval`: is a variant's output right?"""

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Annotated, Any

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
from slimqwen.evals.invocation import Invocation
from slimqwen.variant import Variant

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
            variant, named, extent, Invocation(command(), port=port, progress=progress)
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

    limits = FidelitySettings.load(settings or variant.evaluation, variant.root)
    record = _measure(variant, "fidelity", partial(fidelity.measure_fidelity, variant, limits))
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

    asked = RoundingsSettings.load(settings or variant.evaluation, variant.root)
    _measure(variant, "roundings", partial(measure_roundings, variant, asked))


@app.command(cls=Judge)
def engine(variant: VariantOption, settings: GateSettingsName = None) -> None:
    """Compare greedy tokens with the reference engine's: as served, and with drafts or prefix cache switched.

    Exit code 0: the served engine's tokens are equal but for near ties, 1: wrong, 2: inconclusive, 3: error.
    """
    from slimqwen.evals import engine
    from slimqwen.evals.engine_process import EngineSettings

    asked = EngineSettings.load(settings or variant.evaluation, variant.root)
    record = _measure(variant, "engine", partial(engine.measure_engine, variant, asked))
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

    asked = AcceptanceSettings.load(settings or variant.evaluation, variant.root)
    depths = sorted(set(depth or range(1, 8)))
    count = partial(acceptance.measure_acceptance, variant, asked, depths, greedy_only=greedy)
    _measure(variant, "acceptance", count)


def _measure(variant: Variant, kind: str, measure: Callable[[Invocation], Path]) -> Any:
    """Measure with what libraries print in a log; show the record and return it."""
    log = variant.root / "logs" / f"{kind}-{variant.name}.log"
    with measuring(log) as progress:
        path = measure(Invocation(command(), progress=progress))
    return show_record(path, log)
