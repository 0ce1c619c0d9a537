"""What every combination of engine modes is asked, and how: the scenarios of `slimqwen.evaluation.engine_matrix`.

Every engine is vLLM without HTTP and with its scheduler in the same process (`slimqwen.serving.in_process`): the same
result every time, at the price that what only a server has, asynchronous scheduling above all, is not tried.
"""

import contextlib
import copy
import dataclasses
import itertools
import math
import os
import random
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field

from slimqwen.errors import SlimqwenError
from slimqwen.evaluation import plan_file, prompts
from slimqwen.progress import Progress
from slimqwen.serving import in_process
from slimqwen.serving import platform as machine
from slimqwen.serving.unsafe_engines import Modes

Mode = Literal["draft_tokens", "prefix_caching", "kv_cache_dtype", "chunked_prefill", "concurrency", "graphs"]

_LOGPROBS = 20
"""Likeliest tokens whose log-probabilities the plain engine tells: as many as vLLM gives unless told."""

_CROWD = 16
"""Requests at a time in the scenario of preemption, at most: what they overflow is made to fit them."""

Tokens = tuple[int, ...]


class EngineMatrixError(SlimqwenError):
    """No matrix can be made: the plan is unusable, the plain engine fails, or a worker is killed from outside."""


class Prefix(BaseModel):
    """The scenario of repeated prefixes: requests that share their first tokens, all asked twice."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    requests: int = Field(ge=2)
    tokens: int = Field(ge=1)


class Mixed(BaseModel):
    """The scenario of mixed requests: how many, and the ranges that lengths are drawn from, both ends included."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    requests: int = Field(ge=1)
    prompt_tokens: tuple[int, int]
    output_tokens: tuple[int, int]


class Plan(BaseModel):
    """eval/engine/<name>.yaml.

    Attributes:
        text: what prompts are cut from: tinyworld, or a text file relative to the repository.
        seed: of the text, of lengths and of arrivals.
        near_tie_nats: gap of the plain engine's log-probabilities below which either token is right.
        draft_tokens: K of MTP for a variant that is served without.
        concurrency: requests at a time for a variant that is served one at a time.
        kv_cache_dtypes: tried beside the variant's own.
        crossed: groups of modes; the values of a group are crossed fully, the other modes are as served.
        prompt_tokens: length of each prompt.
        output_tokens: tokens that each is continued by.
        timeout_s: seconds that one combination may take.
    """

    model_config = ConfigDict(extra="forbid", frozen=True)

    text: str
    seed: int
    near_tie_nats: float = Field(gt=0)
    draft_tokens: int = Field(ge=1)
    concurrency: int = Field(ge=2)
    kv_cache_dtypes: list[str]
    crossed: list[list[Mode]]
    prompt_tokens: list[int] = Field(min_length=2)
    output_tokens: int = Field(ge=4)
    prefix: Prefix
    mixed: Mixed
    timeout_s: float = Field(gt=0)


@dataclass(frozen=True)
class Request:
    """A prompt, and how many tokens to continue it by, whatever they are."""

    prompt: Tokens
    output_tokens: int


@dataclass(frozen=True)
class Answer:
    """What an engine says.

    Attributes:
        log_probabilities: of the likeliest tokens in each token's place, where they were asked for.
        aborted: how often it was ended and asked anew before.
    """

    tokens: Tokens
    log_probabilities: tuple[Mapping[int, float], ...]
    aborted: int


@dataclass(frozen=True)
class Reply:
    """An answer of a combination: to which request of which group, in which scenario."""

    scenario: str
    group: str
    number: int
    tokens: Tokens


@dataclass(frozen=True)
class Run:
    """What a combination of modes answered, and what its engine's counters say of it.

    Attributes:
        drafts: tokens drafted by MTP.
        accepted_drafts: those of them that stayed.
        prefix_hits: prompt tokens found in the prefix cache.
        preemptions: requests put off because the small KV cache was full; None where one request runs at a time.
        aborted: requests ended in mid-stream.
        notes: what could not be tried, and why.
    """

    replies: list[Reply]
    drafts: int
    accepted_drafts: int
    prefix_hits: int
    preemptions: int | None
    aborted: int
    notes: list[str]


