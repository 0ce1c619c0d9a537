"""Apply min_p and logit_bias to drafted tokens, so that requests with them need not be refused, on a CPU.

vLLM verifies a draft with one row of logits for each drafted token, and draws the token after the last of them from a
row of its own. In vLLM's V1 runner only that last row passes through all logits processors; to the rows of drafted
tokens `RejectionSampler.apply_logits_processors` (`vllm/v1/sample/rejection_sampler.py`) applies the minimum length
alone. With drafts vLLM therefore builds neither processor (`build_logitsprocs`) and answers such a request with 400
(`SamplingParams._validate_spec_decode`). Upstream: vllm#42744 and pull request #42802 (min_p), #38467 (logit_bias).

With this fix vLLM builds the processors that it builds without drafts, and each row of a drafted token gets what the
row of its request gets without drafts, in the same order and by the same arithmetic: the bias before the penalties
(which scale, so the two do not commute), min_p after the temperature and before top-k and top-p.

On a GPU vLLM's default is the V2 runner, whose sampler has every processor for every row
(`vllm/v1/worker/gpu/sample/sampler.py`) and of which this fix changes nothing. There the refusal stays until that has
been tried on a GPU.

Remove this fix when `apply_logits_processors` applies both, and `_validate_spec_decode` refuses neither.
"""

import copy
import itertools
from collections.abc import Callable, Sequence
from typing import Any

import torch

from slimqwen.vllm_plugin.patches.upstream import expect, replace

_FIX = "draft_logits"


def add_bias(
    logits: torch.Tensor, biases: dict[int, dict[int, float]], drafted: Sequence[int]
) -> torch.Tensor:
    """Add the bias of each request to the rows of its drafted tokens, in place.

    Args:
        logits: [drafted tokens, vocabulary], float32; the rows of a request lie together, requests in order.
        biases: position of a request in the batch -> token -> what is added to its logit.
        drafted: number of drafted tokens of each request.
    """
    starts = [0, *itertools.accumulate(drafted)]
    for request, bias in biases.items():
        tokens = torch.tensor(list(bias), device=logits.device)
        added = torch.tensor(list(bias.values()), dtype=torch.float32, device=logits.device)
        logits[starts[request] : starts[request + 1], tokens] += added
    return logits


def leave_out_unlikely(
    logits: torch.Tensor, min_p: torch.Tensor, temperature: torch.Tensor, totals: torch.Tensor
) -> torch.Tensor:
    """Set the logits of tokens to minus infinity that are less likely than min_p times the likeliest, in place.

    Args:
        logits: [drafted tokens, vocabulary], float32, not yet divided by the temperature.
        min_p: [requests], 0 where a request has none.
        temperature: [requests], 0 where a request is greedy, which min_p does not change.
        totals: [requests], cumulative number of drafted tokens.
    """
    counts = torch.diff(totals, prepend=totals.new_zeros(1))
    rows = {"repeats": counts, "output_size": len(logits)}
    scale = temperature.masked_fill(temperature == 0, 1).repeat_interleave(**rows)
    likely = (logits / scale.unsqueeze(1)).softmax(dim=-1)
    least = likely.amax(dim=-1, keepdim=True) * min_p.repeat_interleave(**rows).unsqueeze(1)
    return logits.masked_fill_(likely < least, -torch.inf)


def install() -> bool:
    """Make vLLM honour min_p and logit_bias beside drafts; False if it is installed already in this process."""
    from vllm.sampling_params import SamplingParams
    from vllm.v1.sample import logits_processor, rejection_sampler
    from vllm.v1.worker import gpu_model_runner

    kinds = logits_processor.BUILTIN_LOGITS_PROCESSORS
    bias, least = logits_processor.LogitBiasLogitsProcessor, logits_processor.MinPLogitsProcessor
    expected = {logits_processor.MinTokensLogitsProcessor, bias, least}
    expect(
        _FIX, set(kinds) == expected, f"vLLM has the logits processors {[kind.__name__ for kind in kinds]}"
    )

    def build(
        stock: Callable[..., Any],
        vllm_config: Any,
        device: Any,
        is_pin_memory: bool,
        is_pooling_model: bool,
        custom_logitsprocs: Any = (),
    ) -> Any:
        if is_pooling_model or custom_logitsprocs or vllm_config.speculative_config is None:
            return stock(vllm_config, device, is_pin_memory, is_pooling_model, custom_logitsprocs)
        return logits_processor.LogitsProcessors(kind(vllm_config, device, is_pin_memory) for kind in kinds)

    def process(
        stock: Callable[..., torch.Tensor],
        self: Any,
        logits: torch.Tensor,
        sampling_metadata: Any,
        metadata: Any,
    ) -> torch.Tensor:
        for processor in sampling_metadata.logitsprocs.non_argmax_invariant:
            if isinstance(processor, bias):
                logits = add_bias(logits, processor.biases, metadata.num_draft_tokens)
        return stock(self, logits, sampling_metadata, metadata)

    def constrain(
        stock: Callable[..., torch.Tensor],
        logits: torch.Tensor,
        cu_num_draft_tokens: torch.Tensor,
        sampling_metadata: Any,
    ) -> torch.Tensor:
        if not sampling_metadata.all_greedy:
            for processor in sampling_metadata.logitsprocs.argmax_invariant:
                if isinstance(processor, least) and processor.min_p_count:
                    temperature = sampling_metadata.temperature
                    shares = processor.min_p.squeeze(1)
                    logits = leave_out_unlikely(logits, shares, temperature, cu_num_draft_tokens)
        return stock(logits, cu_num_draft_tokens, sampling_metadata)

    def validate(stock: Callable[..., None], self: Any, speculative_config: Any) -> None:
        others = copy.copy(self)
        others.min_p, others.logit_bias = 0.0, None
        stock(others, speculative_config)

    return (
        replace(_FIX, gpu_model_runner, "build_logitsprocs", build)
        & replace(_FIX, rejection_sampler.RejectionSampler, "apply_logits_processors", process)
        & replace(_FIX, rejection_sampler, "apply_sampling_constraints", constrain)
        & replace(_FIX, SamplingParams, "_validate_spec_decode", validate)
    )
