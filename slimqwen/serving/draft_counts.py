"""Numbers of drafts and of accepted draft tokens per position, from vLLM's own counters."""

import math
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from slimqwen.serving import in_process
from slimqwen.serving.errors import ServingError

_METRICS = "vllm:spec_decode_num_"


@dataclass(frozen=True)
class DraftCounts:
    """The engine's counters for a set of requests.

    Attributes:
        drafts: number of drafts.
        accepted_per_position: number of accepted draft tokens at positions 1..K.
        output_tokens: tokens of all continuations.
        seconds: wall time of all continuations.
    """

    drafts: int
    accepted_per_position: tuple[int, ...]
    output_tokens: int
    seconds: float

    @property
    def mean_length(self) -> float:
        """Acceptance length, tokens: 1 + accepted / drafts."""
        return 1 + sum(self.accepted_per_position) / self.drafts


def count_drafts_in_vllm(
    weights: Path, prompts: Sequence[Sequence[int]], tokens: int, depth: int
) -> DraftCounts:
    """Have vLLM continue prompts greedily with drafts of the checkpoint's MTP head, and count the drafts.

    Args:
        weights: folder of the checkpoint.
        prompts: token ids of each prompt.
        tokens: longest continuation, tokens.
        depth: tokens drafted at a time (K).

    Raises:
        ServingError: vLLM drafted nothing, because every continuation ended at its first token.
    """
    longest = max(map(len, prompts)) + tokens
    with in_process.engine(
        weights, num_speculative_tokens=depth, max_model_len=needed_context(longest, depth)
    ) as llm:
        counts = count_drafts(llm, prompts, tokens=tokens)
    if not counts.drafts:
        raise ServingError(
            f"vLLM drafted nothing with {weights}: every continuation ended at its first token; use other prompts"
        )
    return counts


def needed_context(tokens: int, depth: int) -> int:
    """Context length for `tokens` and one draft of `depth` tokens, rounded up to whole cache blocks of 16 tokens."""
    return 16 * math.ceil((tokens + depth + 1) / 16)


def count_drafts(
    llm: Any, prompts: Sequence[Sequence[int]], *, tokens: int, temperature: float = 0.0, seed: int = 0
) -> DraftCounts:
    """Have an engine continue prompts, max_num_seqs at a time, and count its drafts for them.

    Args:
        llm: engine of `in_process.engine`; an engine without drafts gives zeros.
        prompts: token ids of each prompt.
        tokens: longest continuation, tokens.
        temperature: sampling temperature; 0 is greedy.
        seed: seed of sampling; the seed of a prompt is `seed` plus its index.
    """
    from vllm import SamplingParams

    sampling = [
        SamplingParams(
            temperature=temperature, max_tokens=tokens, seed=seed + number if temperature else None
        )
        for number in range(len(prompts))
    ]
    (drafts, accepted), started = _counters(llm), time.monotonic()
    outputs = llm.generate([{"prompt_token_ids": list(ids)} for ids in prompts], sampling, use_tqdm=False)
    seconds, (drafts_after, accepted_after) = time.monotonic() - started, _counters(llm)
    earlier = accepted or (0,) * len(accepted_after)
    return DraftCounts(
        drafts_after - drafts,
        tuple(after - before for after, before in zip(accepted_after, earlier, strict=True)),
        sum(len(output.outputs[0].token_ids) for output in outputs),
        seconds,
    )


def _counters(llm: Any) -> tuple[int, tuple[int, ...]]:
    accepted = in_process.vector(llm, f"{_METRICS}accepted_tokens_per_pos")
    return in_process.counter(llm, f"{_METRICS}drafts"), accepted
