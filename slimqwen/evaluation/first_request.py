"""What a first request waits for after readiness, against the requests that follow it on the same server.

Fresh servers in turns: the variant's own, which warms itself up, and bare vLLM, which calls itself ready while cold. A
third one, with prefix caching, without MTP and with rules before every chat, shows whether a first chat finds what all
chats begin with. All requests are of real text that none was made of before, one at a time.
"""

import dataclasses
import itertools
import json
import re
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import median
from types import MappingProxyType
from typing import Any

import httpx

from slimqwen.errors import SlimqwenError
from slimqwen.evaluation import prompts, statistics
from slimqwen.evaluation.verdict import Verdict
from slimqwen.progress import Progress, silent
from slimqwen.serving import launch, live
from slimqwen.variant import Setting, Variant

LIMIT = 1.2
"""What the first TTFT may be of the median of those that follow it."""

QUESTION_TOKENS: Mapping[str, int] = MappingProxyType({"chat": 64, "completion": 32})
"""Of the first message or prompt of each kind. Every next one has a length of its own around it, and the kinds are
apart: a length that has been there is faster (its kernels are chosen), and clients' questions differ in length."""

ANSWER_TOKENS = 16

STEADY_REQUESTS = 20
"""Of each kind on each server, after the first one."""

PREFIX_PAIRS = 10
"""Chats with the warm prefix on each server, and as many with one that was never there."""

RULES_TOKENS = 1024
"""Before every chat of the server with rules; a quarter of its context where that is less."""

KINDS = ("chat", "completion")
SERVERS = ("warmed", "bare")

_SEED = 20260131
_PATHS: Mapping[str, str] = MappingProxyType(
    {"chat": "/v1/chat/completions", "completion": "/v1/completions"}
)
_CHANGED: Mapping[str, str] = MappingProxyType(
    {
        "REQUIRE_WARMUP": "1",
        "REQUIRE_BAKED": "",
        "VLLM_ENABLE_PREFIX_CACHING": "1",
        "VLLM_SPECULATIVE_CONFIG": "",
        "VLLM_CUDAGRAPH_CAPTURE_SIZES": "",
    }
)
"""The server with rules has these instead of the variant's own lines; an empty one unsets."""

_PREFIX = re.compile(r"Chat prefix with thinking (?:on|off): (\d+) tokens.*")
_FOUND = re.compile(r"(\d+) in the prefix cache \(blocks of (\d+)\)")


class FirstRequestError(SlimqwenError):
    """A server did not answer as it was asked, or its prefix cache held something else than it is measured for."""


@dataclass(frozen=True)
class Row:
    """One comparison.

    Attributes:
        what: was asked first, or cold.
        ttft_ms: of it, the median over restarts.
        next_ttft_ms: the median over restarts of the medians of what it is held against.
        ratio: of the two within a start, the geometric mean over restarts.
        verdict: whether it is within the limit; None for what is shown, not judged.
    """

    what: str
    ttft_ms: float
    next_ttft_ms: float
    ratio: statistics.Ratio
    verdict: str | None


@dataclass(frozen=True)
class _Answer:
    """One streamed answer.

    Attributes:
        ttft_ms: from the request to the first chunk.
        prompt_tokens: as the server counts them.
        cached_tokens: of the prompt, found in the prefix cache as the server's counters say.
    """

    ttft_ms: float
    prompt_tokens: int
    cached_tokens: int


class _Questions:
    """Real text, never the same twice, cut to length by the variant's own tokenizer."""

    def __init__(self, variant: Variant) -> None:
        from transformers import AutoTokenizer

        self._tokenizer = AutoTokenizer.from_pretrained(variant.weights, local_files_only=True)
        self._cutter = prompts.PromptCutter(
            prompts.documents("tinyworld", _SEED, variant.root),
            lambda text: list(self._tokenizer(text, add_special_tokens=False)["input_ids"]),
        )

    def text(self, tokens: int) -> str:
        """So many tokens of new text."""
        return str(self._tokenizer.decode(self._cutter.cut(1, tokens)[0]))

    def asked(self, kind: str, number: int) -> dict[str, Any]:
        """The body of a new question, its length that of the n-th of a server: 0, +1, -1, +2, … around the first's."""
        tokens = QUESTION_TOKENS[kind] + (number + 1) // 2 * (1 if number % 2 else -1)
        if kind == "chat":
            return {"messages": [{"role": "user", "content": self.text(tokens)}]}
        return {"prompt": self._cutter.cut(1, tokens)[0]}


