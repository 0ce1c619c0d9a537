"""What every record says: its schema, its command, its outcome, and of which checkpoint it is."""

from typing import ClassVar

import pytest
from pydantic import ValidationError

from slimqwen.records.record import MeasuredCheckpoint, Record, VersionedFile

RECIPE, OTHER = "1" * 64, "2" * 64


def measured(digest, recipe_key):
    return MeasuredCheckpoint(path="weights/x", digest=digest * 64, size_bytes=1, recipe_key=recipe_key)


@pytest.mark.parametrize(
    ("record", "present", "build"),
    [
        (("a", RECIPE), ("a", RECIPE), "same"),
        (("a", None), ("a", RECIPE), "same"),
        (("a", None), ("a", None), "same"),
        (("a", RECIPE), ("b", RECIPE), "another build"),
        (("a", RECIPE), ("b", OTHER), "another recipe"),
        (("a", RECIPE), ("b", None), "another recipe"),
        (("a", None), ("b", None), "another recipe"),
        (("a", None), ("b", RECIPE), "unknown build"),
    ],
)
def test_other_bytes_of_one_recipe_are_another_build_and_of_another_recipe_are_not(record, present, build):
    record, present = measured(*record), measured(*present)
    assert record.compare_build(present) == build
    assert record.has_recipe_of(present) == (build in ("same", "another build"))


class Note(VersionedFile):
    kind: ClassVar = "note"
    version: ClassVar = 3

    text: str
    more: str = ""


def test_a_file_has_the_present_schema_and_no_field_that_was_not_set():
    assert Note(text="a").as_json() == {"schema": "note/3", "text": "a"}
    assert Note.model_validate({"schema": "note/3", "text": "a"}) == Note(text="a")
    assert Note.model_json_schema()["required"] == ["schema", "text"]
    for wrong in ({"schema": "note/2", "text": "a"}, {"text": "a", "other": 1}, {"schema": "note/3"}):
        with pytest.raises(ValidationError):
            Note.model_validate(wrong)


class Energy(Record):
    kind: ClassVar = "energy"
    verb: ClassVar = "bench energy"
    verb_options: ClassVar = "--record"

    joules: float
    passed: bool | None = None


@pytest.mark.parametrize(("passed", "outcome"), [(True, "pass"), (False, "fail"), (None, "")])
def test_a_record_names_its_command_its_outcome_and_its_figures(passed, outcome, tmp_path):
    record = Energy.model_construct(variant="v", joules=1.5, passed=passed, schema_="energy/1")
    assert Energy.making_command("v") == "slimqwen bench energy --variant v --record"
    assert record.outcome == outcome
    [table] = record.tables(tmp_path)
    assert (table.title, table.rows) == ("Energy of v", (("joules", "1.5", "", ""),))
