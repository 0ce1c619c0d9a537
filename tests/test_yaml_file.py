"""A YAML file that a person writes: every fault at its line, with the nearest name that is known."""

from pathlib import Path
from typing import Literal

import pytest
from pydantic import BaseModel, ConfigDict, Field, model_validator

from slimqwen.errors import SlimqwenError
from slimqwen.yaml_file import YamlText, read_yaml


class FileError(SlimqwenError):
    pass


class Strict(BaseModel):
    model_config = ConfigDict(extra="forbid")


class Limits(Strict):
    most: float = Field(gt=0)
    least: float = 0

    @model_validator(mode="after")
    def _is_a_range(self) -> "Limits":
        if self.least > self.most:
            raise ValueError("least is above most")
        return self


class Task(Strict):
    title: str = Field(alias="task")
    limits: Limits | None = None


class Whole(Strict):
    kind: Literal["fast", "slow"] = "fast"
    limits: Limits = Limits(most=1)
    tasks: tuple[Task, ...] = ()
    by_name: dict[str, list[Limits]] = {}


def text_of(folder: Path, content: str) -> YamlText:
    file = folder / "f.yaml"
    file.write_text(content, encoding="utf-8")
    return read_yaml(file, shown=Path("f.yaml"), error=FileError, missing="is missing; write it")


def faults_of(folder: Path, content: str) -> list[str]:
    text = text_of(folder, content)
    with pytest.raises(FileError) as caught:
        text.validate(Whole, text.content)
    return caught.value.faults


@pytest.mark.parametrize(
    ("content", "fault"),
    [
        ("kind: fast\nlimit: {most: 1}", "2: unknown key 'limit'; did you mean limits?"),
        ("kind: fast\nxyz: 1", "2: unknown key 'xyz'; known are by_name, kind, limits, tasks"),
        ("limits:\n  most: 1\n  lest: 0", "3: unknown key 'lest'; did you mean least?"),
        (
            "tasks:\n  - task: a\n  - task: b\n    limits: {mst: 1}",
            "4: unknown key 'mst'; did you mean most?",
        ),
        ("tasks:\n  - task: a\n    tilte: b", "3: unknown key 'tilte'; known are limits, task"),
        ("tasks:\n  - limits:", "2: tasks.task is missing; add it"),
        ("by_name:\n  a: [{most: 1}]\n  b: [{mos: 1}]", "3: unknown key 'mos'; did you mean most?"),
        ("kind: quick", "1: kind: Input should be 'fast' or 'slow', here is 'quick'"),
        ("limits:\n  most: 0", "2: limits.most: Input should be greater than 0, here is 0"),
        ("limits:\n  most:", "2: limits.most is not filled in; write a value"),
        ("kind: fast\nlimits: {most: 1, least: 2}", "2: limits: least is above most"),
        ("kind: fast\nlimits: 3", "2: limits: Input should be keys with values, here is 3"),
        ("kind: fast\nlimits: [3]", "2: limits: Input should be keys with values"),
        ("- kind", "1: the file: Input should be keys with values"),
        ("", "1: the file is not filled in; write a value"),
        ("# only a comment", "1: the file is not filled in; write a value"),
    ],
)
def test_a_fault_has_its_line_and_the_nearest_known_name(tmp_path: Path, content: str, fault: str) -> None:
    assert faults_of(tmp_path, content) == [f"f.yaml:{fault}"]


def test_all_faults_come_at_once_each_once(tmp_path: Path) -> None:
    content = "kind: 1\nlimits:\n  mos: 1\nby_name:\n  a:\n    - {most: 0}\n    - {most: 0}\n"
    assert [fault.partition(": ")[0] for fault in faults_of(tmp_path, content)] == [
        "f.yaml:1",
        "f.yaml:3",  # and not that `most` is missing
        "f.yaml:6",
        "f.yaml:7",
    ]


def test_entries_that_a_reader_makes_of_one_have_the_line_of_that_one(tmp_path: Path) -> None:
    text = text_of(tmp_path, "by_name:\n  a: {most: 1}\n  b:\n    most: 0\n")
    listed = {"by_name": {"a": [{"most": 1}], "b": [{"most": 0}, {"most": 0}]}}
    with pytest.raises(FileError, match=r"^f\.yaml:4: by_name\.b\.most: Input should be greater"):
        text.validate(Whole, listed)


def test_a_part_keeps_its_lines_and_a_missing_one_is_named(tmp_path: Path) -> None:
    text = text_of(tmp_path, "kind: fast\nlimits:\n  most: 1\n  lest: 1\n")
    part = text.part("limits")
    with pytest.raises(FileError, match=r"^f\.yaml:4: unknown key 'lest'"):
        part.validate(Limits, part.content)
    for where, key in ((text, "tasks"), (part, "tasks"), (part.part("most"), "a")):
        with pytest.raises(FileError, match=rf"^f\.yaml:\d: {key} is missing; add it"):
            where.part(key)


def test_the_lines_of_all_keys_are_known_by_dotted_names(tmp_path: Path) -> None:
    text = text_of(tmp_path, "a:\n  - b:\n      c: 1\n      d:\n        e: 2\n")
    places = text.places(("a", 0, "b"))
    assert places == {"": "f.yaml:2", "c": "f.yaml:3", "d": "f.yaml:4", "d.e": "f.yaml:5"}


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (None, "f.yaml is missing; write it"),
        (b"a: 1\nb: {", "f.yaml:2: not usable YAML"),
        (b"a: 1\n\na: 2", "f.yaml:3: not usable YAML: a is written twice; correct that line"),
        (b"a: 1\n[b]: 2", "f.yaml:2: not usable YAML"),
        (b"a: 2026-99-99", "f.yaml: not usable YAML: month must be in"),
        (b"a: \xff", "f.yaml: not UTF-8 (invalid start byte); save it as UTF-8"),
    ],
)
def test_a_file_that_cannot_be_read_is_an_error_of_one_line(
    tmp_path: Path, content: bytes | None, message: str
) -> None:
    file = tmp_path / "f.yaml"
    if content is not None:
        file.write_bytes(content)
    with pytest.raises(FileError) as caught:
        read_yaml(file, shown=Path("f.yaml"), error=FileError, missing="is missing; write it")
    assert str(caught.value).startswith(message)


def test_a_folder_in_its_place_is_told(tmp_path: Path) -> None:
    with pytest.raises(FileError, match=r"cannot be read \(Is a directory\); make it readable"):
        read_yaml(tmp_path, error=FileError, missing="is missing")
