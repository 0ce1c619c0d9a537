"""Rows of a user's tables."""

import re
from pathlib import Path

import pytest

from slimqwen.text.files import CorpusError
from slimqwen.text.tables import find_table, read_rows


def test_a_table_is_found_by_its_name_and_is_one_file(tmp_path: Path) -> None:
    assert find_table(tmp_path, "questions").name == "questions.jsonl"
    (tmp_path / "questions.txt").touch()
    (tmp_path / "questions.csv.gz").touch()
    assert find_table(tmp_path, "questions").name == "questions.csv.gz"
    (tmp_path / "questions.jsonl").touch()
    with pytest.raises(CorpusError, match=r"has questions.csv.gz and questions.jsonl; keep the one"):
        find_table(tmp_path, "questions")


@pytest.mark.parametrize(
    ("name", "content", "fault"),
    [
        ("a.json", b'[{"text": "a"},\n\n{"text": "b"', "line 3: not JSON"),
        ("a.json", b'[{"text": "a"},\n{"id": 1,\n"text": no}]', "line 3: not JSON .*Expecting value"),
        ("a.json", b'[{"text": "a"},\n', "line 2: not JSON .the list has no end"),
        ("a.json", b'[{"text": "a"}]\n[]', "line 2: not JSON .text after the end of the list"),
        ("a.json", b'[{"text": "a"},\n{"text": "\\ud800"}]', "line 2: not JSON .*surrogates"),
        ("a.json", '[{"text": "a"},\n"Käse"]'.encode("latin-1"), "line 2: not UTF-8"),
        ("a.csv", b"titel;inhalt\na;b\n", "line 1: the first line names titel, inhalt; name the columns there"),
        ("a.csv", b"text;text\na;b\n", "line 1: two columns text"),
        ("a.csv", b"text,id\nfine,1\na, b,2\n", "line 3: 3 fields, but the first line has 2; put"),
        ("a.csv", b'text,id\n"open,1\n', "line 2: not CSV .*correct its quotes"),
        ("a.csv", b"", "line 1: the first line names nothing"),
        ("a.csv", b"text,id\ra,1\rb,2\r", "line 1: lines end in a carriage return alone"),
    ],
)  # fmt: skip
def test_a_row_that_cannot_be_read_says_why_at_its_line(
    tmp_path: Path, name: str, content: bytes, fault: str
) -> None:
    (tmp_path / name).write_bytes(content)
    *_, last = read_rows(tmp_path / name, ("text", "id"))
    assert re.match(fault, f"{last.unit} {last.number}: {last.fault}")
    assert last.content is None
