"""Acceptance of drafted tokens as vLLM counts it, per position, for one checkpoint and depth."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from slimqwen.errors import SlimqwenError
from slimqwen.progress import Progress, silent

_METRICS = "vllm:spec_decode_num_"


class NoDraftsError(SlimqwenError):
    """The engine drafted nothing."""


@dataclass(frozen=True)
class ServedAcceptance:
    """What the engine's counters say.

    Attributes:
        depth: tokens drafted at a time (K).
        drafts: how often it drafted.
        accepted_per_position: accepted drafts at positions 1..K.
    """

    depth: int
    drafts: int
    accepted_per_position: tuple[int, ...]

    @property
    def mean_length(self) -> float:
        """Tokens gained by a draft: 1 + accepted / drafts."""
        return 1 + sum(self.accepted_per_position) / self.drafts

    @property
    def rates(self) -> tuple[float, ...]:
        """Share of the drafts that were accepted up to and including positions 1..K."""
        return tuple(accepted / self.drafts for accepted in self.accepted_per_position)


def sweep(
    folder: Path,
    prompts: Sequence[Sequence[int]],
    tokens: int,
    depths: Sequence[int],
    progress: Progress = silent,
) -> dict[str, Any]:
    """Acceptance at several depths, each with an engine of its own on the same prompts.

    Args:
        folder: the checkpoint.
        prompts: token ids.
        tokens: of a continuation at most.
        depths: tokens drafted at a time (K).
        progress: hears the depths done.

    Returns:
        {"prompts", "tokens", "depths": [{"depth", "drafts", "acceptance_length", "rates"}]}.
    """
    rows = []
    for done, depth in enumerate(depths):
        progress("depths", done, len(depths))
        counted = in_vllm(folder, prompts, tokens, depth)
        rows.append(
            {
                "depth": depth,
                "drafts": counted.drafts,
                "acceptance_length": round(counted.mean_length, 4),
                "rates": [round(rate, 4) for rate in counted.rates],
            }
        )
    progress("depths", len(depths), len(depths))
    return {"prompts": len(prompts), "tokens": tokens, "depths": rows}


def in_vllm(folder: Path, prompts: Sequence[Sequence[int]], tokens: int, depth: int) -> ServedAcceptance:
    """Let vLLM go on with prompts greedily, drafting by the checkpoint's MTP head.

    Args:
        folder: the checkpoint.
        prompts: token ids.
        tokens: of a continuation at most.
        depth: tokens drafted at a time (K).

    Raises:
        NoDraftsError: every continuation ended at once.
    """
    from vllm import SamplingParams

    from slimqwen.serving.in_process import counter, engine, vector

    greedy = SamplingParams(temperature=0.0, max_tokens=tokens)
    length = max(map(len, prompts)) + tokens + depth + 1
    # A multiple of 16 keeps block sizes whole.
    with engine(folder, num_speculative_tokens=depth, max_model_len=16 * math.ceil(length / 16)) as llm:
        llm.generate([{"prompt_token_ids": list(ids)} for ids in prompts], greedy, use_tqdm=False)
        drafts = counter(llm, f"{_METRICS}drafts")
        accepted = vector(llm, f"{_METRICS}accepted_tokens_per_pos")
    if not drafts:
        raise NoDraftsError(f"vLLM drafted nothing with {folder}; give longer prompts or more tokens")
    return ServedAcceptance(depth, drafts, accepted)
