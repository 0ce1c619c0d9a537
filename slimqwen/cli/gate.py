"""`slimqwen gate`: is a variant as good as its baseline?"""

import typer

from slimqwen import api
from slimqwen.cli.console import EXIT_CODES, progress_bar, say, show_record, warn
from slimqwen.cli.options import GateSettingsName, VariantOption

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
    with progress_bar() as progress:
        judgement = api.judge(variant, settings, progress=progress, warn=warn)
    from slimqwen.evals.checks import GateSettings  # slow to import

    record = show_record(judgement.path, judgement.log)
    if (
        left_out := GateSettings.load(record.settings_name, variant.root)
        .suite(variant.root)
        .describe_left_out()
    ):
        say(left_out)
    say(f"Next: {_NEXT[record.outcome].format(variant=variant.name, baseline=record.baseline)}.")
    raise typer.Exit(EXIT_CODES[record.outcome])
