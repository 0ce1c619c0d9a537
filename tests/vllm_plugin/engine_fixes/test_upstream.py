"""A function of vLLM is replaced once, stays what it was, and has to take the parameters that a fix knows."""

import pytest

from slimqwen.vllm_plugin.engine_fixes.upstream import EngineFixError, is_replaced, replace


@pytest.fixture
def upstream():
    """A class of vLLM with a method of each kind."""

    class Upstream:
        def method(self, size):
            return size

        @classmethod
        def of_class(cls, size):
            return cls, size

        @staticmethod
        def static(size):
            return size

    return Upstream


def doubled(stock, *arguments):
    return [stock(*arguments)] * 2


@pytest.mark.parametrize("name", ["method", "of_class", "static"])
def test_a_replacement_is_given_what_the_stock_function_would_be_and_is_put_in_place_once(upstream, name):
    expected = [getattr(upstream(), name)(3)] * 2
    assert not is_replaced(upstream, name)
    assert replace("a_fix", upstream, name, doubled)
    assert getattr(upstream(), name)(3) == expected
    assert is_replaced(upstream, name)
    assert not replace("a_fix", upstream, name, doubled)
    assert getattr(upstream(), name)(3) == expected


def test_the_parameters_are_those_that_are_named_or_the_replacements_own(upstream):
    assert replace("a_fix", upstream, "method", lambda stock, self, size: size + 1)
    assert replace("a_fix", upstream, "of_class", doubled, ("cls", "size"))
    assert upstream().method(3) == 4


@pytest.mark.parametrize(
    ("replacement", "named"), [(lambda stock, self, length: 0, None), (doubled, ("self", "length"))]
)
def test_a_function_with_other_parameters_is_refused_and_stays(upstream, replacement, named):
    with pytest.raises(
        EngineFixError,
        match=r"a_fix: .*method takes \(self, size\), not \(self, length\)\. The fix was written for vLLM 0\.32\.0",
    ):
        replace("a_fix", upstream, "method", replacement, named)
    assert upstream().method(3) == 3


def test_a_function_that_is_gone_is_refused(upstream):
    with pytest.raises(EngineFixError, match="a_fix: Upstream has no function other"):
        replace("a_fix", upstream, "other", doubled)
