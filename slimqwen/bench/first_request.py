"""TTFT of the first requests after readiness, relative to later requests on the same server.

Fresh servers take turns: the variant's own, which warms itself up, and bare vLLM, which is ready while cold. A third
one has prefix caching, a system prompt before every chat and no MTP: it shows whether the first chat finds the common
prefix of all chats in the cache. Every request has new text; one is in flight at a time.
"""

import itertools
import json
import re
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from statistics import median
from types import MappingProxyType
from typing import Any, Literal

from pydantic import Field

from slimqwen import host_load
from slimqwen.bench import BenchError, overlay
from slimqwen.bench.client import Prompt, StreamingClient
from slimqwen.bench.questions import KINDS, QUESTION_TOKENS, Kind, Questions
from slimqwen.host_load import HostLoad, Watch
from slimqwen.progress import Progress, silent
from slimqwen.records import provenance, store
from slimqwen.records.record import Block, Count, NonNegative, Positive, Ratio, Record
from slimqwen.records.table import Table
from slimqwen.serving.command import ServerCommand
from slimqwen.serving.server import free_port, run_server
from slimqwen.stats import intervals
from slimqwen.stats.verdict import Verdict
from slimqwen.variant import Variant

Server = Literal["warmed", "bare"]
SERVERS: tuple[Server, ...] = ("warmed", "bare")

LIMIT = 1.2
"""Largest TTFT of a first request that passes, relative to the median of later ones."""

ANSWER_TOKENS = 16
"""Length of an answer, tokens."""

STEADY_REQUESTS = 20
"""Later requests of each kind on each server."""

PREFIX_PAIRS = 10
"""Chats with the cached system prompt on each server, and as many with a new one."""

SYSTEM_PROMPT_TOKENS = 1024
"""Length of the system prompt, tokens; a quarter of the server's context if that is less."""

_OVERLAY: Mapping[str, str] = MappingProxyType(
    {
        "REQUIRE_WARMUP": "1",
        "REQUIRE_BAKED": "",
        "VLLM_ENABLE_PREFIX_CACHING": "1",
        "VLLM_SPECULATIVE_CONFIG": "",
        "VLLM_CUDAGRAPH_CAPTURE_SIZES": "",
    }
)
"""config.env lines that the server with the system prompt has instead of the variant's; an empty value unsets a key."""

_HITS = "vllm:prefix_cache_hits_total"
_PREFIX = re.compile(r"Chat prefix with thinking (?:on|off): (\d+) tokens.*")
_CACHED = re.compile(r"(\d+) in the prefix cache \(blocks of (\d+)\)")


class Answer(Block):
    """One streamed answer."""

    ttft_ms: NonNegative
    prompt_tokens: Positive
    cached_tokens: Count = Field(
        description="Tokens of the prompt in the prefix cache, by the server's counters."
    )


class Series(Block):
    """Requests of one kind on one server."""

    first: Answer
    steady: tuple[Answer, ...] = Field(min_length=20)

    @property
    def relative_ttft(self) -> float:
        """TTFT of the first request / median TTFT of the later ones."""
        return self.first.ttft_ms / _median(self.steady)


class ServerStart(Block):
    """Requests to one fresh server."""

    order: tuple[Kind, ...] = Field(description="Order of the kinds; the first was the very first request.")
    chat: Series
    completion: Series


class Servers(Block):
    """Starts of both servers, by round."""

    warmed: tuple[ServerStart, ...] = Field(min_length=2, description="The variant's own server.")
    bare: tuple[ServerStart, ...] = Field(
        min_length=2, description="The server without the middleware, ready while cold."
    )


class KindRatios(Block):
    """TTFT of the first request relative to later ones, by kind."""

    chat: Ratio
    completion: Ratio


class ServerRatios(Block):
    """TTFT of the first request relative to later ones, by server."""

    warmed: KindRatios
    bare: KindRatios


class PrefixRound(Block):
    """Chats to one fresh server with a system prompt."""

    first: Answer = Field(description="The first chat after readiness.")
    warm: tuple[Answer, ...] = Field(min_length=1, description="Chats with the same system prompt.")
    cold: tuple[Answer, ...] = Field(
        min_length=1, description="Chats with a new system prompt of that length."
    )


