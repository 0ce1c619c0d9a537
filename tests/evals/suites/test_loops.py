import pytest

from slimqwen.evals.suites.loops import is_looping


@pytest.mark.parametrize(
    ("text", "loops"),
    [
        ("So it is salt. " + "The town sells salt and wool. " * 3, True),
        ("The town sells salt and wool. " * 2 + "The town sells salt.", False),
        ("So " + "the town sells salt " * 3 + "the town", True),  # the limit cut the last repeat
        ("It was " + "very " * 12, True),
        ("It was " + "very " * 11, False),  # 54 characters and no more
        ("1" * 60 + "\n\n", True),
        ("1" * 59, False),
        ("No, no, no, no.", False),
        ("The town sells salt and wool. " * 30 + "That is all of it.", False),
        ("盐和羊毛都在镇上卖。" * 6, True),
        ("Step 1: think again. Step 2: think again. Step 3: think again.", False),
        ("", False),
    ],
)
def test_a_loop_is_what_stands_three_times_at_the_end(text, loops):
    assert is_looping(text) is loops
