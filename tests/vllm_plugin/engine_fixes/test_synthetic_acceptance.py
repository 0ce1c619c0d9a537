"""Drafts are kept by rate; the stock kernels refuse to; an engine reaches the acceptance length that was set."""

import pytest
import torch

from slimqwen.serving import in_process
from slimqwen.vllm_plugin.engine_fixes import synthetic_acceptance
from slimqwen.vllm_plugin.engine_fixes.upstream import EngineFixError

EMPTY = -1


def accepted(drafts, uniform, rates, totals, *, chosen=None):
    """Rows of output for drafts whose target would say 100 + position, with bonus tokens 900, 901, …"""
    batch = len(totals)
    output = torch.full((batch, len(rates) + 1), EMPTY, dtype=torch.int32)
    synthetic_acceptance.accept(
        output,
        torch.tensor(totals, dtype=torch.int32),
        torch.tensor(drafts, dtype=torch.int32),
        100 + torch.arange(len(drafts)),
        900 + torch.arange(batch).reshape(-1, 1),
        torch.tensor(uniform, dtype=torch.float64),
        torch.tensor(rates),
        torch.ones(batch, dtype=torch.bool) if chosen is None else torch.tensor(chosen),
    )
    return output.tolist()


@pytest.mark.parametrize(
    ("drafts", "uniform", "rates", "row"),
    [
        pytest.param([7, 8, 9], [0.1, 0.6, 0.0], [0.5] * 3, [7, 101, EMPTY, EMPTY], id="not below its rate"),
        pytest.param([7, 8], [0.1, 0.1], [0.5, 0.5], [7, 8, 900], id="whole, then the bonus token"),
        pytest.param([7, 8], [0.999999, 0.0], [1.0, 0.0], [7, 101, EMPTY], id="rates of one and of zero"),
        pytest.param([-1, 8], [0.0, 0.0], [1.0, 1.0], [100, EMPTY, EMPTY], id="padding is never kept"),
    ],
)
def test_drafts_are_kept_up_to_the_first_that_its_rate_rejects(drafts, uniform, rates, row):
    assert accepted(drafts, uniform, rates, [len(drafts)]) == [row]


def test_requests_have_their_own_drafts_and_those_that_are_not_chosen_stay():
    rows = accepted([7, 8, 9], [0.1, 0.1, 0.1], [1.0, 1.0], [1, 1, 3], chosen=[True, True, False])
    assert rows == [[7, 900, EMPTY], [901, EMPTY, EMPTY], [EMPTY] * 3]


@pytest.mark.usefixtures("stock_vllm")
def test_the_fix_is_still_needed():
    """Fails when vLLM's own kernels take synthetic acceptance: the fix can go then."""
    from vllm.utils import cpu_triton_utils

    for kernel, count in (
        (cpu_triton_utils._rejection_greedy_sample_kernel_impl, 9),
        (cpu_triton_utils._rejection_random_sample_kernel_impl, 13),
    ):
        with pytest.raises(AssertionError, match="Synthetic acceptance not supported"):
            kernel(*[None] * count, True)


@pytest.mark.usefixtures("stock_vllm")
def test_install_leaves_other_sampling_to_vllm(monkeypatch):
    from vllm.utils import cpu_triton_utils

    heard = []

    def stock(
        output_token_ids, cu_num_draft_tokens, draft_token_ids, target_argmax, bonus_token_ids, is_greedy,
        max_spec_len, uniform_probs=None, synthetic_conditional_rates=None, SYNTHETIC_MODE=False,  # noqa: N803
    ):  # fmt: skip
        assert not SYNTHETIC_MODE, "refused"
        heard.append(output_token_ids)

    monkeypatch.setattr(cpu_triton_utils, "_rejection_greedy_sample_kernel_impl", stock)
    assert synthetic_acceptance.install()
    cpu_triton_utils._rejection_greedy_sample_kernel_impl("output", *[None] * 8, False)
    assert heard == ["output"]


@pytest.mark.usefixtures("stock_vllm")
@pytest.mark.parametrize("is_greedy", [None, torch.tensor([True])])
def test_the_installed_kernel_keeps_drafts_by_rate(is_greedy):
    from vllm.utils import cpu_triton_utils

    assert synthetic_acceptance.install()
    output = torch.full((1, 3), EMPTY, dtype=torch.int32)
    cpu_triton_utils._rejection_greedy_sample_kernel_impl(
        output, torch.tensor([2]), torch.tensor([7, 8]), torch.tensor([100, 101]), torch.tensor([[900]]), is_greedy,
        2, torch.tensor([0.5, 0.5]), torch.tensor([1.0, 0.0]), True,
    )  # fmt: skip
    assert output.tolist() == [[7, 101, EMPTY]]


@pytest.mark.usefixtures("stock_vllm")
def test_install_does_nothing_where_vllm_no_longer_refuses(monkeypatch):
    monkeypatch.setattr(
        "vllm.utils.cpu_triton_utils._rejection_greedy_sample_kernel_impl", lambda *values: None
    )
    assert not synthetic_acceptance.install()


@pytest.mark.usefixtures("stock_vllm")
def test_install_refuses_when_a_kernel_is_gone(monkeypatch):
    monkeypatch.delattr("vllm.utils.cpu_triton_utils._rejection_random_sample_kernel_impl")
    with pytest.raises(EngineFixError, match="no function _rejection_random_sample_kernel_impl"):
        synthetic_acceptance.install()


def test_reason_is_none_with_triton(monkeypatch):
    monkeypatch.setattr("vllm.triton_utils.HAS_TRITON", True)
    assert synthetic_acceptance.reason() is None


@pytest.mark.engine
def test_an_engine_reaches_the_acceptance_length_that_was_set(tiny):
    from vllm import SamplingParams

    speculation = {
        "method": "mtp",
        "num_speculative_tokens": 4,
        "rejection_sample_method": "synthetic",
        "synthetic_acceptance_length": 2.5,
    }
    with in_process.engine(tiny, speculative_config=speculation, max_num_seqs=4) as llm:
        prompts = [{"prompt_token_ids": list(range(first, first + 8))} for first in (100, 200, 300, 400)]
        for temperature in (0.0, 0.7):
            before = in_process.counter(llm, "vllm:spec_decode_num_drafts")
            kept = in_process.counter(llm, "vllm:spec_decode_num_accepted_tokens")
            settings = SamplingParams(max_tokens=128, temperature=temperature, ignore_eos=True, seed=1)
            llm.generate(prompts, settings, use_tqdm=False)
            drafts = in_process.counter(llm, "vllm:spec_decode_num_drafts") - before
            kept = in_process.counter(llm, "vllm:spec_decode_num_accepted_tokens") - kept
            # Rates 1, 0.5, 0, 0: five standard errors of a coin thrown 200 times.
            assert 1 + kept / drafts == pytest.approx(2.5, abs=0.18)
