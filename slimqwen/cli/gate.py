"""`slimqwen gate`: is a variant as good as its baseline?"""

import typer

from slimqwen.cli.console import EXIT_CODES, command, measuring, say, show_record
from slimqwen.cli.options import GateSettingsName, VariantOption
from slimqwen.cli.plan import find_recorded_plan

_NEXT = {
    "pass": "`slimqwen bench latency {variant} --baseline` times both in turns; `slimqwen variant promote {variant}` "
    "writes the verdict into its page",
    "fail": "change what the failed check names in experiments/{variant}/, `slimqwen recipe run {variant}`, and "
    "judge it again",
    "inconclusive": "more items decide; `slimqwen eval quality {variant} --full` and `slimqwen eval quality {baseline} "
    "--full` score all of them, and the gate takes their records",
}


def gate(variant: VariantOption, settings: GateSettingsName = None) -> None:
    """Judge a variant by the checks fidelity, acceptance, quality and engine: one page, one verdict.

    Exit code 0: pass, 1: fail, 2: inconclusive, 3: error.
    """
    from slimqwen.evals.preconditions import check_preconditions, find_baseline

    # What takes no vLLM to find out is found out before its import.
    baseline = find_baseline(variant)
    check_preconditions(baseline, variant)
    from slimqwen.evals import gate
    from slimqwen.evals.checks import GateSettings
    from slimqwen.serving import checks
    from slimqwen.serving.command import ServerCommand

    server = ServerCommand.resolve(variant)
    checks.refuse_trouble(server, find_recorded_plan(server)[1])
    log = variant.root / "logs" / f"gate-{variant.name}.log"
    chosen = GateSettings.load(settings or variant.evaluation, variant.root)
    with measuring(log) as progress:
        path = gate.measure_gate(
            variant,
            chosen,
            command=command(),
            progress=progress,
        )
    outcome = show_record(path, log).outcome
    if left_out := chosen.suite(variant.root).describe_left_out():
        say(left_out)
    say(f"Next: {_NEXT[outcome].format(variant=variant.name, baseline=baseline.name)}.")
    raise typer.Exit(EXIT_CODES[outcome])
