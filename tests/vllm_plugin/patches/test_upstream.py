"""A function of vLLM is replaced once, stays what it was, and has to take the parameters that a fix knows."""

import pytest

from slimqwen.vllm_plugin.patches import upstream as checks
from slimqwen.vllm_plugin.patches.patch import Patch
from slimqwen.vllm_plugin.patches.upstream import PatchError, digest_source, is_replaced, replace


@pytest.fixture
def upstream(monkeypatch):
    """A class of vLLM with a method of each kind, and a patch of them."""

    class Upstream:
        def method(self, size):
            return size

        @classmethod
        def of_class(cls, size):
            return cls, size

        @staticmethod
        def static(size):
            return size

    names = ("method", "of_class", "static", "other")
    places = {f"{__name__}:{Upstream.__qualname__}.{name}": "" for name in names}
    monkeypatch.setattr(checks, "PATCHES", {"a_fix": Patch("cpu.a_fix", "", "", places)})
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
        PatchError,
        match=r"cpu/a_fix\.py was written for vLLM 0\.32\.0, .*takes \(self, size\), not \(self, length\); adapt",
    ):
        replace("a_fix", upstream, "method", replacement, named)
    assert upstream().method(3) == 3


def test_a_function_that_is_gone_is_refused(upstream):
    with pytest.raises(PatchError, match="Upstream has no function other"):
        replace("a_fix", upstream, "other", doubled)


def test_a_function_that_the_patchs_row_lacks_is_refused(upstream):
    upstream.unlisted = upstream.method
    with pytest.raises(AssertionError, match=r"the row of a_fix lacks .*Upstream\.unlisted"):
        replace("a_fix", upstream, "unlisted", doubled)


@pytest.mark.parametrize(
    ("source", "is_same"),
    [
        ("    def f(x):  # one\n        return x+1", True),
        ("def f(x):\n    'What it does.'\n    return (x + 1)", True),
        ("def f(x):\n    return x + 2", False),
        ("def f(x: int):\n    return x + 1", False),
        ("def f(x):\n    return None", False),
    ],
)
def test_layout_comments_and_docstrings_of_a_source_do_not_count(source, is_same):
    assert (digest_source(source) == digest_source("def f(x):\n    return x + 1")) is is_same


@pytest.fixture
def changed(monkeypatch):
    """A patch in a module of its own, of a function that has another body than the row says."""
    patch = Patch("patches.serving.limits", "", "", {"textwrap:dedent": "0" * 12}, function="limit")
    monkeypatch.setattr(checks, "PATCHES", {"limit": patch})


@pytest.mark.usefixtures("changed")
def test_a_patch_of_a_hook_is_refused_by_its_module():
    with pytest.raises(
        PatchError, match=r"patches/serving/limits\.py was .*: textwrap:dedent has another body; adapt"
    ):
        checks.require("limit", of="API server")


@pytest.mark.usefixtures("changed")
def test_an_allowed_start_warns_and_names_the_patch(caplog, monkeypatch):
    monkeypatch.setenv("ALLOW_UNTESTED_VLLM", "1")
    caplog.set_level("INFO", "slimqwen")
    checks.require("limit", of="API server")
    warning, made = [record.getMessage() for record in caplog.records]
    assert warning.startswith(
        "ALLOW_UNTESTED_VLLM=1: slimqwen/vllm_plugin/patches/serving/limits.py was written for"
    )
    assert made == "1 patch of vLLM 0.32.0's API server: limit"
