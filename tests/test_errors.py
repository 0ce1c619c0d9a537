import pytest

from slimqwen.errors import suggest_name


@pytest.mark.parametrize(
    ("unknown", "otherwise", "end"),
    [
        ("calibrat", None, "did you mean calibrate?"),
        ("calibrat", "look there", "did you mean calibrate?"),
        ("prune_3", None, "did you mean prune_2 or prune_1?"),
        ("xyz", None, "known are calibrate, prune_1, prune_2"),
        ("xyz", "look there", "look there"),
    ],
)
def test_an_unknown_name_gets_the_nearest_one_two_as_near_or_all(
    unknown: str, otherwise: str | None, end: str
) -> None:
    assert suggest_name(unknown, ["prune_1", "prune_2", "calibrate"], otherwise) == end
