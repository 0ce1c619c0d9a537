"""Drafted tokens and accepted ones as vLLM counts them, per position, for groups of prompts."""

import math
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from slimqwen.errors import SlimqwenError
from slimqwen.serving import in_process

_METRICS = "vllm:spec_decode_num_"


class NoDraftsError(SlimqwenError):
    """The engine drafted nothing."""


@dataclass(frozen=True)
class DraftCounts:
    """What the engine's counters say of some requests.

    Attributes:
        drafts: how often it drafted.
        accepted_per_position: accepted drafts at positions 1..K.
        output_tokens: tokens of the continuations.
        seconds: of wall time that they took.
    """

    drafts: int
    accepted_per_position: tuple[int, ...]
    output_tokens: int
    seconds: float

    @property
    def mean_length(self) -> float:
        """Tokens gained by a draft: 1 + accepted / drafts."""
        return 1 + sum(self.accepted_per_position) / self.drafts

    @property
    def rates(self) -> tuple[float, ...]:
        """Share of the drafts that were accepted up to and including positions 1..K."""
        return tuple(accepted / self.drafts for accepted in self.accepted_per_position)


def in_vllm(folder: Path, prompts: Sequence[Sequence[int]], tokens: int, depth: int) -> DraftCounts:
    """Let vLLM go on with prompts greedily, drafting by the checkpoint's MTP head.

    Args:
        folder: the checkpoint.
        prompts: token ids.
        tokens: of a continuation at most.
        depth: tokens drafted at a time (K).

    Raises:
        NoDraftsError: every continuation ended at once.
    """
    longest = max(map(len, prompts)) + tokens
    with in_process.engine(folder, num_speculative_tokens=depth, max_model_len=room(longest, depth)) as llm:
        counted = count(llm, prompts, tokens=tokens)
    if not counted.drafts:
        raise NoDraftsError(f"vLLM drafted nothing with {folder}; give longer prompts or more tokens")
    return counted


def room(tokens: int, depth: int) -> int:
    """The context, in tokens, in which so many leave room for a whole draft; a multiple of 16 keeps blocks whole."""
    return 16 * math.ceil((tokens + depth + 1) / 16)


def count(
    llm: Any, prompts: Sequence[Sequence[int]], *, tokens: int, temperature: float = 0.0, seed: int = 0
) -> DraftCounts:
    """Let an engine go on with prompts, all at once as far as it takes them, and count what came of its drafts.

    Args:
        llm: of `in_process.engine`; at depth 0 it drafts nothing.
        prompts: token ids.
        tokens: of a continuation at most.
        temperature: 0 for greedy tokens.
        seed: of sampling; each prompt has its own, derived from it.
    """
    from vllm import SamplingParams

    settings = [
        SamplingParams(temperature=temperature, max_tokens=tokens, seed=seed + place if temperature else None)
        for place in range(len(prompts))
    ]
    before, started = _counters(llm), time.monotonic()
    outputs = llm.generate([{"prompt_token_ids": list(ids)} for ids in prompts], settings, use_tqdm=False)
    seconds, after = time.monotonic() - started, _counters(llm)
    return DraftCounts(
        after[0] - before[0],
        tuple(now - then for now, then in zip(after[1], before[1] or (0,) * len(after[1]), strict=True)),
        sum(len(output.outputs[0].token_ids) for output in outputs),
        seconds,
    )


def _counters(llm: Any) -> tuple[int, tuple[int, ...]]:
    return in_process.counter(llm, f"{_METRICS}drafts"), in_process.vector(
        llm, f"{_METRICS}accepted_tokens_per_pos"
    )
