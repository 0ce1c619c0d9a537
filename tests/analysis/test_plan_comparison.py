"""What changes from one plan to another."""

import pytest

from slimqwen.analysis import plan_comparison
from tests.plan.example import kernels, plan, record


def test_flags_backends_and_graph_modes_that_change_between_versions_are_shown(tmp_path):
    first = record(tmp_path, plan(sizes=(5, 10), full=()))
    second = record(
        tmp_path, plan(sizes=(5,), full=(5,), backend="FLASHINFER", vllm="0.33.0", dtype="float16")
    )
    ((old, new),) = plan_comparison.pairs(first, second, None)
    table = plan_comparison.changes_table(old, new)
    assert table.columns[1:] == ("v on a10g, vLLM 0.32.0", "v on a10g, vLLM 0.33.0")
    changes = {row[0]: row[1:] for row in table.rows}
    assert changes == {
        "flags.cudagraph-capture-sizes": ("[5, 10]", "[5]"),
        "engine.dtype": ("bfloat16", "float16"),
        "engine.requested_graph_sizes": ("[5, 10]", "[5]"),
        "attention.Attention.backend": ("FLASH_ATTN", "FLASHINFER"),
        "graphs.mode": ("PIECEWISE", "FULL_AND_PIECEWISE"),
        "graphs.captured.FULL": ("-", "[5]"),
        "jit.FlashInfer attention": ("-", "true"),
    }


def test_a_kernel_that_loses_other_choices_is_a_change():
    first, second = plan(kernels=kernels()), plan(kernels=kernels(lost=()))
    ((name, before, after),) = plan_comparison.changes_table(first, second).rows
    assert (name, after) == ("kernels.vllm.gdn.prefill", "runs")
    assert before == "1 of 12 (needs 131852 bytes of shared memory, the GPU has 101376)"


def test_equal_plans_change_nothing():
    table = plan_comparison.changes_table(plan(), plan())
    assert table.rows == ()
    assert table.notes == (f"{len(plan_comparison._flat(plan()))} facts are the same.",)


def test_a_warning_of_one_plan_alone_is_a_change():
    first, second = plan().model_copy(update={"warnings": ["old", "both"]}), plan()
    second = second.model_copy(update={"warnings": ["both", "new"]})
    assert plan_comparison.changes_table(first, second).rows == (
        ("warning", "old", "-"),
        ("warning", "-", "new"),
    )


def test_plans_on_two_gpus_are_paired_by_name_or_because_they_are_alone(tmp_path):
    both = record(tmp_path, plan(), plan(gpu="h100"))
    l4 = record(tmp_path, plan(gpu="l4"))
    h100 = record(tmp_path, plan(gpu="h100"))

    def gpus(*arguments):
        return [(first.gpu, second.gpu) for first, second in plan_comparison.pairs(*arguments)]

    assert gpus(both, both, ("a10g", "h100")) == [("a10g", "h100")]
    assert gpus(both, both, None) == [("a10g", "a10g"), ("h100", "h100")]
    assert gpus(both, h100, None) == [("h100", "h100")]
    assert gpus(l4, h100, None) == [("l4", "h100")]
    for gpu_names in (None, ("h100", "a10g")):
        with pytest.raises(
            plan_comparison.NoPlanPairError, match="the first record has a10g, h100, the second l4"
        ):
            plan_comparison.pairs(both, l4, gpu_names)