class _Client:
    """Asks one server at a time, over one connection that is open before the first question."""

    def __init__(self, http: httpx.Client, url: str, log: Path) -> None:
        self._http, self._url, self._log = http, url, log
        self._get("/health")

    def ask(self, kind: str, body: Mapping[str, Any]) -> _Answer:
        before = self._cached_tokens()
        shape = {"max_tokens": ANSWER_TOKENS, "ignore_eos": True, "temperature": 0}
        stream = {"stream": True, "stream_options": {"include_usage": True}}
        heard_s: list[float] = []
        said = ""
        asked_s = time.perf_counter()
        try:
            with self._http.stream(
                "POST", self._url + _PATHS[kind], json={**body, **shape, **stream}
            ) as answer:
                if answer.status_code != httpx.codes.OK:
                    raise self._lost(
                        f"answered {answer.status_code}: {answer.read().decode(errors='replace')[:200]}"
                    )
                for line in answer.iter_lines():
                    if line.startswith("data: {"):
                        heard_s.append(time.perf_counter())
                        said = line
        except httpx.HTTPError as error:
            raise self._lost(f"did not answer ({error})") from error
        usage = json.loads(said.removeprefix("data: ") or "{}").get("usage")
        if not usage or usage["completion_tokens"] != ANSWER_TOKENS:
            raise self._lost(f"streamed {len(heard_s)} chunks, and not {ANSWER_TOKENS} tokens")
        ttft_ms = round((heard_s[0] - asked_s) * 1000, 3)
        return _Answer(ttft_ms, usage["prompt_tokens"], self._cached_tokens() - before)

    def _cached_tokens(self) -> int:
        values = live.read(self._get("/metrics").text, 0.0).values
        return int(values.get("vllm:prefix_cache_hits_total", 0))

    def _get(self, path: str) -> httpx.Response:
        try:
            return self._http.get(self._url + path).raise_for_status()
        except httpx.HTTPError as error:
            raise self._lost(f"did not answer ({error})") from error

    def _lost(self, what: str) -> FirstRequestError:
        return FirstRequestError(f"{self._url} {what}; its log: {self._log}")


@dataclass(frozen=True)
class _Run:
    """What all servers of a run share."""

    logs: Path
    http: httpx.Client
    progress: Progress

    @contextmanager
    def server(self, command: launch.ServerCommand, name: str) -> Iterator[tuple[_Client, Path]]:
        log = self.logs / f"first-request-{command.variant.name}-{name}.log"
        with launch.serving(command, log=log, progress=self.progress) as server:
            yield _Client(self.http, server.base_url, log), log


