"""What a record says of the checkpoint that was measured, and when it holds for another one."""

import pytest

from slimqwen.records.record import MeasuredCheckpoint

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
