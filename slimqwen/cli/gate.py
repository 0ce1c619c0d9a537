"""`slimqwen gate`: is a variant as good as its baseline?"""

from pathlib import Path
from typing import TYPE_CHECKING

import typer

from slimqwen import api
from slimqwen.cli.console import EXIT_CODES, from_here, progress_bar, say, show_record, warn
from slimqwen.cli.options import GateSettingsName, VariantOption
from slimqwen.cli.report import update_page

if TYPE_CHECKING:
    from slimqwen.evals.gate import Gate

_NEXT = {
    "pass": "`slimqwen bench latency {variant} --baseline` times both in turns; `slimqwen variant promote {variant}` "
    "writes the verdict into its page",
    "fail": "change what the failed check names in experiments/{variant}/, `slimqwen recipe run {variant}`, and "
    "judge it again",
    "inconclusive": "{more} would decide; then judge it again: looks are counted, and the verdict holds for all",
}
_MORE = {
    "fidelity": "more texts (`texts` and `most_texts` of fidelity in the gate's settings)",
    "acceptance": "more prompts (`prompts` of acceptance in the gate's settings)",
}


def gate(variant: VariantOption, settings: GateSettingsName = None) -> None:
    """Judge a variant by the checks fidelity, acceptance, quality and engine: one page, one verdict.

    Exit code 0: pass, 1: fail, 2: inconclusive, 3: error.
    """
    with progress_bar() as progress:
        judgement = api.judge(variant, settings, progress=progress, warn=warn)
    from slimqwen.records.provenance import own_variants  # slow to import

    record, suite = show_record(judgement.path, judgement.log), judgement.suite
    if variant.name in own_variants(variant.root):  # the page of a shipped one is tracked by git
        update_page(variant.folder, newest=True)
    if left_out := suite.describe_left_out():
        say(left_out)
    undecided = [each for each in judgement.findings if each.verdict == "inconclusive"]
    planned = max((each.items_needed or 0 for each in undecided), default=0)
    say(from_here(f"Next: {next_step(record, suite.name, suite.questions_file(variant.root), planned)}."))
    raise typer.Exit(EXIT_CODES[record.outcome])


def next_step(record: "Gate", suite: str, questions: Path | None, planned: int = 0) -> str:
    """Say what to do after a verdict; for an inconclusive one, what each undecided check lacks.

    Args:
        record: record of the gate.
        suite: name of the suite by which quality was judged. An inconclusive gate has scored all its items.
        questions: file of the questions of an own evaluation; None for other suites.
        planned: number of questions planned to decide what is undecided; 0 if none were.
    """
    more = _MORE | {
        "quality": f"more questions in {questions}{f', {planned:,} in all,' if planned else ''}"
        if questions
        else f"a larger suite than {suite}"
    }
    undecided = [check for check, verdict in record.verdicts.items() if verdict == "inconclusive"]
    lacking = [more.get(check, f"another run of the check {check}") for check in undecided]
    return _NEXT[record.verdict].format(variant=record.variant, more=" and ".join(lacking))
