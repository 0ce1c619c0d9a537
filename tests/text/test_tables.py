"""Rows of a user's tables."""

from pathlib import Path

import pytest

from slimqwen.text.files import CorpusError
from slimqwen.text.tables import find_table


def test_a_table_is_found_by_its_name_and_is_one_file(tmp_path: Path) -> None:
    assert find_table(tmp_path, "questions").name == "questions.jsonl"
    (tmp_path / "questions.txt").touch()
    (tmp_path / "questions.csv.gz").touch()
    assert find_table(tmp_path, "questions").name == "questions.csv.gz"
    (tmp_path / "questions.jsonl").touch()
    with pytest.raises(CorpusError, match=r"has questions.csv.gz and questions.jsonl; keep the one"):
        find_table(tmp_path, "questions")
