import functools
import importlib

import pytest
import torch

from slimqwen.vllm_plugin.patches.cpu import sampling_expansion
from slimqwen.vllm_plugin.patches.upstream import PatchError

expand = functools.partial(sampling_expansion.expand, None)


def expanded_in_python(values, totals, replace_from, replace_to):
    row = []
    for value, start, end in zip(values, [0, *totals], totals, strict=False):
        row += [replace_to if value == replace_from else value] * (end - start)
    return row


@pytest.mark.parametrize("dtype", [torch.float32, torch.int32, torch.int64])
@pytest.mark.parametrize("totals_dtype", [torch.int32, torch.int64])
@pytest.mark.parametrize(
    ("values", "totals"),
    [
        ([3], [4]),
        ([3, 0, 5], [2, 5, 6]),
        ([3, 0, 5, 7], [0, 4, 4, 5]),  # requests without a draft token
        ([0, 0], [0, 0]),
    ],
)
def test_expand_repeats_each_value_once_per_draft_token(dtype, totals_dtype, values, totals):
    for replace_from, replace_to in ((0, 0), (0, 1), (5, 2)):
        output = torch.full((totals[-1],), 99, dtype=dtype)
        expand(
            output, torch.tensor(values, dtype=dtype), torch.tensor(totals, dtype=totals_dtype),
            replace_from, replace_to, MAX_NUM_TOKENS=128,
        )  # fmt: skip
        assert output.tolist() == expanded_in_python(values, totals, replace_from, replace_to)


def test_expand_keeps_fractions_and_leaves_what_lies_behind_the_last_token():
    output = torch.full((5,), -1.0)
    expand(output, torch.tensor([0.7, 0.25]), torch.tensor([1, 3], dtype=torch.int32), 0, 1)
    assert torch.equal(output, torch.tensor([0.7, 0.25, 0.25, -1.0, -1.0]))


@pytest.mark.usefixtures("stock_vllm")
@pytest.mark.parametrize("dtype", [torch.float32, torch.int32])
def test_the_fix_is_still_needed(dtype):
    """Fails when vLLM has mended its function: the fix can go then."""
    from vllm.platforms import current_platform
    from vllm.utils import cpu_triton_utils

    current_platform.import_kernels()
    output = torch.full((3,), 9, dtype=dtype)
    totals = torch.tensor([1, 3], dtype=torch.int32)
    cpu_triton_utils._expand_kernel_impl(output, torch.tensor([4, 5], dtype=dtype), totals, 0, 1)
    assert output.tolist() == [9, 9, 9]


@pytest.mark.parametrize("has_triton", [True, False])
def test_triton_needs_no_kernel_in_place_of_its_own(monkeypatch, has_triton):
    monkeypatch.setattr("vllm.triton_utils.HAS_TRITON", has_triton)
    assert sampling_expansion.is_needed() is not has_triton


@pytest.mark.usefixtures("stock_vllm")
def test_install_refuses_when_a_worker_has_already_bound_the_stock_function(monkeypatch):
    import vllm.v1.sample
    from vllm.triton_utils.dispatcher import KernelOverride

    # By its full name, so that it is where the fix looks, even if an engine of this process had loaded it before.
    rejection_sampler = importlib.import_module("vllm.v1.sample.rejection_sampler")
    monkeypatch.setattr(vllm.v1.sample, "rejection_sampler", rejection_sampler)
    stock = KernelOverride(rejection_sampler.expand_kernel, lambda *_: None)
    monkeypatch.setattr(rejection_sampler, "expand_kernel", stock)
    with pytest.raises(PatchError, match="already uses the stock kernel"):
        sampling_expansion.install()
