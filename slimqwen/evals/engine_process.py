"""Code that runs in the process of one engine of the engine check: generates responses, measures rounding noise.

Each engine is vLLM without HTTP, with its scheduler in the same process (`slimqwen.serving.in_process`), so that every
run gives the same tokens. Features that only a server has, such as asynchronous scheduling, are not covered.
`slimqwen.evals.engine` starts the processes and compares the responses.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar, Literal

from pydantic import Field

from slimqwen.evals import EvalError
from slimqwen.progress import Progress, silent
from slimqwen.records.settings import Settings
from slimqwen.serving import in_process
from slimqwen.text import prompts
from slimqwen.text.corpus import resolve_text
from slimqwen.text.files import CorpusError
from slimqwen.yaml_file import YamlPart

Tokens = tuple[int, ...]

Way = Literal["alone", "cached", "together", "joining", "session", "burst"]
"""How a prompt is sent: `alone`, with an empty prefix cache; `cached`, again, with its prefix in the cache; `together`
with all other prompts; `joining`, while the response to another is generated; as a turn of a `session`, beside or after
other sessions; in a `burst` of the shortest prompts, between two turns. An engine may support fewer ways."""

_TOP_LOGPROBS = 20
"""Log-probabilities per position that the reference engine returns: vLLM's default limit."""

_CLOSE_NATS = math.log(100)
"""Largest log-probability gap of two tokens at which noise is measured; tokens further apart never tie."""

_REREAD_TOKENS = 1024
"""Most tokens of prompt and response that are reread: log-probabilities of all positions are in memory at once."""

_REREAD_RESPONSES = 48

SHORTEST = range(1, 17)
"""Shortest prompt lengths, always among the lengths: with any block size some responses are short enough to reread."""


class EngineSettings(Settings):
    """Section engine of eval/gates/<name>.yaml.

    Attributes:
        text: text whose first tokens are the prompts: name of a text in eval/texts, or a path relative to the
            repository.
        seed: seed of the first document.
        noise_factor: largest gap of a near tie, as a multiple of the rounding noise that the same run measures.
        draft_tokens: K of the engine with drafts, for a variant that is served without.
        concurrency: least number of requests at a time of the neighbours; also the number of concurrent sessions.
        lengths: number of consecutive prompt lengths.
        output_tokens: length of a response, tokens.
        timeout_s: time limit of one engine, seconds; one that exceeds it counts as broken down.
    """

    folder: ClassVar[str] = "gates"
    section: ClassVar[str] = "engine"
    own_file: ClassVar[str] = "gate"

    text: str
    seed: int
    noise_factor: float = Field(ge=1)
    draft_tokens: int = Field(ge=1)
    concurrency: int = Field(ge=2)
    lengths: int = Field(ge=1)
    output_tokens: int = Field(ge=2)
    timeout_s: float = Field(gt=0)

    def inputs(self, root: Path) -> Sequence[Path | YamlPart]:
        """Files that the check reads: the YAML files of the settings, and the text."""
        return [*super().inputs(root), resolve_text(self.text, root)]


@dataclass(frozen=True)
class Request:
    """A prompt, and the exact number of tokens to generate."""

    prompt: Tokens
    output_tokens: int


@dataclass(frozen=True)
class Response:
    """The greedy continuation of a prompt.

    Attributes:
        log_probabilities: for each position, natural log-probabilities of the likeliest tokens, by token id; empty
            unless requested.
        cached_tokens: tokens of the prompt that were found in the prefix cache.
    """

    tokens: Tokens
    log_probabilities: tuple[Mapping[int, float], ...]
    cached_tokens: int = 0


@dataclass(frozen=True)
class EngineRun:
    """The responses of one engine, and its counters.

    Attributes:
        requests: prompts of all lengths.
        responses: way of sending, request, and token ids of the response; the prompt of a session's turn contains the
            earlier responses.
        prefix_caching: whether the engine has a prefix cache.
        sequences: most requests that the engine runs at a time.
        cached_tokens: prompt tokens found in the prefix cache.
        accepted_drafts: tokens drafted by MTP that the model accepted.
        cold_turns: prompt lengths of turns that found nothing of their session in the prefix cache, without the first
            and the last turn, whose prompts of all sessions together may not fit into the cache.
    """

    requests: list[Request]
    responses: Sequence[tuple[Way, Request, Tokens]]
    prefix_caching: bool
    sequences: int
    cached_tokens: int
    accepted_drafts: int
    cold_turns: Sequence[int] = ()


