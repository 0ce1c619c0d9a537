"""Compute log-probabilities of a prompt's tokens for some of them at a time, on a CPU.

vLLM's first model runner computes the logits of all tokens of a prompt that a step takes, and their logarithms in
float32 beside: 2,047 tokens and 49,152 ids took 1.1 GB, the ids of Qwen3.5 take five times that. Nothing plans that
memory, so the engine is killed where it is not there. Here some rows are computed at a time; the values are the same.

Remove this fix when `_get_prompt_logprobs_dict` does so itself, as vllm#52054 proposes; the second runner, for GPUs,
does.
"""

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import torch

from slimqwen.vllm_plugin.patches.upstream import replace

_FIX = "prompt_logits"
_ROWS = 256
"""Tokens whose logits are computed at once: 50 MB of float32 for 49,152 ids, 254 MB for 248,320."""


def install() -> bool:
    """Make vLLM's first model runner divide the logits of a prompt.

    Returns:
        False if it is installed already in this process.
    """
    from vllm.v1.worker.gpu_model_runner import GPUModelRunner

    return replace(_FIX, GPUModelRunner, "_get_prompt_logprobs_dict", _divide)


def _divide(
    stock: Callable[..., Any], self: Any, hidden_states: torch.Tensor, num_scheduled_tokens: dict[str, int]
) -> Any:
    """Call `stock` with a model and a sampler that hand hidden states on until they are gathered from, in blocks."""
    if not self.num_prompt_logprobs or not self.model_config.logprobs_mode.endswith("logprobs"):
        return stock(self, hidden_states, num_scheduled_tokens)
    model, sampler = self.model, self.sampler

    def hand_on(states: torch.Tensor) -> torch.Tensor:
        return states

    def gather(states: torch.Tensor, num_logprobs: int, token_ids: torch.Tensor) -> list[torch.Tensor]:
        blocks = []
        for rows, ids in zip(states.split(_ROWS), token_ids.split(_ROWS), strict=True):
            logprobs = sampler.compute_logprobs(model.compute_logits(rows))
            blocks.append(sampler.gather_logprobs(logprobs, num_logprobs, ids)[:3])
        return [torch.cat(parts) for parts in zip(*blocks, strict=True)]

    self.model = SimpleNamespace(compute_logits=hand_on)
    self.sampler = SimpleNamespace(compute_logprobs=hand_on, gather_logprobs=gather)
    try:
        return stock(self, hidden_states, num_scheduled_tokens)
    finally:
        self.model, self.sampler = model, sampler
