"""The noise of a baseline: differences between engines that should give the same results for one checkpoint.

Each repeat is a process of its own with three engines: one reads texts (fidelity against the checkpoint in float32),
one counts drafts, one answers requests greedily with log-probabilities. `slimqwen.evals.engine.isolation` calls the
functions.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self

from slimqwen.evals import drafting
from slimqwen.evals.drafting import AcceptanceSettings
from slimqwen.evals.engine import combinations, scenarios
from slimqwen.evals.engine.combinations import REFERENCE_MODES, ServedEngine
from slimqwen.evals.engine.scenarios import Answer, EngineSettings, Request
from slimqwen.evals.fidelity import weight_flags
from slimqwen.evals.fidelity_figures import HEAD_LOG_PROBABILITY, FidelitySettings, TextComparison
from slimqwen.progress import Progress
from slimqwen.serving import in_process
from slimqwen.serving.unsafe_engines import Modes

GROUPS = ("prompts", "prefixes", "mixed")
"""Groups of requests that every repeat answers; prefixes twice, so that the second time a cache can hit."""


@dataclass(frozen=True)
class Baseline:
    """The inputs of every repeat.

    Attributes:
        served: how it is served; its flags say how many tokens a step may have.
        classes: prompts of each class in token ids.
    """

    served: ServedEngine
    fidelity: FidelitySettings
    acceptance: AcceptanceSettings
    engine: EngineSettings
    classes: Mapping[str, list[list[int]]]


@dataclass(frozen=True)
class Reference:
    """Requests by group, and the answers of the reference engine: no drafts, no cache, one at a time."""

    requests: Mapping[str, list[Request]]
    answers: Mapping[str, list[Answer]]


@dataclass(frozen=True)
class RepeatNoise:
    """The results of one repeat.

    Attributes:
        texts: comparison of each text with float32, head tokens included.
        drafts: items of an acceptance record.
        gap_shifts: how far the log-probability gap of the reference engine's two likeliest tokens moved, nats, at each
            position where they can tie, up to the first token that differs.
        differing: number of answers with another token.
    """

    texts: list[TextComparison]
    drafts: list[dict[str, Any]]
    gap_shifts: list[float]
    answers: int
    differing: int

    @classmethod
    def from_json(cls, entry: Mapping[str, Any]) -> Self:
        """The repeat with these fields."""
        return cls(**{**entry, "texts": [TextComparison(**text) for text in entry["texts"]]})


def answer_by_reference(weights: Path, _: Path, baseline: Baseline, progress: Progress) -> Reference:
    """Make the requests, and answer them with the reference engine."""
    progress("starting", 0, 0)
    served = baseline.served
    budget = served.flags["max-num-batched-tokens"]
    flags = combinations.flags_of(REFERENCE_MODES, REFERENCE_MODES, served)
    longest_step = max(served.context_len, budget)
    with in_process.served_engine(weights, flags, max_num_batched_tokens=longest_step) as llm:
        requests = scenarios.cut_requests(
            baseline.engine,
            weights,
            served.root,
            context_len=served.context_len,
            max_batched_tokens=budget,
            block_size=scenarios.cache_block_size(llm),
            draft_tokens=baseline.acceptance.gate_depth,
            concurrency=baseline.engine.concurrency,
        )
        requests = {group: requests[group] for group in GROUPS}
        answers = scenarios.answer_singly(llm, requests, progress)
    return Reference(requests, answers)


def measure_repeat(
    weights: Path, _: Path, task: tuple[Baseline, Mapping[str, Any], Reference], progress: Progress
) -> RepeatNoise:
    """Compare the baseline with itself in one engine.

    Args:
        task: the baseline, vLLM's flags that replace the baseline's, and the reference.
    """
    from slimqwen.evals import token_distributions

    progress("starting", 0, 0)
    baseline, replacement_flags, reference = task
    served = baseline.served
    concurrency = int(replacement_flags.get("max-num-seqs", 1))
    flags = {**weight_flags(served.flags), **replacement_flags}
    texts = token_distributions.compare(
        weights,
        weights,
        baseline.fidelity.model_copy(update={"batch": concurrency}),
        served.root,
        max_model_len=served.context_len,
        flags=flags,
        modes=["batched" if concurrency > 1 else "single"],
        progress=progress,
    )
    # `drafting.count` sets enforce-eager itself.
    draft_flags = {name: value for name, value in flags.items() if name != "enforce-eager"}
    drafts = drafting.count(
        weights,
        baseline.classes,
        baseline.acceptance,
        [baseline.acceptance.gate_depth],
        [0.0],
        draft_flags,
        progress,
    )
    shifts, answers, differing = _compare_answers(weights, baseline, replacement_flags, reference, progress)
    return RepeatNoise(texts, drafts, shifts, answers, differing)


def gap_shifts(reference: Answer, answer: Answer) -> list[float]:
    """How far the gap between the reference's two likeliest tokens moved, nats, up to the first token that differs.

    Positions are left out where the second token is no head token, because nothing ties there, and where the other
    engine does not list both tokens.
    """
    shifts = []
    positions = zip(
        reference.tokens, answer.tokens, reference.log_probabilities, answer.log_probabilities, strict=False
    )
    for expected, token, reference_log_ps, log_ps in positions:
        first, second = sorted(reference_log_ps, key=lambda each: -reference_log_ps[each])[:2]
        if reference_log_ps[second] >= HEAD_LOG_PROBABILITY and first in log_ps and second in log_ps:
            shifts.append(
                abs((reference_log_ps[first] - reference_log_ps[second]) - (log_ps[first] - log_ps[second]))
            )
        if token != expected:
            break
    return shifts


def _compare_answers(
    weights: Path,
    baseline: Baseline,
    replacement_flags: Mapping[str, Any],
    reference: Reference,
    progress: Progress,
) -> tuple[list[float], int, int]:
    """Gap shifts of all answers of an engine that drafts, their number, and how many have another token."""
    served = baseline.served
    modes = Modes(
        draft_tokens=baseline.acceptance.gate_depth,
        prefix_caching=bool(replacement_flags.get("enable-prefix-caching", False)),
        kv_cache_dtype=str(served.flags.get("kv-cache-dtype", "auto")),
        chunked_prefill=True,
        concurrency=int(replacement_flags.get("max-num-seqs", 1)),
        graphs="eager" if replacement_flags.get("enforce-eager", True) else "CUDA graphs",
    )
    flags = {**combinations.flags_of(modes, REFERENCE_MODES, served), **replacement_flags}
    shifts: list[float] = []
    count = differing = 0
    with in_process.served_engine(weights, flags) as llm:
        for group in ("prompts", "prefixes", "prefixes", "mixed"):
            progress(f"answering {group}", count, 0)
            answers = scenarios.replay(llm, reference.requests[group], log_probabilities=True)
            for expected, answer in zip(reference.answers[group], answers, strict=True):
                shifts += gap_shifts(expected, answer)
                count += 1
                differing += expected.tokens != answer.tokens
    return shifts, count, differing