class SystemPrompt(Block):
    """The server with a system prompt before every chat."""

    config: dict[str, str] = Field(
        description="config.env lines over the variant's own; an empty one unsets."
    )
    prefix_tokens: Positive = Field(description="Tokens that all chats begin with.")
    block_tokens: Positive = Field(description="Effective attention block, the unit of the prefix cache.")
    rounds: tuple[PrefixRound, ...] = Field(min_length=2)
    first_over_warm: Ratio
    cold_over_warm: Ratio


class FirstRequest(Record):
    """TTFT of the first requests after readiness, relative to later ones, with and without warm-up."""

    kind = "first_request"
    version = 2
    verb = "bench first-request"

    limit: float = Field(gt=1, description="Largest relative TTFT that passes.")
    question_tokens: dict[Kind, Positive] = Field(
        min_length=2, description="Length of the first question of each kind."
    )
    lengths_differ: bool = Field(description="Whether no two questions of a kind have the same length.")
    answer_tokens: Positive
    servers: Servers
    first_over_steady: ServerRatios = Field(
        description="Geometric means over starts, with intervals by Student's t over them."
    )
    verdicts: dict[Kind, Verdict] = Field(min_length=2, description="Of the variant's own server, by kind.")
    chat_prefixes: tuple[str, ...] = Field(description="Lines on chat prefixes in the log of that server.")
    system_prompt: SystemPrompt

    def tables(self, path: Path) -> list[Table]:
        """TTFT of first requests on both servers by kind, then of chats with a system prompt."""
        prompt = self.system_prompt
        first, warm, cold = _prefix_ttft_ms(prompt.rounds)
        rows = (
            *(self._row(server, kind) for server, kind in itertools.product(SERVERS, KINDS)),
            _cells("first chat, cached system prompt", first, warm, prompt.first_over_warm),
            _cells("chats, new system prompt", cold, warm, prompt.cold_over_warm),
        )
        limit = f"within {self.limit}"
        headings = ("TTFT of", "ms", "of later requests, ms", "ratio", "95 % interval", limit)
        notes = (
            f"Medians over {len(self.servers.warmed)} starts of each server in turns, the chat the very first in every "
            "other; ratios are geometric means over starts, intervals by Student's t over them."
            + (" No two questions of a kind have the same length." if self.lengths_differ else ""),
            f"System prompt: {prompt.prefix_tokens} tokens before every chat of a server of its own, with prefix "
            f"caching and without MTP; its first chat found {prompt.rounds[0].first.cached_tokens} of them in the "
            f"cache (blocks of {prompt.block_tokens}).",
            *(f"Log of {self.variant}'s own server: {line}." for line in self.chat_prefixes),
            *provenance.source_notes(self, path),
        )
        return [Table(f"First requests of {self.variant}", headings, rows, notes)]

    def _row(self, server: Server, kind: Kind) -> tuple[str, ...]:
        series: list[Series] = [getattr(start, kind) for start in getattr(self.servers, server)]
        ratio = getattr(getattr(self.first_over_steady, server), kind)
        verdict = str(self.verdicts[kind]) if server == "warmed" else ""
        return _cells(f"first {kind}, {server}", *_ttft_ms(series), ratio, verdict)


def _cells(
    label: str, ttft_ms: Sequence[float], later_ms: Sequence[float], ratio: Ratio, verdict: str = ""
) -> tuple[str, ...]:
    interval = f"{ratio.low:.2f} to {ratio.high:.2f}"
    return label, f"{median(ttft_ms):.1f}", f"{median(later_ms):.1f}", f"{ratio.value:.2f}", interval, verdict


