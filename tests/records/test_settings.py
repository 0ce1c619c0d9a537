"""Settings files under eval/: what is read, and one line for each that cannot be used."""

from dataclasses import replace
from pathlib import Path
from typing import ClassVar

import pytest
from pydantic import Field

from slimqwen.records.settings import Settings, SettingsError, find_own_evaluation
from slimqwen.variant import load


class Limits(Settings):
    folder: ClassVar[str] = "limits"

    most: float = Field(gt=0)


class Part(Limits):
    section: ClassVar[str] = "part"


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    made = tmp_path / "eval" / "limits"
    made.mkdir(parents=True)
    (made / "good.yaml").write_text("most: 2\n")
    return made


@pytest.mark.parametrize(("name", "is_own"), [("mine", True), ("other", False), (None, False)])
def test_a_variant_is_judged_by_an_own_evaluation_where_there_is_such_a_folder(
    tmp_path: Path, name: str | None, is_own: bool
) -> None:
    own = tmp_path / "eval" / "own" / "mine"
    own.mkdir(parents=True)
    subject = replace(load("tiny"), root=tmp_path).with_lines({"EVALUATION": name or ""})
    assert find_own_evaluation(subject) == (own if is_own else None)


def test_a_section_of_a_file_is_read_by_its_name(folder: Path, tmp_path: Path) -> None:
    (folder / "parts.yaml").write_text("part: {most: 3}\nother: {most: 4}\n")
    part = Part.load("parts", tmp_path)
    assert (part.most, part.name, part.files(tmp_path)) == (3, "parts", [folder / "parts.yaml"])
    with pytest.raises(SettingsError, match=r"eval/limits/good\.yaml:1: part is missing; add it"):
        Part.load("good", tmp_path)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (None, r"eval/limits/bad\.yaml does not exist; choose one of: good"),
        ("most: 1\nmoist: 1", r"bad\.yaml:2: unknown key 'moist'; did you mean most\?"),
    ],
    ids=["missing", "unknown field"],
)
def test_a_file_that_cannot_be_used_is_an_error_of_one_line(
    folder: Path, tmp_path: Path, content: str | None, message: str
) -> None:
    if content is not None:
        (folder / "bad.yaml").write_text(content)
    with pytest.raises(SettingsError, match=message):
        Limits.load("bad", tmp_path)
