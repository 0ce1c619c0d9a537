import pytest

from slimqwen.stats.verdict import Verdict, overall


@pytest.mark.parametrize(
    ("low", "high", "limit_passes", "verdict"),
    [
        (1.1, 1.2, True, "pass"),
        (1.0, 1.2, True, "pass"),
        (1.0, 1.2, False, "inconclusive"),
        (0.9, 1.2, True, "inconclusive"),
        (0.9, 1.0, False, "inconclusive"),
        (0.8, 0.9, True, "fail"),
    ],
)
def test_a_whole_interval_on_one_side_of_the_limit_decides(low, high, limit_passes, verdict):
    for ends, limit, higher_is_better in (((low, high), 1.0, True), ((-high, -low), -1.0, False)):
        result = Verdict.from_interval(
            *ends, limit, higher_is_better=higher_is_better, limit_passes=limit_passes
        )
        assert result is Verdict(verdict)


@pytest.mark.parametrize(
    ("verdicts", "whole"),
    [
        ([Verdict.PASS, Verdict.PASS], Verdict.PASS),
        ([Verdict.PASS, Verdict.INCONCLUSIVE], Verdict.INCONCLUSIVE),
        ([Verdict.INCONCLUSIVE, Verdict.FAIL], Verdict.FAIL),
        ([], Verdict.INCONCLUSIVE),
    ],
)
def test_the_whole_is_as_good_as_its_worst_part(verdicts, whole):
    assert overall(verdicts) is whole


def test_an_interval_that_ends_at_the_limit_passes_unless_said_otherwise():
    assert Verdict.from_interval(1.0, 1.2, 1.0, higher_is_better=True) is Verdict.PASS
    assert Verdict.from_interval(0.8, 1.0, 1.0, higher_is_better=False) is Verdict.PASS
