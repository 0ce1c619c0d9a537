"""Triton kernels compiled for a GPU that is not here: what it cannot run, and machine code of a real kernel."""

import pytest

from slimqwen import variant
from slimqwen.plan import rehearsal
from slimqwen.plan.devices import read_gpu
from slimqwen.plan.triton_kernels import Compilation, summarise_kernels
from tests.plan.example import needs_cuda_build

ROOT = variant.repository_root()
A10G, H100 = (read_gpu(name, ROOT) for name in ("a10g", "h100"))


def compiled(kernel="k", choice="", launch=1, **measured):
    return Compilation(kernel, choice, launch, **measured)


def test_a_choice_with_more_shared_memory_than_the_gpu_has_is_lost_there_alone():
    choices = [
        compiled(choice="num_stages=2", shared_bytes=50_000),
        compiled(choice="num_stages=4", shared_bytes=131_852),
    ]
    (kernel,) = summarise_kernels(choices, A10G)
    assert [(lost.choice, lost.reason) for lost in kernel.lost] == [
        ("num_stages=4", "needs 131852 bytes of shared memory, the GPU has 101376")
    ]
    assert (kernel.compiled, kernel.runs) == (2, True)
    (kernel,) = summarise_kernels(choices, H100)
    assert kernel.lost == []


def test_a_kernel_runs_only_if_every_launch_has_a_choice_that_fits():
    fits, too_large = {"shared_bytes": 1024}, {"shared_bytes": 2**20}
    (kernel,) = summarise_kernels([compiled(launch=1, **fits), compiled(launch=2, **too_large)], A10G)
    assert not kernel.runs
    (kernel,) = summarise_kernels([compiled(launch=1, **fits), compiled(launch=1, **too_large)], A10G)
    assert kernel.runs


@pytest.mark.parametrize(
    ("measured", "reason"),
    [
        ({"tensor_memory_columns": 1024}, "needs 1024 columns of tensor memory, the GPU has 512"),
        ({"error": "CompilationError: no such type"}, "CompilationError: no such type"),
    ],
)
def test_tensor_memory_and_a_failed_compilation_lose_a_choice_too(measured, reason):
    (kernel,) = summarise_kernels([compiled(**measured)], A10G)
    assert [lost.reason for lost in kernel.lost] == [reason]
    assert not kernel.runs


def test_kernels_are_listed_by_name():
    kernels = summarise_kernels([compiled("b"), compiled("a"), compiled("b", launch=2)], A10G)
    assert [(kernel.kernel, kernel.compiled) for kernel in kernels] == [("a", 1), ("b", 2)]


@pytest.fixture(scope="module")
def plan(tmp_path_factory):
    """Of a variant with MTP and Marlin, its kernels compiled for an A10G."""
    log = tmp_path_factory.mktemp("kernels") / "plan.log"
    subject = variant.load("cyankiwi-best")
    planned = rehearsal.rehearse_variant(subject, A10G, log=log, kernels=True)
    assert (planned.failed_at, planned.error) == (None, None), log.read_text()[-2000:]
    return planned


@pytest.mark.engine
@needs_cuda_build
def test_the_kernels_that_a_variant_launches_are_compiled_for_a_gpu_that_is_not_here(plan):
    kernels = {kernel.kernel.rpartition(".")[2]: kernel for kernel in plan.kernels.kernels}
    assert plan.kernels.target == "sm_86"
    parts = {
        "chunk_gated_delta_rule_fwd_kernel_h_blockdim64": "the Gated DeltaNet prefill",
        "_causal_conv1d_update_kernel": "the convolution of a verify step",
        "_fused_qk_rmsnorm_rope_gate_kernel": "attention",
        "_rejection_kernel": "the rejection sampler",
        "_update_draft_inputs_kernel": "the drafter",
        "_zero_kv_blocks_kernel": "the KV cache",
    }
    assert parts.keys() <= kernels.keys()
    assert all(kernel.runs for kernel in kernels.values())
    # Four of twelve choices overflow the 99 KiB of a block.
    lost = kernels["chunk_gated_delta_rule_fwd_kernel_h_blockdim64"].lost
    assert len(lost) == 4
    assert all("num_stages=4" in choice.choice and "the GPU has 101376" in choice.reason for choice in lost)
    # No step of the warm-up ended early.
    assert not [line for line in plan.kernels.left_out if "which ended" in line]