def write(
    variant: Variant,
    rounds: int,
    *,
    command: Sequence[str],
    even_if_busy: bool = False,
    progress: Progress = silent,
) -> Path:
    """Send fresh servers their first and later requests and write the record.

    Raises:
        HostBusyError: the host was too busy in all attempts at a start.
        BenchError: a server did not answer, or its prefix cache held unexpected tokens.
        TooFewItemsError: fewer than 2 rounds.
    """
    if rounds < 2:
        raise intervals.TooFewItemsError(f"{rounds} start(s) of a server show no spread: take 2 or more")
    started = provenance.utc_now()
    questions = Questions(variant)
    warmed_command = ServerCommand.resolve(variant, port=free_port())
    commands = {"warmed": warmed_command, "bare": warmed_command.without_middleware()}
    starts: dict[Server, list[ServerStart]] = {"warmed": [], "bare": []}
    prefixes: tuple[str, ...] = ()
    loads: list[HostLoad] = []
    with tempfile.TemporaryDirectory(prefix="slimqwen-system-prompt-") as folder:
        prompted_server = _PromptedServer(variant, questions, Path(folder))
        for number in range(rounds):
            # The first kind and the first server alternate from round to round.
            order = KINDS if number % 2 == 0 else KINDS[::-1]
            prompts = [
                {kind: questions.prompt(kind, index) for kind in order}
                for index in range(1 + STEADY_REQUESTS)
            ]
            for server in SERVERS if number % 2 == 0 else SERVERS[::-1]:
                progress("servers", len(loads), rounds * 3)
                (start, log), load = host_load.undisturbed(
                    partial(_start, commands[server], server, order, prompts, progress),
                    f"start {number + 1} of the {server} server",
                    even_if_busy=even_if_busy,
                )
                starts[server].append(start)
                loads.append(load)
                if server == "warmed":
                    prefixes = tuple(line[0] for line in _PREFIX.finditer(log))
            progress("servers", len(loads), rounds * 3)
            prefix_round, load = host_load.undisturbed(
                partial(prompted_server.take_round, progress),
                f"start {number + 1} of the server with a system prompt",
                even_if_busy=even_if_busy,
            )
            prompted_server.rounds.append(prefix_round)
            loads.append(load)
    progress("servers", rounds * 3, rounds * 3)
    ratios = {
        server: KindRatios(
            chat=Ratio.of_rounds(*_ttft_ms([start.chat for start in series])),
            completion=Ratio.of_rounds(*_ttft_ms([start.completion for start in series])),
        )
        for server, series in starts.items()
    }
    record = FirstRequest(
        variant=variant.name,
        limit=LIMIT,
        question_tokens=dict(QUESTION_TOKENS),
        lengths_differ=True,
        answer_tokens=ANSWER_TOKENS,
        servers=Servers(warmed=tuple(starts["warmed"]), bare=tuple(starts["bare"])),
        first_over_steady=ServerRatios(**ratios),
        verdicts={
            kind: Verdict.from_interval(ratio.low, ratio.high, LIMIT, higher_is_better=False)
            for kind, ratio in zip(KINDS, (ratios["warmed"].chat, ratios["warmed"].completion), strict=True)
        },
        chat_prefixes=prefixes,
        system_prompt=prompted_server.result(),
        provenance=provenance.of_served_variant(variant, command, started, host_load=host_load.worst(loads)),
    )
    return store.write(variant.root / "results", record)