def measure(variant: Variant, rounds: int, logs: Path, progress: Progress = silent) -> dict[str, Any]:
    """Ask fresh servers their first and their next requests.

    Args:
        variant: what is served; its checkpoint has a chat template.
        rounds: starts of each server, at least 2.
        logs: a folder for vLLM's output.
        progress: hears the starts, and the servers done.

    Returns:
        A record's figures: "limit", "question_tokens", "answer_tokens"; "servers": {"warmed" or "bare": [{"order",
        "chat": {"first", "steady"}, "completion": {…}} a round]}, answers as {"ttft_ms", "prompt_tokens",
        "cached_tokens"}; "first_over_steady": {server: {kind: {"value", "low", "high"}}}, ratios of TTFT with their
        intervals over restarts; "verdicts": {kind: verdict}, of the warmed server; "chat_prefixes": what its log says
        of them; and "rules", of the server with rules before every chat, without MTP.

    Raises:
        FirstRequestError: a server did not answer, or the prefix cache held something else; nothing was measured.
        TooFewItemsError: fewer than 2 rounds.
        SlimqwenError: what `slimqwen.serving.launch.serving` raises.
    """
    if rounds < 2:
        raise statistics.TooFewItemsError(f"{rounds} start(s) of a server show no spread: take 2 or more")
    questions = _Questions(variant)
    command = launch.resolve(variant, port=launch.free_port())
    servers: dict[str, list[dict[str, Any]]] = {name: [] for name in SERVERS}
    said: list[str] = []
    with (
        tempfile.TemporaryDirectory(prefix="slimqwen-rules-") as place,
        httpx.Client(headers=launch.authorization(), timeout=600, trust_env=False) as http,
    ):
        run = _Run(logs, http, progress)
        with_rules = _WithRules(variant, questions, Path(place))
        for number in range(rounds):
            # Which kind is the very first, and which server, changes from round to round.
            order = KINDS if number % 2 == 0 else KINDS[::-1]
            bodies = [
                {kind: questions.asked(kind, each) for kind in order} for each in range(1 + STEADY_REQUESTS)
            ]
            for name in SERVERS if number % 2 == 0 else SERVERS[::-1]:
                progress("servers", number + sum(map(len, servers.values())), rounds * 3)
                one = command if name == "warmed" else command.without_middleware()
                with run.server(one, name) as (client, log):
                    servers[name].append(_asked(client, order, bodies))
                if name == "warmed":
                    said = [found[0] for found in _PREFIX.finditer(_text(log))]
            progress("servers", number * 3 + 2, rounds * 3)
            with_rules.take_round(run)
    progress("servers", rounds * 3, rounds * 3)
    ratios = {
        name: {
            kind: statistics.ratio_of_rounds(
                [one[kind]["first"]["ttft_ms"] for one in servers[name]],
                [median_ttft_ms(one[kind]["steady"]) for one in servers[name]],
                in_turns=True,
            )
            for kind in KINDS
        }
        for name in SERVERS
    }
    return {
        "limit": LIMIT,
        "question_tokens": dict(QUESTION_TOKENS),
        "answer_tokens": ANSWER_TOKENS,
        "servers": servers,
        "first_over_steady": {
            name: {kind: asdict(ratio) for kind, ratio in of.items()} for name, of in ratios.items()
        },
        "verdicts": {kind: str(judge(ratios["warmed"][kind])) for kind in KINDS},
        "chat_prefixes": said,
        "rules": with_rules.found(),
    }


def judge(ratio: statistics.Ratio) -> Verdict:
    """Pass where the whole interval lies within `LIMIT`, fail where all of it lies beyond, else inconclusive."""
    if ratio.high <= LIMIT:
        return Verdict.PASS
    return Verdict.FAIL if ratio.low > LIMIT else Verdict.INCONCLUSIVE


def summary(record: Mapping[str, Any]) -> list[Row]:
    """The figures of a record, a row each: both servers by kind, then what the rules' prefix is worth."""
    rows = []
    for name, kind in itertools.product(SERVERS, KINDS):
        taken = [one[kind] for one in record["servers"][name]]
        rows.append(
            Row(
                f"first {kind}, {name}",
                median(one["first"]["ttft_ms"] for one in taken),
                median(median_ttft_ms(one["steady"]) for one in taken),
                statistics.Ratio(**record["first_over_steady"][name][kind]),
                record["verdicts"][kind] if name == "warmed" else None,
            )
        )
    rules = record["rules"]
    warm = median(median_ttft_ms(one["warm"]) for one in rules["rounds"])
    first = median(one["first"]["ttft_ms"] for one in rules["rounds"])
    cold = median(median_ttft_ms(one["cold"]) for one in rules["rounds"])
    rows.append(
        Row("first chat, rules warm", first, warm, statistics.Ratio(**rules["first_over_warm"]), None)
    )
    rows.append(Row("chats, rules never seen", cold, warm, statistics.Ratio(**rules["cold_over_warm"]), None))
    return rows


def first_over_steady(taken: Mapping[str, Any]) -> float:
    """The first TTFT over the median of the next, of one kind on one server."""
    return float(taken["first"]["ttft_ms"]) / median_ttft_ms(taken["steady"])


def median_ttft_ms(answers: Sequence[Mapping[str, Any]]) -> float:
    """Of a record's answers."""
    return float(median(answer["ttft_ms"] for answer in answers))


