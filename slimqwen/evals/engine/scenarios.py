"""The requests that every combination of engine modes answers, and the scenarios in which it answers them.

Each engine is vLLM without HTTP, with its scheduler in the same process (`slimqwen.serving.in_process`), so that every
run gives the same tokens. Features of a server alone, such as asynchronous scheduling, are not covered.
"""

import contextlib
import itertools
import math
import random
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar, Literal

from pydantic import BaseModel, ConfigDict, Field

from slimqwen.evals import EvalError
from slimqwen.progress import Progress
from slimqwen.records.settings import Settings
from slimqwen.serving import in_process
from slimqwen.serving.unsafe_engines import Modes
from slimqwen.text import prompts

Mode = Literal["draft_tokens", "prefix_caching", "kv_cache_dtype", "chunked_prefill", "concurrency", "graphs"]
Tokens = tuple[int, ...]

_TOP_LOGPROBS = 20
"""Log-probabilities per position that the reference engine returns: vLLM's default limit."""

_ENDING_TOKENS = 16
"""Tokens that follow a shared prefix."""

_CLOSE_NATS = math.log(100)
"""Largest gap of two tokens that noise is measured on; further apart, nothing ties."""

_READ_TOKENS = 1024
"""Longest prompt and answer that are read again: the log-probabilities of all its positions are in memory at once."""

_PREEMPTION_BATCH = 16
"""Largest number of concurrent requests in the preemption scenario; the KV cache is sized to overflow with them."""


class PrefixSettings(BaseModel):
    """The scenario of shared prefixes: requests that begin with the same tokens, each sent twice."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    requests: int = Field(ge=2)
    tokens: int = Field(ge=1)


class MixedSettings(BaseModel):
    """The scenario of mixed requests: their number, and the inclusive ranges that lengths are drawn from."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    requests: int = Field(ge=1)
    prompt_tokens: tuple[int, int]
    output_tokens: tuple[int, int]


class EngineSettings(Settings):
    """Section engine of eval/gates/<name>.yaml; tinyworld.yaml explains each field."""

    folder: ClassVar[str] = "gates"
    section: ClassVar[str] = "engine"

    text: str
    seed: int
    noise_factor: float = Field(ge=1)
    draft_tokens: int = Field(ge=1)
    concurrency: int = Field(ge=2)
    kv_cache_dtypes: list[str]
    crossed: list[list[Mode]]
    prompt_tokens: list[int] = Field(min_length=2)
    output_tokens: int = Field(ge=4)
    prefix: PrefixSettings
    mixed: MixedSettings
    timeout_s: float = Field(gt=0)


@dataclass(frozen=True)
class Request:
    """A prompt, and the exact number of tokens to generate."""

    prompt: Tokens
    output_tokens: int


@dataclass(frozen=True)
class Answer:
    """An engine's continuation of a request.

    Attributes:
        log_probabilities: natural logarithms for the likeliest tokens, by position; empty unless requested.
        abort_count: number of times the request was aborted and sent again.
    """

    tokens: Tokens
    log_probabilities: tuple[Mapping[int, float], ...]
    abort_count: int


@dataclass(frozen=True)
class TieNoise:
    """How far the log-probability gap of the reference engine's two likeliest tokens moves without any change.

    An engine computes a token step by step, several drafted tokens at once, or as part of a prompt that it reads again;
    it rounds differently each time. The reference engine reads its own answers as prompts, which shows how much that
    is for these weights on this machine. Compiled graphs and drafts move the gaps about as far (weights/tiny on AMX:
    root mean square 0.027 nats read again, 0.031 compiled, 0.027 with drafts and four at a time; all at most 0.19).

    Attributes:
        largest_nats: largest shift.
        positions: tokens of the answers at which two tokens were close enough to be compared.
    """

    largest_nats: float
    positions: int

    def near_tie_nats(self, factor: float) -> float:
        """Gap below which either token is correct: a multiple of the largest shift."""
        return factor * self.largest_nats


@dataclass(frozen=True)
class Reply:
    """The answer of one combination to request `number` of a group, in one scenario."""

    scenario: str
    group: str
    number: int
    tokens: Tokens