class _PromptedServer:
    """The server whose chats begin with a system prompt long enough for the prefix cache, and its rounds."""

    def __init__(self, variant: Variant, questions: Questions, folder: Path) -> None:
        self._questions = questions
        self._tokens = min(SYSTEM_PROMPT_TOKENS, ServerCommand.resolve(variant).max_model_len // 4)
        template = variant.settings.get("VLLM_CHAT_TEMPLATE")
        template_file = variant.root / template.value if template else variant.weights / "chat_template.jinja"
        if not template_file.is_file():
            raise BenchError(
                f"{variant.name} has no chat template, so its server answers no chats; put one at {template_file}"
            )
        file = folder / "system_prompt.jinja"
        default = json.dumps(questions.text(self._tokens))
        # A request may bring another system prompt of the same length: the cold side of the comparison.
        file.write_text(
            f"<|im_start|>system\n{{{{ system_prompt | default({default}) }}}}<|im_end|>\n"
            + template_file.read_text("utf-8"),
            encoding="utf-8",
        )
        prompted_variant = overlay.with_lines(variant, {**_OVERLAY, "VLLM_CHAT_TEMPLATE": str(file)})
        self._command = ServerCommand.resolve(prompted_variant, port=free_port())
        self.rounds: list[PrefixRound] = []
        self._prefix_tokens = self._block_tokens = 0

    def take_round(self, progress: Progress, watch: Watch) -> PrefixRound:
        """Start the server; send a first chat, then chats with its system prompt in turns with a new one."""
        with _server(self._command, "system-prompt", progress, watch) as (client, log):
            self._prefix_tokens, cached, self._block_tokens = _warm_prefix(log)
            first = _ask(client, self._questions.prompt("chat", 0))
            warm: list[Answer] = []
            cold: list[Answer] = []
            for index in range(PREFIX_PAIRS):
                for side in (warm, cold) if index % 2 == 0 else (cold, warm):
                    prompt = self._questions.prompt("chat", 1 + index)
                    new_prompt = {"system_prompt": self._questions.text(self._tokens)}
                    side.append(
                        _ask(client, prompt, **({"chat_template_kwargs": new_prompt} if side is cold else {}))
                    )
        for answer in (first, *warm):
            if answer.cached_tokens < cached:
                raise BenchError(
                    f"a chat found {answer.cached_tokens} tokens in the prefix cache where the warm-up had left "
                    f"{cached}; the KV cache may be too small; log: {log}"
                )
        if any(answer.cached_tokens for answer in cold):
            raise BenchError(f"a chat with a new system prompt found tokens in the prefix cache; log: {log}")
        return PrefixRound(first=first, warm=tuple(warm), cold=tuple(cold))

    def result(self) -> SystemPrompt:
        """The rounds and their ratios, as a part of the record."""
        first, warm, cold = _prefix_ttft_ms(self.rounds)
        return SystemPrompt(
            config=dict(_OVERLAY),
            prefix_tokens=self._prefix_tokens,
            block_tokens=self._block_tokens,
            rounds=tuple(self.rounds),
            first_over_warm=Ratio.of_rounds(first, warm),
            cold_over_warm=Ratio.of_rounds(cold, warm),
        )


@contextmanager
def _server(
    command: ServerCommand, name: str, progress: Progress, watch: Watch
) -> Iterator[tuple[StreamingClient, Path]]:
    variant = command.variant
    log = variant.root / "logs" / f"first-request-{variant.name}-{name}.log"
    with (
        run_server(command, log=log, progress=progress) as server,
        StreamingClient(server, watch) as client,
        watch.section(counters=client.counters),
    ):
        yield client, log


def _start(
    command: ServerCommand,
    name: str,
    order: Sequence[Kind],
    prompts: Sequence[Mapping[Kind, Prompt]],
    progress: Progress,
    watch: Watch,
) -> tuple[ServerStart, str]:
    """Send a fresh server the first request of each kind, then later ones in turns; also returns its log."""
    answers: dict[Kind, list[Answer]] = {kind: [] for kind in order}
    with _server(command, name, progress, watch) as (client, log):
        for prompt, kind in itertools.product(prompts, order):
            answers[kind].append(_ask(client, prompt[kind]))
    series = {kind: Series(first=first, steady=tuple(steady)) for kind, (first, *steady) in answers.items()}
    start = ServerStart(order=tuple(order), chat=series["chat"], completion=series["completion"])
    return start, _text(log)


def _ask(client: StreamingClient, prompt: Prompt, **fields: Any) -> Answer:
    before = client.counters().get(_HITS, 0.0)
    answer = client.ask(prompt, ANSWER_TOKENS, **fields)
    cached = int(client.counters().get(_HITS, 0.0) - before)
    return Answer(ttft_ms=answer.ttft_ms, prompt_tokens=answer.prompt_tokens, cached_tokens=cached)


def _ttft_ms(starts: Sequence[Series]) -> tuple[list[float], list[float]]:
    """By start: TTFT of the first request, and the median of later ones."""
    return [each.first.ttft_ms for each in starts], [_median(each.steady) for each in starts]


def _prefix_ttft_ms(rounds: Sequence[PrefixRound]) -> tuple[list[float], list[float], list[float]]:
    """By round: TTFT of the first chat, the median with its system prompt, and the median with a new one."""
    return (
        [each.first.ttft_ms for each in rounds],
        [_median(each.warm) for each in rounds],
        [_median(each.cold) for each in rounds],
    )


def _median(answers: Sequence[Answer]) -> float:
    return median(answer.ttft_ms for answer in answers)


def _warm_prefix(log: Path) -> tuple[int, int, int]:
    """Tokens of the chat prefix, of its cached part and of a cache block, from the server's log."""
    line = _PREFIX.search(_text(log))
    cached = _CACHED.search(line[0]) if line else None
    if line is None or cached is None or int(cached[1]) < int(cached[2]):
        reason = line[0] if line else "the log has no line on it"
        raise BenchError(f"expected a chat prefix in the prefix cache, but {reason}; log: {log}")
    return int(line[1]), int(cached[1]), int(cached[2])


def _text(log: Path) -> str:
    return log.read_text(encoding="utf-8", errors="replace")
