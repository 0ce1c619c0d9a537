"""Which width each linear gets from a budget."""

import itertools
import random
import re

import pytest

from slimqwen import progress
from slimqwen.checkpoint.packing import LINEARS, is_linear
from slimqwen.checkpoint.tensors import list_tensors
from slimqwen.formats.compressed_tensors import PackedIntegers
from slimqwen.recipe.allocation import FUSED, Allocation, allocate_widths, choose_widths
from slimqwen.recipe.stage import StageError
from tests.checkpoints import TINY


@pytest.mark.parametrize("seed", range(4))
def test_the_choice_is_the_best_of_all(seed: int) -> None:
    rng = random.Random(seed)
    sizes = [rng.choice([64, 256, 300]) for _ in range(6)]
    bits = [[width * size for width in range(2, 7)] for size in sizes]
    costs = [
        [rng.lognormvariate(0, 2) * 4.0**-width * rng.uniform(0.8, 1.2) for width in range(2, 7)]
        for _ in sizes
    ]
    for budget in (2.0, 2.4, 3.3, 5.9, 6.0):
        limit = budget * sum(sizes)
        possible = [
            places
            for places in itertools.product(range(5), repeat=6)
            if sum(row[place] for row, place in zip(bits, places, strict=True)) <= limit
        ]
        best = min(sum(row[place] for row, place in zip(costs, places, strict=True)) for places in possible)
        places = choose_widths(costs, bits, limit)
        assert tuple(places) in possible
        assert sum(row[place] for row, place in zip(costs, places, strict=True)) == pytest.approx(
            best, rel=1e-3
        )


def test_targets_match_each_linear_once_and_no_mtp_head() -> None:
    narrow, wide = PackedIntegers(3, 32, symmetric=False), PackedIntegers(5, 32)
    up, down = FUSED[2], ("mlp.down_proj",)
    chosen = {(0, up): narrow, (0, down): wide, (1, up): wide, (1, down): narrow, (10, up): narrow}
    allocation = Allocation(chosen, 4.0, 0.01)

    def form_of(module: str) -> list[PackedIntegers]:
        return [
            form for form, targets in allocation.targets for target in targets if re.match(target[3:], module)
        ]

    for (layer, modules), form in chosen.items():
        for module in modules:
            for prefix in ("model", "model.language_model", "language_model.model"):
                assert form_of(f"{prefix}.layers.{layer}.{module}") == [form]
    assert form_of("mtp.layers.0.mlp.up_proj") == form_of("model.layers.11.mlp.up_proj") == []
    assert allocation.facts["bits of mlp.up_proj"] == [3, 5, *[0] * 8, 3]


def test_a_budget_below_the_narrowest_form_is_refused() -> None:
    stored = list_tensors(TINY)
    linears = {name: info for name, info in stored.items() if is_linear(name, "attention")}
    with pytest.raises(
        StageError, match=r"too low: the fewest possible are 2\.50 stored bits a weight; raise bits"
    ):
        allocate_widths(TINY, linears, 2.4, 32, [[5, 6, 7, 8]], progress.silent)


def test_what_is_fused_is_what_vllm_fuses() -> None:
    from vllm.model_executor.models.llama import LlamaForCausalLM
    from vllm.model_executor.models.qwen3_5 import Qwen3_5ForCausalLM

    theirs = [
        *LlamaForCausalLM.packed_modules_mapping.values(),
        *Qwen3_5ForCausalLM.packed_modules_mapping.values(),
    ]
    ours = [[module.split(".")[1] for module in row] for row in FUSED]
    assert all(row in theirs for row in ours)
    packable = [row for row in theirs if row != ["in_proj_b", "in_proj_a"]]
    assert all(row in ours for row in packable)
    for kind, row in zip(("attention", "linear_attention", "mlp"), FUSED, strict=True):
        assert all(re.search(LINEARS[kind][3:], f"layers.0.{module}") for module in row)