def load_plan(name: str, root: Path) -> Plan:
    """Read eval/engine/<name>.yaml.

    Raises:
        EngineMatrixError: no such file, or a field is missing or wrong.
    """
    return plan_file.read("engine", name, root, Plan, EngineMatrixError, "write modes and requests there")


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
        llm: of `in_process.engine`.
        requests: what it is asked.
        log_probabilities: of the likeliest tokens too; without, the answers have none.
        arrivals: the step before which each request comes; all before the first by default.
        abort_after: request -> tokens after which it is aborted and asked anew; 0 ends it while its prompt waits or is
            being read.
        after_step: called after each step.

    Returns:
        one answer a request; of an aborted one, the answer to its being asked anew.
    """
    from vllm import SamplingParams

    core = llm.llm_engine
    coming = sorted(range(len(requests)), key=lambda number: arrivals[number] if arrivals else 0)
    aborting = dict(abort_after or {})
    produced = dict.fromkeys(range(len(requests)), 0)
    running: dict[str, int] = {}
    names = itertools.count()
    asked = dict.fromkeys(range(len(requests)), 0)
    answers: dict[int, Answer] = {}

    def ask(number: int) -> None:
        name = str(next(names))
        settings = SamplingParams(
            max_tokens=requests[number].output_tokens,
            temperature=0.0,
            ignore_eos=True,
            detokenize=False,
            logprobs=_LOGPROBS if log_probabilities else None,
        )
        core.add_request(name, {"prompt_token_ids": list(requests[number].prompt)}, settings)
        running[name] = number
        asked[number] += 1

    step = 0
    while coming or core.has_unfinished_requests():
        while coming and (
            arrivals is None or arrivals[coming[0]] <= step or not core.has_unfinished_requests()
        ):
            ask(coming.pop(0))
        for output in core.step():
            if output.request_id not in running:
                continue  # the end of an aborted one
            number, said = running[output.request_id], output.outputs[0]
            produced[number] = len(said.token_ids)
            if output.finished:
                answers[number] = Answer(
                    tuple(said.token_ids),
                    tuple(
                        {token: one.logprob for token, one in each.items()} for each in said.logprobs or ()
                    ),
                    asked[number] - 1,
                )
        for name, number in list(running.items()):
            if number in aborting and number not in answers and produced[number] >= aborting[number]:
                del aborting[number], running[name]
                core.abort_request([name])
                ask(number)
        after_step()
        step += 1
    return [answers[number] for number in range(len(requests))]


def arguments(flags: Mapping[str, Any]) -> dict[str, Any]:
    """Flags as arguments of vLLM's engine: what only its HTTP server has is left out."""
    from vllm.engine.arg_utils import EngineArgs

    known = {field.name for field in dataclasses.fields(EngineArgs)} - {"model"}
    # vLLM writes into the dictionaries that it is given.
    named = {name.replace("-", "_"): copy.deepcopy(value) for name, value in flags.items()}
    return {
        "dtype": "auto",
        "enforce_eager": False,
        **{name: value for name, value in named.items() if name in known},
        "disable_log_stats": False,  # the counters
    }


def engine(weights: Path, flags: Mapping[str, Any], **instead: Any) -> contextlib.AbstractContextManager[Any]:
    """A `vllm.LLM` by the flags of a server; `instead` are arguments of it that replace them."""
    chosen = arguments(flags)
    space_gib = os.environ.get("VLLM_CPU_KVCACHE_SPACE")
    if space_gib is not None and machine.detect() == "cpu":
        chosen["kv_cache_memory_bytes"] = int(float(space_gib) * 2**30)
    return in_process.engine(weights, **{**chosen, **instead})


def cut_requests(
    plan: Plan,
    weights: Path,
    root: Path,
    *,
    context: int,
    budget: int,
    block: int,
    draft_tokens: int,
    concurrency: int,
) -> dict[str, list[Request]]:
    """What is asked, by group; all lengths are in tokens.

    Args:
        plan: lengths and text.
        weights: the checkpoint, for its tokenizer.
        root: what the plan's text is relative to.
        context: that the engine has.
        budget: what the engine computes in a step; one prompt is longer, where the context allows.
        block: of the KV cache; prompts of the group growing end shortly before the end of one.
        draft_tokens: K of the combinations with MTP.
        concurrency: requests at a time of the combinations with several.

    Raises:
        EngineMatrixError: the prompts do not fit the context.
    """
    from tokenizers import Tokenizer

    tokenizer = Tokenizer.from_file(str(weights / "tokenizer.json"))
    cutter = prompts.PromptCutter(
        prompts.documents(plan.text, plan.seed, root),
        lambda text: list(tokenizer.encode(text, add_special_tokens=False).ids),
    )

    def cut(length: int, output_tokens: int) -> Request:
        if length + output_tokens + draft_tokens > context:
            raise EngineMatrixError(
                f"a prompt of {length} tokens and {output_tokens} more do not fit into a context of {context}; "
                "write shorter ones into the plan in eval/engine/"
            )
        return Request(tuple(cutter.cut(1, length)[0]), output_tokens)

    lengths = list(plan.prompt_tokens)
    longer = budget + 2 * block
    if longer + plan.output_tokens + draft_tokens <= context:
        lengths.append(longer)
    shared = cut(plan.prefix.tokens, plan.output_tokens).prompt
    endings = [cut(16, plan.output_tokens).prompt for _ in range(plan.prefix.requests)]
    # Far enough from the end that the first step's drafts do not reach it: else fewer are let in and none is put off.
    run_up = 2 * (draft_tokens + 1)
    chance = random.Random(plan.seed)
    return {
        "prompts": [cut(length, plan.output_tokens) for length in lengths],
        "prefixes": [Request(shared + ending, plan.output_tokens) for ending in endings],
        "growing": [cut(max(8, block - run_up), 2 * run_up) for _ in range(min(concurrency, _CROWD) + 2)],
        "mixed": [
            cut(chance.randint(*plan.mixed.prompt_tokens), chance.randint(*plan.mixed.output_tokens))
            for _ in range(plan.mixed.requests)
        ],
    }