def choose_lengths(
    settings: EngineSettings, *, block_size: int, token_budget: int, context_len: int
) -> list[int]:
    """Choose prompt lengths in tokens: the shortest, consecutive ones, around the token budget, at the context's end.

    A hybrid model saves its recurrent state only at the ends of blocks, so a fault in copying it breaks one length in
    every block or in 128; a handful of lengths would miss it. The consecutive lengths begin at two blocks, because with
    drafts vLLM does not reuse the last block of a prefix hit.

    Args:
        block_size: tokens in a block of the KV cache.
        token_budget: most tokens that one engine step computes; longer prompts are computed in chunks.
        context_len: most tokens of prompt and response together.
    """
    first = max(1, min(2 * block_size - 1, context_len - settings.lengths))
    around_budget = range(token_budget - 1, token_budget + 2)
    at_end = (context_len - settings.output_tokens, context_len - 1)
    lengths = {*SHORTEST, *range(first, first + settings.lengths), *around_budget, *at_end}
    return sorted(length for length in lengths if 0 < length < context_len)


def cut_requests(
    settings: EngineSettings, weights: Path, root: Path, lengths: Sequence[int], context_len: int
) -> list[Request]:
    """Make a request for each prompt length from the first tokens of one text.

    Each asks for `output_tokens`, or as many as the context allows. A text shorter than the longest prompt is repeated:
    prompts need not make sense to show whether two engines agree.

    Args:
        settings: text, seed, and length of a response.
        weights: folder of the checkpoint, whose tokenizer is used.
        root: folder that the text's path is relative to.
        lengths: prompt lengths, tokens.
        context_len: most tokens of prompt and response together.

    Raises:
        CorpusError: the text is missing, malformed or empty.
    """
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(weights, local_files_only=True)
    longest = max(lengths)
    text: list[int] = []
    for document in prompts.documents(settings.text, settings.seed, root):
        text += tokenizer(f"{document}\n", add_special_tokens=False)["input_ids"]
        if len(text) >= longest:
            break
    if not text:
        raise CorpusError(f"{settings.text} has no text to cut prompts from; add documents to it")
    repeated = tuple(text * -(-longest // len(text)))
    return [
        Request(repeated[:length], min(settings.output_tokens, context_len - length)) for length in lengths
    ]


def generate_responses(
    llm: Any, requests: Sequence[Request], *, log_probabilities: bool = False
) -> list[Response]:
    """Send requests to an engine at once, and return its greedy responses in their order.

    Args:
        log_probabilities: whether responses carry the log-probabilities of the likeliest tokens.
    """
    sampling = [_greedy(request, _TOP_LOGPROBS if log_probabilities else None) for request in requests]
    outputs = llm.generate(
        [{"prompt_token_ids": list(request.prompt)} for request in requests], sampling, use_tqdm=False
    )
    return [
        Response(
            tuple(output.outputs[0].token_ids),
            tuple(
                {token: entry.logprob for token, entry in position.items()}
                for position in output.outputs[0].logprobs or ()
            ),
            output.num_cached_tokens or 0,
        )
        for output in outputs
    ]


def _greedy(request: Request, log_probabilities: int | None = None) -> Any:
    """Sampling parameters of a request for the likeliest tokens, exactly as many as it wants."""
    from vllm import SamplingParams

    return SamplingParams(
        max_tokens=request.output_tokens,
        temperature=0.0,
        ignore_eos=True,
        detokenize=False,
        logprobs=log_probabilities,
    )


def run_reference(
    weights: Path,
    task: tuple[Mapping[str, Any], Sequence[Request]],
    progress: Progress,
) -> tuple[list[Response], float]:
    """Respond to each request with the reference engine.

    Args:
        task: flags of the engine, and the requests.
        progress: receives (activity, done, total) in requests.

    Returns:
        Responses with log-probabilities in the order of the requests, and the engine's rounding noise in nats.

    Raises:
        EvalError: the rounding noise cannot be measured on these responses (`measure_tie_noise`).
    """
    flags, requests = task
    progress("starting", 0, 0)
    with in_process.served_engine(weights, flags) as llm:
        responses = []
        for done, request in enumerate(requests):
            progress("responding", done, len(requests))
            responses += generate_responses(llm, [request], log_probabilities=True)
        noise = measure_tie_noise(llm, requests[:_REREAD_RESPONSES], responses[:_REREAD_RESPONSES], progress)
    return responses, noise


def run_engine(
    weights: Path,
    task: tuple[EngineSettings, Mapping[str, Any], Sequence[Way], list[Request] | None, Path],
    progress: Progress,
) -> EngineRun:
    """Start an engine and respond to prompts in each of the given ways that the engine supports.

    Args:
        task: settings, flags of the engine, ways of sending prompts, requests (None to choose them), and the
            repository.
        progress: receives (activity, done, total) in requests.
    """
    settings, flags, ways, requests, root = task
    progress("starting", 0, 0)
    with in_process.served_engine(weights, flags) as llm:
        config = llm.llm_engine.vllm_config
        context_len = config.model_config.max_model_len
        if requests is None:
            lengths = choose_lengths(
                settings,
                block_size=config.cache_config.block_size,
                token_budget=config.scheduler_config.max_num_batched_tokens,
                context_len=context_len,
            )
            requests = cut_requests(settings, weights, root, lengths, context_len)
        responses = _respond(llm, requests, ways, progress)
        cold_turns: Sequence[int] = ()
        if config.cache_config.enable_prefix_caching and "session" in ways:
            lengths = choose_turns(
                settings.output_tokens, block_size=config.cache_config.block_size, context_len=context_len
            )
            llm.reset_prefix_cache()
            in_sessions, cold_turns = _respond_in_sessions(llm, requests, settings, lengths, progress)
            responses |= in_sessions
            if not llm.reset_prefix_cache():
                raise RuntimeError("blocks of the KV cache are still in use after the last response")
        return EngineRun(
            requests=requests,
            responses=[(way, request, tokens) for (way, request), tokens in responses.items()],
            prefix_caching=bool(config.cache_config.enable_prefix_caching),
            sequences=config.scheduler_config.max_num_seqs,
            cached_tokens=in_process.counter(llm, "vllm:prefix_cache_hits"),
            accepted_drafts=in_process.counter(llm, "vllm:spec_decode_num_accepted_tokens"),
            cold_turns=cold_turns,
        )


def _respond(
    llm: Any, requests: Sequence[Request], ways: Sequence[Way], progress: Progress
) -> dict[tuple[Way, Request], Tokens]:
    config = llm.llm_engine.vllm_config
    responses: dict[tuple[Way, Request], Tokens] = {}
    for done, request in enumerate(requests if "alone" in ways else ()):
        progress("alone", done, len(requests))
        llm.reset_prefix_cache()
        responses["alone", request] = generate_responses(llm, [request])[0].tokens
        if config.cache_config.enable_prefix_caching and "cached" in ways:
            responses["cached", request] = generate_responses(llm, [request])[0].tokens
    several = config.scheduler_config.max_num_seqs > 1
    if several and "together" in ways:
        progress("together", 0, 1)
        llm.reset_prefix_cache()
        # The shortest prompts come last, to join running requests.
        last_first = requests[::-1]
        for request, response in zip(last_first, generate_responses(llm, last_first), strict=True):
            responses["together", request] = response.tokens
    if several and "joining" in ways:
        progress("joining", 0, 1)
        llm.reset_prefix_cache()
        responses["joining", requests[0]] = _respond_beside(llm, requests[: len(SHORTEST)][-1], requests[0])
    return responses


def _respond_beside(llm: Any, running: Request, joining: Request) -> Tokens:
    """Respond to a prompt that arrives alone, after the first token of the response to `running`.

    Beside drafts vLLM schedules a prompt of one token differently, if no other prompt arrives in the same step: it pads
    it with drafts (`patches/faults/padded_prompts`).
    """
    engine = llm.llm_engine
    engine.add_request("running", {"prompt_token_ids": list(running.prompt)}, _greedy(running))
    while not engine.step():
        pass
    engine.add_request("joining", {"prompt_token_ids": list(joining.prompt)}, _greedy(joining))
    tokens: dict[str, Tokens] = {}
    while engine.has_unfinished_requests():
        tokens |= {output.request_id: tuple(output.outputs[0].token_ids) for output in engine.step()}
    return tokens["joining"]


def choose_turns(output_tokens: int, *, block_size: int, context_len: int) -> list[int]:
    """Choose the prompt lengths of a session's turns, tokens: from just beyond two blocks to the context's end.

    A hybrid model's state is kept at the last block end of a prompt, with drafts at the one before. The second turn
    adds little text after it, because much new text hides another session's state: the response often has the right
    tokens in spite of it. The response to the third turn crosses a block end.
    """
    start, end, last = 2 * block_size + 1, 3 * block_size, context_len - output_tokens
    turns = (start, start + output_tokens * 3 // 2, end - output_tokens // 2, end + output_tokens)
    return [*(length for length in turns if 0 < length < last), last]


def _respond_in_sessions(
    llm: Any,
    requests: Sequence[Request],
    settings: EngineSettings,
    lengths: Sequence[int],
    progress: Progress,
) -> tuple[dict[tuple[Way, Request], Tokens], list[int]]:
    """Respond to the turns of sessions: each prompt is the previous prompt, its response and new text.

    The sessions have their first turn one after the other, the second at once, and so on. Between two turns come a
    burst of the shortest prompts, and a client that leaves in the middle of its response: what they write into freed
    blocks and slots must not reach a session.

    Args:
        requests: in the order of their lengths. The last has the text of the sessions: each starts at another token of
            it and continues from the first.
        lengths: prompt lengths of the turns, tokens.

    Returns:
        Tokens by way and request, and the lengths of the cold turns (see `EngineRun`).
    """
    text, burst = requests[-1].prompt, requests[: len(SHORTEST)]
    starts = [number * len(text) // settings.concurrency for number in range(settings.concurrency)]
    contexts = [text[start:] + text[:start] for start in starts]
    responses: dict[tuple[Way, Request], Tokens] = {}
    cold: list[int] = []
    for turn, length in enumerate(lengths):
        progress("session", turn, len(lengths))
        prompts = [Request(context[:length], settings.output_tokens) for context in contexts]
        at_once = generate_responses(llm, prompts) if turn % 2 else []
        made = at_once or [generate_responses(llm, [prompt])[0] for prompt in prompts]
        for number, (prompt, response) in enumerate(zip(prompts, made, strict=True)):
            responses["session", prompt] = response.tokens
            after = length + len(response.tokens)
            contexts[number] = prompt.prompt + response.tokens + contexts[number][after:]
        if 0 < turn < len(lengths) - 1:
            cold += [length for response in made if not response.cached_tokens]
        if turn < len(lengths) - 1:
            _abandon(llm, prompts[0])
            for prompt, response in zip(burst, generate_responses(llm, burst), strict=True):
                responses["burst", prompt] = response.tokens
    return responses, cold


def _abandon(llm: Any, request: Request) -> None:
    """Send a prompt, and leave after the first token of its response."""
    engine = llm.llm_engine
    engine.add_request("abandoned", {"prompt_token_ids": list(request.prompt)}, _greedy(request))
    while not engine.step():
        pass
    engine.abort_request(["abandoned"])


def measure_tie_noise(
    llm: Any, requests: Sequence[Request], responses: Sequence[Response], progress: Progress = silent
) -> float:
    """Measure rounding noise: how far the gap of the two likeliest tokens moves if a response is reread as a prompt.

    An engine rounds differently when it computes tokens one by one, several drafted tokens at once, or a whole prompt.
    Compiled graphs and drafts move the gap about as far as rereading (weights/tiny on AMX: root mean square 0.027 nats
    reread, 0.031 compiled, 0.027 with drafts and four requests at a time; all at most 0.19).

    Args:
        responses: with log-probabilities, in the order of `requests`.

    Returns:
        The largest shift of a log-probability gap, nats.

    Raises:
        EvalError: no response is short enough to reread, or at no position are the two likeliest tokens within a factor
            of 100.
    """
    from vllm import SamplingParams

    pairs = [
        pair
        for pair in zip(requests, responses, strict=True)
        if len(pair[0].prompt) + len(pair[1].tokens) <= _REREAD_TOKENS
    ]
    sampling = SamplingParams(max_tokens=1, temperature=0.0, prompt_logprobs=_TOP_LOGPROBS, detokenize=False)
    shifts: list[float] = []
    for done, (request, response) in enumerate(pairs):
        progress("rereading responses", done, len(pairs))
        # Without the last token: vLLM wants room for one more.
        prompt = {"prompt_token_ids": [*request.prompt, *response.tokens[:-1]]}
        (output,) = llm.generate([prompt], sampling, use_tqdm=False)
        for before, position in zip(
            response.log_probabilities[:-1], output.prompt_logprobs[len(request.prompt) :], strict=True
        ):
            first, second = sorted(before, key=lambda token: -before[token])[:2]
            gap = before[first] - before[second]
            if gap <= _CLOSE_NATS and first in position and second in position:
                shifts.append(abs(gap - (position[first].logprob - position[second].logprob)))
    if not shifts:
        raise EvalError(
            f"in {len(pairs)} responses no two tokens are about as likely, so the rounding noise is unknown; raise "
            "`lengths` or lower `output_tokens` in the section engine of eval/gates/"
        )
    return max(shifts)
