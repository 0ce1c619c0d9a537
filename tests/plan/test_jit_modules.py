"""Modules of FlashInfer: whether a compile cache holds all that they load."""

import pytest

from slimqwen.plan import jit_modules, trouble
from slimqwen.variant import repository_root
from tests.plan import example


@pytest.mark.parametrize(
    ("libraries", "cache", "baked"),
    [
        (("prefill", "decode"), {"prefill", "decode", "sampling"}, True),
        (("prefill", "decode"), {"prefill"}, False),
        (("prefill",), set(), False),
        ((), {"prefill"}, False),  # what cannot be compiled ahead is never baked
    ],
)
def test_a_module_is_baked_where_the_cache_holds_all_its_libraries(libraries, cache, baked):
    plan = example.plan(backend="FLASHINFER", libraries=libraries, compiler=False)
    modules = jit_modules.mark_baked(plan.jit, cache)
    assert [module.baked for module in modules] == [baked]
    met = trouble.match_trouble(
        plan.model_copy(update={"jit": modules}), trouble.read_known_trouble(repository_root())
    )
    assert ("flashinfer-without-compiler" not in {entry.name for entry in met}) is baked
