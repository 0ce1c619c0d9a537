"""`slimqwen gate` and `limits`: is a variant as good as its baseline, can the gate tell, and by which limits?"""

from typing import Annotated

import typer

from slimqwen import variant as variants
from slimqwen.cli.console import EXIT_CODES, Judge, command, measuring, relative, say, show_record
from slimqwen.cli.options import GateSettingsName, VariantOption
from slimqwen.cli.plan import find_recorded_plan
from slimqwen.variant import Variant

app = typer.Typer(help="Decide whether a variant is as good as its baseline.", no_args_is_help=True)


@app.command(cls=Judge)
def check(variant: VariantOption, settings: GateSettingsName = None) -> None:
    """Gate a variant by fidelity, acceptance, quality and engine modes: one page, one verdict.

    Exit code 0: pass, 1: fail, 2: inconclusive, 3: error.
    """
    from slimqwen.evals import gate
    from slimqwen.serving import checks
    from slimqwen.serving.command import ServerCommand

    server = ServerCommand.resolve(variant)
    checks.refuse_trouble(server, find_recorded_plan(server)[1])
    log = variant.root / "logs" / f"gate-{variant.name}.log"
    with measuring(log) as progress:
        path = gate.measure(variant, settings or variant.evaluation, command=command(), progress=progress)
    raise typer.Exit(EXIT_CODES[show_record(path, log).outcome])


@app.command()
def sensitivity(
    variant: VariantOption,
    settings: GateSettingsName = None,
    seeds: Annotated[int, typer.Option(min=1, help="damaged copies of each kind")] = 20,
    rebatched: Annotated[
        Variant | None,
        typer.Option(
            "--again",  # the former name
            "--rebatched",
            metavar="NAME",
            parser=variants.load,
            help="variant with the baseline's weights and other batches, for false alarms",
        ),
    ] = None,
) -> None:
    """Damage a quantised variant many times: how often does each check catch it, how often is an alarm false?

    Exit code 0: every damaged copy fails and false alarms are as rare as stated; 1: not so; 2: error.
    """
    from slimqwen.evals import gate_sensitivity

    log = variant.root / "logs" / f"gate-sensitivity-{variant.name}.log"
    with measuring(log) as progress:
        path = gate_sensitivity.measure(
            variant,
            settings or variant.evaluation,
            range(seeds),
            rebatched,
            command=command(),
            progress=progress,
        )
    raise typer.Exit(EXIT_CODES[show_record(path, log).outcome])


@app.command()
def trial(variant: VariantOption, settings: GateSettingsName = None) -> None:
    """Gate an identical copy of a quantised variant and one copy per damage (two hours).

    Exit code 0: every damaged copy fails and the identical one does not; 1: not so; 2: error.
    """
    from slimqwen.evals import gate_trial

    log = variant.root / "logs" / f"gate-trial-{variant.name}.log"
    with measuring(log) as progress:
        path = gate_trial.measure(
            variant, settings or variant.evaluation, command=command(), progress=progress
        )
    raise typer.Exit(EXIT_CODES[show_record(path, log).outcome])


def limits(variant: VariantOption) -> None:
    """Measure a baseline's noise against itself, and write the limits of its EVALUATION into eval/.

    Files whose limits were written by hand stay; the record says which of these the measurement reproduces.
    """
    from slimqwen.evals.limits import measurement

    log = variant.root / "logs" / f"limits-{variant.name}.log"
    with measuring(log) as progress:
        path, files = measurement.measure(variant, command=command(), progress=progress)
    show_record(path, log)
    for state, paths in (("written", files.written), ("written by hand, kept", files.kept)):
        if paths:
            say(f"{state}: {', '.join(str(relative(file)) for file in paths)}")
