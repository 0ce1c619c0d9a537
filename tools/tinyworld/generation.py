"""Greedy generation in this process, for measuring a checkpoint without a server."""

from collections.abc import Sequence
from typing import Any

import torch

from slimqwen.progress import Progress, silent

LARGEST_BATCH = 64


def continue_greedily(
    backbone: Any,
    prompts: Sequence[Sequence[int]],
    most_tokens: int,
    stop_ids: Sequence[int],
    progress: Progress = silent,
) -> list[list[int]]:
    """Generate greedily.

    Args:
        backbone: `Qwen3_5ForCausalLM` in evaluation mode.
        prompts: token ids; none may be empty.
        most_tokens: largest number of new tokens per prompt.
        stop_ids: ids of tokens that end a text; if empty, `most_tokens` are generated.
        progress: receives (activity, done, total) in prompts.

    Returns:
        New tokens of each prompt, without the token that ended it.
    """
    # Only prompts of equal length share a batch, because padding would enter the recurrent state.
    by_length: dict[int, list[int]] = {}
    for index, prompt in enumerate(prompts):
        by_length.setdefault(len(prompt), []).append(index)
    results: list[list[int]] = [[] for _ in prompts]
    done = 0
    for indices in by_length.values():
        for start in range(0, len(indices), LARGEST_BATCH):
            batch = indices[start : start + LARGEST_BATCH]
            rows = _continue_batch(backbone, [prompts[index] for index in batch], most_tokens, stop_ids)
            for index, row in zip(batch, rows, strict=True):
                results[index] = row
            done += len(batch)
            progress("generating answers", done, len(prompts))
    return results


def _continue_batch(
    backbone: Any, prompts: Sequence[Sequence[int]], most_tokens: int, stop_ids: Sequence[int]
) -> list[list[int]]:
    new: list[list[int]] = [[] for _ in prompts]
    alive = [True] * len(prompts)
    tokens = torch.tensor([list(prompt) for prompt in prompts])
    cache = None
    with torch.no_grad():
        for _ in range(most_tokens):
            output = backbone.model(tokens, use_cache=True, past_key_values=cache)
            cache = output.past_key_values
            likeliest = backbone.lm_head(output.last_hidden_state[:, -1]).argmax(dim=-1)
            for row, token in enumerate(likeliest.tolist()):
                if alive[row] and token in stop_ids:
                    alive[row] = False
                elif alive[row]:
                    new[row].append(token)
            if not any(alive):
                break
            tokens = likeliest[:, None]
    return new
