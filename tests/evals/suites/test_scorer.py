"""The scores of responses as models write them, in many scripts, against those of a careful reader."""

import json
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from slimqwen.evals.suites import scorer

ROWS = [
    json.loads(line)
    for line in Path(__file__).with_name("responses.jsonl").read_text(encoding="utf-8").splitlines()
]


def is_right(row: dict[str, Any]) -> bool:
    """Whether a row's response is right, without the thoughts that a client removes first."""
    choices, answer = row.get("choices"), row["expected"]
    answer = choices["ABCDEFGHIJ".index(answer)] if choices else answer
    return scorer.is_right(row["response"].rpartition("</think>")[2], answer, choices)


@pytest.mark.parametrize("row", ROWS, ids=lambda row: f"{row['rule']}: {row['response'][:40]!r}")
def test_a_response_is_scored_as_a_careful_reader_would(row: dict[str, Any]) -> None:
    assert is_right(row) == row["right"]


def test_the_table_has_eight_scripts_of_several_rows_each() -> None:
    assert len([script for script, rows in Counter(row["script"] for row in ROWS).items() if rows >= 5]) >= 8
