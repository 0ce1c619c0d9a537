"""A text overlaps with an item where 13 tokens in a row are the same."""

import pytest

from slimqwen.text.overlap import LENGTH, Overlap

ITEM = [f"item{number}" for number in range(20)]


def ids(text: str) -> list[int]:
    return [hash(word) for word in text.split()]


@pytest.mark.parametrize(("shared", "found"), [(LENGTH - 1, False), (LENGTH, True), (20, True)])
def test_thirteen_tokens_in_a_row_are_an_overlap(shared: int, found: bool) -> None:
    overlap = Overlap(ids, [" ".join(ITEM), "short"])
    text = " ".join(["before", *ITEM[3 : 3 + shared], "after", *map(str, range(30))])
    assert overlap.is_in(text) is found


def test_tokens_that_are_not_in_a_row_are_none() -> None:
    overlap = Overlap(ids, [" ".join(ITEM)])
    assert not overlap.is_in(" ".join([*ITEM[:12], "between", *ITEM[12:]]))
