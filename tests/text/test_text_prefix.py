"""The token before a text."""

from slimqwen.text.text_prefix import find_prefix


def test_the_first_prefix_that_every_vocabulary_has_is_taken() -> None:
    assert find_prefix(("<a>", "<b>"), [{"<a>": 0, "<b>": 1}, {"<b>": 7}]) == [1, 7]
    assert find_prefix("<c>", [{"<a>": 0}]) is None