@dataclass(frozen=True)
class Run:
    """The answers of one combination of modes, and its engine's counters.

    Attributes:
        drafts: tokens drafted by MTP.
        prefix_hits: prompt tokens found in the prefix cache.
        preemptions: requests preempted because the small KV cache was full; None with one request at a time.
        aborted: requests aborted while they were answered.
        notes: scenarios that had no effect or could not run, with the reason.
    """

    replies: list[Reply]
    drafts: int
    accepted_drafts: int
    prefix_hits: int
    preemptions: int | None
    aborted: int
    notes: list[str]


def replay(
    llm: Any,
    requests: Sequence[Request],
    *,
    log_probabilities: bool = False,
    arrivals: Sequence[int] | None = None,
    abort_after: Mapping[int, int] | None = None,
    after_step: Callable[[], None] = lambda: None,
) -> list[Answer]:
    """Have an engine answer requests greedily, step by step.

    Args:
        log_probabilities: whether answers carry the log-probabilities of the likeliest tokens.
        arrivals: number of the step before which each request arrives; by default all arrive before the first.
        abort_after: request number -> generated tokens after which it is aborted and sent again; 0 aborts it while its
            prompt waits or is being computed.
        after_step: called after each engine step.

    Returns:
        One answer per request; for an aborted one, the answer to its second attempt.
    """
    from vllm import SamplingParams

    core = llm.llm_engine
    arrivals = arrivals or [0] * len(requests)
    waiting = sorted(range(len(requests)), key=arrivals.__getitem__)
    pending_aborts = dict(abort_after or {})
    output_counts = dict.fromkeys(range(len(requests)), 0)
    attempts = dict.fromkeys(range(len(requests)), 0)
    running: dict[str, int] = {}
    request_ids = map(str, itertools.count())
    answers: dict[int, Answer] = {}

    def send(number: int) -> None:
        request_id = next(request_ids)
        sampling = SamplingParams(
            max_tokens=requests[number].output_tokens,
            temperature=0.0,
            ignore_eos=True,
            detokenize=False,
            logprobs=_TOP_LOGPROBS if log_probabilities else None,
        )
        core.add_request(request_id, {"prompt_token_ids": list(requests[number].prompt)}, sampling)
        running[request_id] = number
        attempts[number] += 1

    step = 0
    while waiting or core.has_unfinished_requests():
        while waiting and (arrivals[waiting[0]] <= step or not core.has_unfinished_requests()):
            send(waiting.pop(0))
        for output in core.step():
            if output.request_id not in running:
                continue  # the last output of an aborted request
            number, completion = running[output.request_id], output.outputs[0]
            output_counts[number] = len(completion.token_ids)
            if output.finished:
                del running[output.request_id]
                log_ps = tuple(
                    {token: entry.logprob for token, entry in position.items()}
                    for position in completion.logprobs or ()
                )
                answers[number] = Answer(tuple(completion.token_ids), log_ps, attempts[number] - 1)
        for request_id, number in list(running.items()):
            if number in pending_aborts and output_counts[number] >= pending_aborts[number]:
                del pending_aborts[number], running[request_id]
                core.abort_request([request_id])
                send(number)
        after_step()
        step += 1
    return [answers[number] for number in range(len(requests))]


