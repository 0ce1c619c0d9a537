"""`slimqwen gate`: is a variant as good as its baseline?"""

import typer

from slimqwen.cli.console import EXIT_CODES, command, measuring, show_record
from slimqwen.cli.options import GateSettingsName, VariantOption
from slimqwen.cli.plan import find_recorded_plan


def gate(variant: VariantOption, settings: GateSettingsName = None) -> None:
    """Judge a variant by the four checks fidelity, acceptance, quality and engine: one page, one verdict.

    Exit code 0: pass, 1: fail, 2: inconclusive, 3: error.
    """
    from slimqwen.evals import gate
    from slimqwen.serving import checks
    from slimqwen.serving.command import ServerCommand

    server = ServerCommand.resolve(variant)
    checks.refuse_trouble(server, find_recorded_plan(server)[1])
    log = variant.root / "logs" / f"gate-{variant.name}.log"
    with measuring(log) as progress:
        path = gate.measure_gate(
            variant, settings or variant.evaluation, command=command(), progress=progress
        )
    raise typer.Exit(EXIT_CODES[show_record(path, log).outcome])