def block_tokens(llm: Any) -> int:
    """Tokens of a block of an engine's KV cache; known once it runs: a hybrid model's are as large as its states."""
    return int(llm.llm_engine.vllm_config.cache_config.block_size)


def play(
    weights: Path,
    _: Path,
    task: tuple[Modes, Mapping[str, Any], Mapping[str, list[Request]]],
    progress: Progress,
) -> Run:
    """Every scenario in one combination of modes; called by `slimqwen.recipe.worker` in a process of its own.

    Args:
        weights: the checkpoint.
        task: the modes, vLLM's flags for them, and the requests by group; mixed ones may be left out.
        progress: hears the scenarios done.
    """
    modes, flags, requests = task
    several = modes.concurrency > 1
    total = 4 + 2 * several + ("mixed" in requests)
    replies: list[Reply] = []
    notes: list[str] = []
    number = itertools.count()

    def scenario(llm: Any, name: str, group: str, **how: Any) -> list[Answer]:
        progress(name, next(number), total)
        answers = replay(llm, requests[group], **how)
        replies.extend(Reply(name, group, place, answer.tokens) for place, answer in enumerate(answers))
        return answers

    progress("starting", 0, total)
    with engine(weights, flags) as llm:
        scenario(llm, "greedy", "prompts")
        before = in_process.counter(llm, "vllm:prefix_cache_hits")
        scenario(llm, "shared prefix", "prefixes")
        scenario(llm, "shared prefix again", "prefixes")
        hits = in_process.counter(llm, "vllm:prefix_cache_hits") - before
        if modes.prefix_caching and not hits:
            notes.append("no prefix was found in the cache: too short for its blocks")
        # Every second one, by turns while its prompt is read and half way through its output.
        ends = {
            place: (place // 2 % 2) * request.output_tokens // 2
            for place, request in enumerate(requests["prompts"])
            if place % 2
        }
        aborted = sum(answer.aborted for answer in scenario(llm, "aborts", "prompts", abort_after=ends))
        if "mixed" in requests:
            chance = random.Random(len(requests["mixed"]))
            arrivals = list(itertools.accumulate(chance.randint(0, 4) for _ in requests["mixed"]))
            scenario(llm, "mixed", "mixed", arrivals=arrivals)
        in_use = [0.0]
        if several:
            cache = llm.llm_engine.vllm_config.cache_config

            def watch() -> None:
                # One block is never used.
                used = in_process.counter(llm, "vllm:kv_cache_usage_perc") * (cache.num_gpu_blocks - 1)
                in_use.append(used)

            scenario(llm, "together", "growing", after_step=watch)
            block = block_tokens(llm)
        drafts = in_process.counter(llm, "vllm:spec_decode_num_draft_tokens")
        accepted = in_process.counter(llm, "vllm:spec_decode_num_accepted_tokens")
    if modes.draft_tokens and not accepted:
        notes.append("no draft was accepted: MTP had no say")
    preemptions = None
    if several:
        # Less than all need together at their longest, more than one needs.
        lacking = min(modes.concurrency, _CROWD) - 1
        longest = max(len(one.prompt) + one.output_tokens for one in requests["growing"])
        small = {
            "num_gpu_blocks_override": 1 + round(max(in_use)) - lacking,
            "max_model_len": block * math.ceil((longest + modes.draft_tokens + 1) / block),
        }
        with contextlib.ExitStack() as stack:
            try:
                llm = stack.enter_context(engine(weights, flags, **small))
            except ValueError as error:
                notes.append(f"preemption was not tried: {' '.join(str(error).split())[:200]}")
            else:
                scenario(llm, "preemption", "growing")
                preemptions = in_process.counter(llm, "vllm:num_preemptions")
                if not preemptions:
                    notes.append("nothing was preempted, although the KV cache was small")
    progress("done", total, total)
    return Run(replies, drafts, accepted, hits, preemptions, aborted, notes)