def cut_requests(
    settings: EngineSettings,
    weights: Path,
    root: Path,
    *,
    context_len: int,
    max_batched_tokens: int,
    block_size: int,
    draft_tokens: int,
    concurrency: int,
) -> dict[str, list[Request]]:
    """Make the requests of all scenarios, by group.

    Args:
        max_batched_tokens: tokens that the engine computes per step; one prompt is longer where the context allows.
        block_size: tokens per block of the KV cache; prompts of the group growing end shortly before a block's end,
            shared prefixes are two blocks long or more where the context allows.

    Raises:
        EvalError: a request does not fit the context.
    """
    cutter = prompts.PromptCutter.for_checkpoint(weights, settings.text, settings.seed, root)

    def cut(length: int, output_tokens: int) -> Request:
        if length + output_tokens + draft_tokens > context_len:
            raise EvalError(
                f"a prompt of {length} tokens and {output_tokens} more do not fit into a context of {context_len}; "
                "shorten the prompts of engine in eval/gates/"
            )
        return Request(tuple(cutter.cut(1, length)[0]), output_tokens)

    lengths = list(settings.prompt_tokens)
    long_length = max_batched_tokens + 2 * block_size
    if long_length + settings.output_tokens + draft_tokens <= context_len:
        lengths.append(long_length)
    prefix_length = settings.prefix.tokens
    # With drafts vLLM leaves out the last block of a hit, so a prefix of one block never hits.
    if 2 * block_size + _ENDING_TOKENS + settings.output_tokens + draft_tokens <= context_len:
        prefix_length = max(prefix_length, 2 * block_size)
    prefix = cut(prefix_length, settings.output_tokens).prompt
    endings = [cut(_ENDING_TOKENS, settings.output_tokens).prompt for _ in range(settings.prefix.requests)]
    # Drafts of the first step must not reach the block's end: vLLM would admit fewer requests and preempt none.
    run_up = 2 * (draft_tokens + 1)
    rng = random.Random(settings.seed)
    return {
        "prompts": [cut(length, settings.output_tokens) for length in lengths],
        "prefixes": [Request(prefix + ending, settings.output_tokens) for ending in endings],
        "growing": [
            cut(max(8, block_size - run_up), 2 * run_up)
            for _ in range(min(concurrency, _PREEMPTION_BATCH) + 2)
        ],
        "mixed": [
            cut(rng.randint(*settings.mixed.prompt_tokens), rng.randint(*settings.mixed.output_tokens))
            for _ in range(settings.mixed.requests)
        ],
    }


def cache_block_size(llm: Any) -> int:
    """Tokens per block of a running engine's KV cache; a hybrid model's blocks are as large as its states."""
    return int(llm.llm_engine.vllm_config.cache_config.block_size)


def answer_singly(
    llm: Any, requests: Mapping[str, Sequence[Request]], progress: Progress
) -> dict[str, list[Answer]]:
    """Answer every request alone, with log-probabilities: answers by group, in the order of the requests."""
    total, done = sum(map(len, requests.values())), 0
    answers: dict[str, list[Answer]] = {}
    for group, group_requests in requests.items():
        answers[group] = []
        for request in group_requests:
            progress(f"answering {group}", done, total)
            answers[group] += replay(llm, [request], log_probabilities=True)
            done += 1
    progress("done", total, total)
    return answers


def measure_tie_noise(
    llm: Any,
    requests: Mapping[str, Sequence[Request]],
    answers: Mapping[str, Sequence[Answer]],
    progress: Progress,
) -> TieNoise:
    """Have the engine that gave the answers read them again, each as the end of a prompt.

    Args:
        answers: with log-probabilities, by group, in the order of the requests.

    Raises:
        EvalError: no answer is short enough, or nowhere are two tokens close.
    """
    from vllm import SamplingParams

    pairs = [
        pair
        for group, group_requests in requests.items()
        for pair in zip(group_requests, answers[group], strict=True)
        if len(pair[0].prompt) + len(pair[1].tokens) <= _READ_TOKENS
    ]
    sampling = SamplingParams(max_tokens=1, temperature=0.0, prompt_logprobs=_TOP_LOGPROBS, detokenize=False)
    shifts: list[float] = []
    for done, (request, answer) in enumerate(pairs):
        progress("reading answers again", done, len(pairs))
        # Without the last token: vLLM wants room for one more.
        prompt = {"prompt_token_ids": [*request.prompt, *answer.tokens[:-1]]}
        (output,) = llm.generate([prompt], sampling, use_tqdm=False)
        for before, position in zip(
            answer.log_probabilities[:-1], output.prompt_logprobs[len(request.prompt) :], strict=True
        ):
            first, second = sorted(before, key=lambda token: -before[token])[:2]
            gap = before[first] - before[second]
            if gap <= _CLOSE_NATS and first in position and second in position:
                shifts.append(abs(gap - (position[first].logprob - position[second].logprob)))
    if not shifts:
        raise EvalError(
            f"two likely tokens are nowhere close in {len(pairs)} answers, so the noise of a gap is unknown; ask for "
            "more or shorter answers in eval/gates/"
        )
    return TieNoise(max(shifts), len(shifts))


