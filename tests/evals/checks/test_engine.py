"""The check engine: which of the engines decides."""

from slimqwen.evals.gate import Gate
from slimqwen.records import store
from slimqwen.variant import Variant
from tests.evals.gate_checks import Checks, judge


def test_only_the_served_engine_decides(one: Variant, checks: Checks) -> None:
    path = judge(one)
    row = store.read_record(path, Gate).tables(path)[0].rows[-1]
    assert row == ("engine", "wrong responses of the served engine, of 9", "0", "-", "0", "pass")