class _WithRules:
    """The server whose chats begin with rules long enough for the prefix cache, and what its rounds showed."""

    def __init__(self, variant: Variant, questions: _Questions, place: Path) -> None:
        self._questions = questions
        context = launch.resolve(variant).max_model_len
        self._tokens = min(RULES_TOKENS, context // 4)
        template = variant.settings.get("VLLM_CHAT_TEMPLATE")
        own = variant.root / template.value if template else variant.weights / "chat_template.jinja"
        if not own.is_file():
            raise FirstRequestError(f"{variant.name} has no chat template, so chats cannot be asked: {own}")
        file = place / "rules.jinja"
        rules = json.dumps(questions.text(self._tokens))
        # A request may bring other rules of the same length: the cold side of the comparison.
        file.write_text(
            f"<|im_start|>system\n{{{{ rules | default({rules}) }}}}<|im_end|>\n" + own.read_text("utf-8"),
            encoding="utf-8",
        )
        lines = {**_CHANGED, "VLLM_CHAT_TEMPLATE": str(file)}
        given = {key: Setting(key, value, variant.folder / "config.env", 0) for key, value in lines.items()}
        settings = {key: one for key, one in {**variant.settings, **given}.items() if one.value}
        changed = dataclasses.replace(variant, settings=MappingProxyType(settings))
        self._command = launch.resolve(changed, port=launch.free_port())
        self._rounds: list[dict[str, Any]] = []
        self._prefix_tokens = self._block_tokens = 0

    def take_round(self, run: _Run) -> None:
        """Start it, and ask a first chat, then chats with the same rules in turns with others."""
        with run.server(self._command, "rules") as (client, log):
            self._prefix_tokens, whole, self._block_tokens = _prefix_in(_text(log), log)
            first = client.ask("chat", self._questions.asked("chat", 0))
            answers: dict[str, list[_Answer]] = {"warm": [], "cold": []}
            for number in range(PREFIX_PAIRS):
                for side in ("warm", "cold") if number % 2 == 0 else ("cold", "warm"):
                    body = self._questions.asked("chat", 1 + number)
                    if side == "cold":
                        body["chat_template_kwargs"] = {"rules": self._questions.text(self._tokens)}
                    answers[side].append(client.ask("chat", body))
        for answer in (first, *answers["warm"]):
            if answer.cached_tokens < whole:
                raise FirstRequestError(
                    f"a chat found {answer.cached_tokens} tokens in the prefix cache where the warm-up had left "
                    f"{whole}; the KV cache may be too small; log: {log}"
                )
        if any(answer.cached_tokens for answer in answers["cold"]):
            raise FirstRequestError(
                f"a chat whose rules had never been there found tokens in the prefix cache; log: {log}"
            )
        sides = {side: list(map(asdict, answers[side])) for side in answers}
        self._rounds.append({"first": asdict(first), **sides})

    def found(self) -> dict[str, Any]:
        """The record's part."""
        warm = [median_ttft_ms(one["warm"]) for one in self._rounds]
        firsts = [one["first"]["ttft_ms"] for one in self._rounds]
        cold = [median_ttft_ms(one["cold"]) for one in self._rounds]
        return {
            "config": dict(_CHANGED),
            "prefix_tokens": self._prefix_tokens,
            "block_tokens": self._block_tokens,
            "rounds": self._rounds,
            "first_over_warm": asdict(statistics.ratio_of_rounds(firsts, warm, in_turns=True)),
            "cold_over_warm": asdict(statistics.ratio_of_rounds(cold, warm, in_turns=True)),
        }


def _asked(client: _Client, order: Sequence[str], bodies: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """One server: the first of each kind, then the steady ones in turns."""
    answers: dict[str, list[dict[str, Any]]] = {kind: [] for kind in order}
    for body, kind in itertools.product(bodies, order):
        answers[kind].append(asdict(client.ask(kind, body[kind])))
    return {
        "order": list(order),
        **{kind: {"first": first, "steady": steady} for kind, (first, *steady) in answers.items()},
    }


def _prefix_in(log_text: str, log: Path) -> tuple[int, int, int]:
    """What the warm-up says of the chat prefix: its tokens, those that a next chat found, tokens of a block."""
    said = _PREFIX.search(log_text)
    found = _FOUND.search(said[0]) if said else None
    if said is None or found is None or int(found[1]) < int(found[2]):
        what = said[0] if said else "nothing of a chat prefix"
        raise FirstRequestError(f"no chat prefix is warm here, so none can be timed: {what}; log: {log}")
    return int(said[1]), int(found[1]), int(found[2])


def _text(log: Path) -> str:
    return log.read_text(encoding="utf-8", errors="replace")