def play(
    weights: Path,
    _: Path,
    task: tuple[Modes, Mapping[str, Any], Mapping[str, list[Request]]],
    progress: Progress,
) -> Run:
    """Run all scenarios in one combination of modes; `Engines` calls it in a process of its own.

    The requests have the group mixed only where these are to be answered.
    """
    modes, flags, requests = task
    batched = modes.concurrency > 1
    total = 4 + 2 * batched + ("mixed" in requests)
    replies: list[Reply] = []
    notes: list[str] = []
    scenario_number = itertools.count()

    def play_scenario(llm: Any, scenario: str, group: str, **options: Any) -> list[Answer]:
        progress(scenario, next(scenario_number), total)
        answers = replay(llm, requests[group], **options)
        replies.extend(Reply(scenario, group, number, answer.tokens) for number, answer in enumerate(answers))
        return answers

    progress("starting", 0, total)
    with in_process.served_engine(weights, flags) as llm:
        play_scenario(llm, "greedy", "prompts")
        earlier_hits = in_process.counter(llm, "vllm:prefix_cache_hits")
        play_scenario(llm, "shared prefix", "prefixes")
        play_scenario(llm, "shared prefix again", "prefixes")
        prefix_hits = in_process.counter(llm, "vllm:prefix_cache_hits") - earlier_hits
        if modes.prefix_caching and not prefix_hits:
            notes.append("no prefix was found in the cache: prefixes are shorter than its blocks")
        # Every second request is aborted, alternately during its prompt and half way through its output.
        abort_after = {
            number: (number // 2 % 2) * request.output_tokens // 2
            for number, request in enumerate(requests["prompts"])
            if number % 2
        }
        answers = play_scenario(llm, "aborts", "prompts", abort_after=abort_after)
        aborted = sum(answer.abort_count for answer in answers)
        if "mixed" in requests:
            rng = random.Random(len(requests["mixed"]))
            arrivals = list(itertools.accumulate(rng.randint(0, 4) for _ in requests["mixed"]))
            play_scenario(llm, "mixed", "mixed", arrivals=arrivals)
        preemptions = None
        if batched:
            blocks_in_use = [0.0]
            cache = llm.llm_engine.vllm_config.cache_config

            def record_blocks_in_use() -> None:
                usage = in_process.counter(llm, "vllm:kv_cache_usage_perc")
                blocks_in_use.append(usage * (cache.num_gpu_blocks - 1))  # vLLM never uses one of the blocks

            play_scenario(llm, "together", "growing", after_step=record_blocks_in_use)
            # Fewer blocks than all requests need together at their longest, more than one request needs.
            missing_blocks = min(modes.concurrency, _PREEMPTION_BATCH) - 1
            earlier_preemptions = in_process.counter(llm, "vllm:num_preemptions")
            with _small_cache(llm, round(max(blocks_in_use)) - missing_blocks):
                play_scenario(llm, "preemption", "growing")
            preemptions = in_process.counter(llm, "vllm:num_preemptions") - earlier_preemptions
            if not preemptions:
                notes.append("nothing was preempted, although the KV cache was small")
        drafts = in_process.counter(llm, "vllm:spec_decode_num_draft_tokens")
        accepted = in_process.counter(llm, "vllm:spec_decode_num_accepted_tokens")
    if modes.draft_tokens and not accepted:
        notes.append("no draft was accepted: MTP had no effect")
    progress("done", total, total)
    return Run(replies, drafts, accepted, prefix_hits, preemptions, aborted, notes)


@contextlib.contextmanager
def _small_cache(llm: Any, free_blocks: int) -> Iterator[None]:
    """Leave an idle engine `free_blocks` of its KV cache; another start with a smaller cache would take longer."""
    llm.reset_prefix_cache()
    pool = llm.llm_engine.engine_core.engine_core.scheduler.kv_cache_manager.block_pool
    taken_blocks = pool.get_new_blocks(pool.get_num_free_blocks() - free_blocks)
    yield
    pool.free_blocks(taken_blocks)
