"""What `slimqwen gate` says after its verdict."""

from pathlib import Path
from types import SimpleNamespace

import pytest

from slimqwen.cli.gate import next_step

OWN = Path("eval/own/mine/questions.csv")


@pytest.mark.parametrize(
    ("undecided", "questions", "said"),
    [
        ("quality", OWN, "more questions in eval/own/mine/questions.csv would decide"),
        ("quality", None, "a larger suite than core would decide"),
        (
            "fidelity",
            OWN,
            "more texts (`texts` and `most_texts` of fidelity in the gate's settings) would decide",
        ),
    ],
)
def test_an_inconclusive_gate_says_what_the_undecided_check_lacks(undecided, questions, said) -> None:
    verdicts = dict.fromkeys(("fidelity", "acceptance", "quality", "engine"), "pass") | {
        undecided: "inconclusive"
    }
    record = SimpleNamespace(variant="mine", verdict="inconclusive", verdicts=verdicts)
    assert next_step(record, "core", questions).startswith(said)
