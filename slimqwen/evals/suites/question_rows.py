"""Rows of the questions of an own evaluation, as people write them in JSON or a table, brought to one form."""

import itertools
import json
import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, Final

from slimqwen.text.files import file_format
from slimqwen.text.tables import TextRow, read_rows

_LETTERS: Final = tuple("abcdefghijklmnopqrstuvwxyz")
_ANSWERS: Final = re.compile(r"answers?[ _]?\d*")
COLUMNS: Final = (
    *("prompt", "answer", "choices", "tolerance", "question", "answers", "messages", "tools"),
    *(f"answer{mark}{number}" for mark in ("", "_", " ") for number in range(1, 10)),
    *_LETTERS,
)
"""Columns that are read; the first ones are those that messages name."""


def read_question_rows(file: Path) -> Iterator[tuple[TextRow, dict[str, Any]]]:
    """Yield each row with the fields of a `Question`; rows that cannot be read have a `fault` and no fields.

    In a table, a cell with several answers or choices is a JSON list, or has vertical bars between them. Choices may
    also stand in columns named A, B, C, …; an answer may then be the letter of one.

    Raises:
        CorpusError: the file cannot be read.
    """
    is_table = file_format(file) in (".csv", ".tsv", ".parquet")
    for row in read_rows(file, COLUMNS):
        if row.fault is not None or not isinstance(row.content, Mapping):
            yield (
                (row if row.fault else row._replace(fault="no object; write {…} with prompt and answer")),
                {},
            )
            continue
        try:
            yield row, _fields_of(row.content, is_table=is_table)
        except ValueError as error:
            yield row._replace(fault=f"not JSON in a cell ({error}); correct it"), {}


def _fields_of(content: Mapping[str, Any], *, is_table: bool) -> dict[str, Any]:
    cells = {name: _cell(name, value) for name, value in content.items()} if is_table else dict(content)
    fields = {
        name: value
        for name, value in cells.items()
        if name in ("prompt", "messages", "tools", "choices", "tolerance") and value not in (None, "")
    }
    if "prompt" not in fields and "messages" not in fields and cells.get("question"):
        fields["prompt"] = cells["question"]
    answers = [value for name, value in cells.items() if _ANSWERS.fullmatch(name) and value is not None]
    several = [each for answer in answers for each in (answer if isinstance(answer, list) else [answer])]
    several = several if len(answers) < 2 else [each for each in several if each != ""]
    if answers:
        is_one = len(answers) == 1 and not isinstance(answers[0], list)
        fields["answer"] = answers[0] if is_one else several
    if is_table and "choices" not in fields and {"a", "b"} <= cells.keys():
        letters = itertools.takewhile(cells.__contains__, _LETTERS)
        choices = {letter: str(cells[letter]) for letter in letters if cells[letter] not in (None, "")}
        fields["choices"] = list(choices.values())
        fields["answer"] = _by_letter(fields.get("answer"), choices)
    return {name: value for name, value in fields.items() if value is not None}


def _cell(name: str, value: Any) -> Any:
    """The value of a cell: JSON, where it looks like it; a list, where vertical bars divide answers or choices."""
    if not isinstance(value, str):
        return value
    is_list = name == "choices" or _ANSWERS.fullmatch(name) is not None
    if (is_list or name in ("messages", "tools")) and value.lstrip()[:1] in ("[", "{"):
        return json.loads(value)
    if is_list and "|" in value:
        return [part.strip() for part in value.split("|") if part.strip()]
    return value


def _by_letter(answer: Any, choices: Mapping[str, str]) -> Any:
    """The choice that the letter of its column names; another answer as it is."""
    if isinstance(answer, list):
        return [_by_letter(each, choices) for each in answer]
    is_letter = isinstance(answer, str) and answer not in choices.values()
    return choices.get(answer.strip().lower(), answer) if is_letter else answer
