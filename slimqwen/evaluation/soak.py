"""A soak: a mixed load for a quarter of an hour or more, and whether the server's memory stays flat all that time.

The load is completions and chats, streamed or not, malformed ones among them, from more clients than the server runs at
once, and one client that leaves in the middle of its streams. Memory is what all processes of the server hold resident.
"""

import asyncio
import contextlib
import json
import math
import random
import resource
import time
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import httpx
import psutil
from scipy import stats

from slimqwen.errors import SlimqwenError
from slimqwen.evaluation.served import ServerLostError
from slimqwen.evaluation.verdict import Verdict
from slimqwen.progress import Progress, silent
from slimqwen.serving import launch, live
from slimqwen.variant import Variant

MAX_GROWTH_MIB_PER_HOUR = 30
"""Of all processes together, after the first third: 4 were seen, which are allocators' noise of 0.4 MiB in ten minutes.
A leak of 2 KiB a request would be 30 MiB an hour at four requests a second."""

NOISE_MIB = 2
"""What may be gained after the first third whatever its slope: allocators take memory in steps, and the interval of the
slope takes looks for independent."""

MAX_NEW_FILES = 8
"""Open files, sockets included, more at the end than before: connections that are kept alive for the next request."""

CLIENTS_A_SEQUENCE = 4
"""Clients for each sequence that the server runs at once: three of them wait."""

DEFAULT_SEQUENCES = 256
"""What vLLM runs at once where no flag says it, or more (`EngineArgs.get_batch_defaults`)."""

SHORTEST_S = 60
"""A soak that says anything."""

_EVERY_S = 5
_SETTLED = 1 / 3
"""Of the time: what allocators and caches take in the beginning is no leak."""

_OWN_FILES = 128
"""Open beside the clients' connections."""

_PATIENCE_S = 300
_AFTER_FAULT_S = 0.5
_REST_S = 60
"""What was asked for has ended by then, or it never will."""

_LEFT_TOKENS = 200
"""Of a stream that its client leaves: enough for it to be in the middle."""
_PLACES = ("/v1/completions", "/v1/chat/completions")
_EXPECTED = ("answered", "overload", "refused")
_RUNNING, _WAITING, _KV_CACHE = (
    f"vllm:{name}" for name in ("num_requests_running", "num_requests_waiting", "kv_cache_usage_perc")
)


class SoakError(SlimqwenError):
    """Too short, or too few looks at memory, to say anything."""


@dataclass(frozen=True)
class Question:
    """A request, and what it is owed: so many tokens, or a refusal (None)."""

    path: str
    content: bytes
    tokens: int | None
    streams: bool


@dataclass(frozen=True)
class Growth:
    """Of resident memory, MiB an hour: the median slope between two looks, with its 95 % interval.

    Theil, Proc. Royal Netherlands Academy of Sciences 53, 1950; Sen, J. American Statistical Association 63, 1968.
    """

    value: float
    low: float
    high: float


@dataclass(frozen=True)
class Look:
    """At a server's processes: seconds since the first look, resident MiB of each, open files of all."""

    seconds: float
    resident_mib: tuple[float, ...]
    open_files: int


def run(one: Variant, seconds: float, log: Path, progress: Progress = silent) -> dict[str, Any]:
    """Start a variant's server, load it for so long, and judge what it still holds.

    Args:
        one: the variant; it is served as its config.env says.
        seconds: of load.
        log: receives vLLM's output.
        progress: hears the seconds done.

    Returns:
        {"seconds", "clients", "chats": whether the server takes them, "requests": {outcome: count}, "streams_left",
        "resident_mib": {"settled", "end"}, "growth_mib_per_hour": Growth, "by_process": [{"process", Growth}],
        "open_files": {"before", "after"}, "kv_cache_used", "limits", "faults": [what should not have been],
        "verdict"}; fail where there is a fault, inconclusive where the interval of growth reaches beyond its limit.

    Raises:
        SoakError: seconds are fewer than `SHORTEST_S`, or the system allows too few open files.
        ServerFailedError: the server did not start.
        ServerLostError: one of its processes ended under the load.
    """
    if not seconds >= SHORTEST_S:
        raise SoakError(
            f"a soak of {seconds:g} s tells nothing; give it {SHORTEST_S} s or more, 15 minutes by default"
        )
    command = launch.resolve(one, port=launch.free_port())
    clients = CLIENTS_A_SEQUENCE * int(command.flags.get("max-num-seqs") or DEFAULT_SEQUENCES)
    _allow_connections(clients)
    with launch.serving(command, log=log) as server:
        return load_and_watch(server.base_url, server.pid, seconds, clients, progress)


def load_and_watch(
    url: str, pid: int, seconds: float, clients: int, progress: Progress = silent
) -> dict[str, Any]:
    """The same of a server that is ready: `run` without starting it, for any time.

    Raises:
        SoakError: too short for two looks after the first third, or the server counts nothing.
        ServerLostError: one of its processes ended.
    """
    try:
        family = [psutil.Process(pid), *psutil.Process(pid).children(recursive=True)]
        # Of a program its name, not where it lies; vLLM's processes give themselves titles.
        programs = [Path(next(iter(each.cmdline()), "")).name or each.name() for each in family[1:]]
        names = ["API server", *programs]
        before = sum(each.num_fds() for each in family)
        _require_metrics(url)
        context, chats = _takes(url)
        kinds = _PLACES if chats else _PLACES[:1]
        looks, left, outcomes = asyncio.run(_soak(url, family, seconds, clients, context, kinds, progress))
        rest = _at_rest(url)
        after = sum(each.num_fds() for each in family)
    except (psutil.Error, httpx.HTTPError) as gone:
        raise ServerLostError(f"the server was lost under the load ({gone!r}); its log says why") from None
    settled = [look for look in looks if look.seconds > seconds * _SETTLED]
    if len(settled) < 2:
        raise SoakError(f"{len(looks)} looks at memory in {seconds:g} s are too few; give it longer")
    total = growth([(look.seconds, sum(look.resident_mib)) for look in settled])
    gained = sum(settled[-1].resident_mib) - sum(settled[0].resident_mib)
    grew = total.low > MAX_GROWTH_MIB_PER_HOUR and gained > NOISE_MIB
    faults = [
        f"{count} requests: {what}" for what, count in sorted(outcomes.items()) if what not in _EXPECTED
    ]
    faults += [] if outcomes["answered"] else ["no request was answered"]
    faults += [] if left else ["no stream was there to leave"]
    faults += [f"memory grew by {gained:.1f} MiB"] if grew else []
    faults += [f"{after - before} more files are open"] if after - before > MAX_NEW_FILES else []
    faults += [f"{rest.unended:g} requests never ended"] if rest.unended else []
    faults += ["the KV cache is not empty"] if rest.kv_cache_used else []
    faults += [] if rest.ready else ["the server is not ready"]
    sure = math.isfinite(total.high) and total.high <= MAX_GROWTH_MIB_PER_HOUR
    return {
        "seconds": looks[-1].seconds,
        "clients": clients,
        "chats": chats,
        "requests": dict(outcomes),
        "streams_left": left,
        "resident_mib": {"settled": sum(settled[0].resident_mib), "end": sum(settled[-1].resident_mib)},
        "growth_mib_per_hour": asdict(total),
        "by_process": [
            {
                "process": name,
                **asdict(growth([(look.seconds, look.resident_mib[place]) for look in settled])),
            }
            for place, name in enumerate(names)
        ],
        "open_files": {"before": before, "after": after},
        "kv_cache_used": rest.kv_cache_used,
        "limits": {
            "growth_mib_per_hour": MAX_GROWTH_MIB_PER_HOUR,
            "noise_mib": NOISE_MIB,
            "new_files": MAX_NEW_FILES,
        },
        "faults": faults,
        "verdict": Verdict.FAIL if faults else Verdict.PASS if sure else Verdict.INCONCLUSIVE,
    }


def _allow_connections(clients: int) -> None:
    """Raise this process's limit of open files to what so many clients need.

    Raises:
        SoakError: the system forbids it.
    """
    needed = clients + _OWN_FILES
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if hard != resource.RLIM_INFINITY and hard < needed:
        raise SoakError(
            f"{clients} clients need {needed} open files and {hard} are allowed; raise it (`ulimit -Hn`), or set "
            "VLLM_MAX_NUM_SEQS in config.env"
        )
    if soft != resource.RLIM_INFINITY and soft < needed:
        resource.setrlimit(resource.RLIMIT_NOFILE, (needed, hard))


def growth(points: Sequence[tuple[float, float]]) -> Growth:
    """How fast something grows.

    Args:
        points: seconds and MiB, two at least.
    """
    hours, values = [second / 3600 for second, _ in points], [value for _, value in points]
    slope = stats.theilslopes(values, hours)
    return Growth(float(slope.slope), float(slope.low_slope), float(slope.high_slope))


def question(number: int, places: Sequence[str] = _PLACES) -> Question:
    """One of a mixed load: completions and chats, streamed or not, of 2 to 8 tokens; one in eight is malformed."""
    if number % 8 == 7:
        wrong = (b'{"prompt": "The"', b'{"prompt": "The", "max_tokens": 10000000}', b'{"prompt": 5}', b"\xff")
        return Question(_PLACES[0], wrong[number // 8 % len(wrong)], None, False)
    tokens, streams = 2 + number % 7, number % 2 == 0
    body: dict[str, Any] = {"max_tokens": tokens, "ignore_eos": True, "temperature": number % 3 / 2}
    if streams:
        body |= {"stream": True, "stream_options": {"include_usage": True}}
    place = places[number // 2 % len(places)]
    text = f"Who lives in house {number}?"
    body |= {"prompt": text} if place == _PLACES[0] else {"messages": [{"role": "user", "content": text}]}
    return Question(place, json.dumps(body).encode(), tokens, streams)


def outcome(asked: Question, answer: httpx.Response) -> str:
    """How a request ended: answered, overload or refused; what is wrong, in few words, for anything else."""
    kind = "a malformed request" if asked.tokens is None else f"a request to {asked.path}"
    with contextlib.suppress(ValueError, LookupError, TypeError, AttributeError):
        if answer.status_code == httpx.codes.TOO_MANY_REQUESTS:
            clear = answer.json()["error"]["message"] and answer.headers.get("Retry-After")
            return "overload" if clear else "429 says nothing"
        if asked.tokens is None:
            said = answer.json() if answer.status_code == httpx.codes.BAD_REQUEST else {}
            return (
                "refused" if said.get("error") or said.get("detail") else f"{answer.status_code} for {kind}"
            )
        if answer.status_code != httpx.codes.OK:
            return f"{answer.status_code} for {kind}"
        if not asked.streams:
            parts = [answer.json()]
        else:
            *lines, last = [line.removeprefix("data: ") for line in answer.text.splitlines() if line]
            if last != "[DONE]":
                return f"a stream of {asked.path} was cut off"
            parts = [json.loads(line) for line in lines]
        reasons = [choice["finish_reason"] for part in parts for choice in part.get("choices", ())]
        tokens = [part["usage"]["completion_tokens"] for part in parts if part.get("usage")]
        whole = reasons[-1:] == ["length"] and tokens[-1:] == [asked.tokens]
        return "answered" if whole else f"an answer of {asked.path} is not as long as it was asked for"
    return f"{answer.status_code} that cannot be read, for {kind}"


async def load(
    url: str, numbers: Iterable[int], clients: int, places: Sequence[str] = _PLACES
) -> Counter[str]:
    """Ask questions; each client asks the next one once it has its answer, and waits when told to.

    Args:
        url: of a server, without a trailing slash.
        numbers: of the questions.
        clients: at once.
        places: paths that take questions.

    Returns:
        how many came out how.
    """
    left, outcomes = iter(numbers), Counter[str]()
    async with _client(url) as http:

        async def ask() -> None:
            for number in left:
                asked = question(number, places)
                headers = {"Content-Type": "application/json"}
                try:
                    answer = await http.post(asked.path, content=asked.content, headers=headers)
                    found = outcome(asked, answer)
                except httpx.HTTPError as error:
                    found = f"lost: {type(error).__name__}"
                outcomes[found] += 1
                if found == "overload":
                    await asyncio.sleep(float(answer.headers["Retry-After"]))
                elif found not in _EXPECTED:
                    await asyncio.sleep(_AFTER_FAULT_S)

        await asyncio.gather(*(ask() for _ in range(clients)))
    return outcomes


def _client(url: str) -> httpx.AsyncClient:
    return httpx.AsyncClient(
        base_url=url,
        timeout=_PATIENCE_S,
        trust_env=False,
        # vLLM closes connections that are idle for 5 s, as httpx does: at the same moment a request would be lost.
        limits=httpx.Limits(max_connections=None, keepalive_expiry=2),
        headers=launch.authorization(),
    )


async def _soak(
    url: str,
    family: Sequence[psutil.Process],
    seconds: float,
    clients: int,
    context: int,
    places: Sequence[str],
    progress: Progress,
) -> tuple[list[Look], int, Counter[str]]:
    until = time.monotonic() + seconds

    def numbers() -> Iterable[int]:
        number = 0
        while time.monotonic() < until:
            yield number
            number += 1

    looks, left, outcomes = await asyncio.gather(
        _watch(family, seconds, progress),
        _leave(url, until, min(_LEFT_TOKENS, context // 2)),
        load(url, numbers(), clients, places),
    )
    return looks, left, outcomes


async def _watch(family: Sequence[psutil.Process], seconds: float, progress: Progress) -> list[Look]:
    looks: list[Look] = []
    began = time.monotonic()
    while (now := time.monotonic() - began) < seconds:
        # One that has ended and that nobody has waited for still answers, with zeros.
        if ended := [each for each in family if each.status() == psutil.STATUS_ZOMBIE]:
            raise psutil.NoSuchProcess(ended[0].pid)
        resident = tuple(each.memory_info().rss / 2**20 for each in family)
        looks.append(Look(now, resident, sum(each.num_fds() for each in family)))
        progress("soaking, seconds", int(now), int(seconds))
        await asyncio.sleep(min(_EVERY_S, seconds / 20))
    progress("soaking, seconds", int(seconds), int(seconds))
    return looks


async def _leave(url: str, until: float, tokens: int) -> int:
    """A client that opens streams and leaves in the middle of them; how many it left."""
    draw = random.Random(0)
    left = 0
    body = {"prompt": "The", "max_tokens": tokens, "ignore_eos": True, "stream": True}
    async with _client(url) as http:
        while time.monotonic() < until:
            # What is lost here is lost to the other clients too, and they say it.
            with contextlib.suppress(httpx.HTTPError):
                async with http.stream("POST", _PLACES[0], json=body) as answer:
                    wanted = 1 + draw.randrange(8)
                    async for _ in answer.aiter_bytes():
                        wanted -= 1
                        if not wanted:
                            left += answer.status_code == httpx.codes.OK
                            break
            await asyncio.sleep(0.2)
    return left


def _takes(url: str) -> tuple[int, bool]:
    """The context in tokens, and whether it takes chats: a base model's checkpoint has no template for them."""
    with httpx.Client(
        base_url=url, timeout=_PATIENCE_S, trust_env=False, headers=launch.authorization()
    ) as http:
        context = int(http.get("/v1/models").json()["data"][0]["max_model_len"])
        chat = {"messages": [{"role": "user", "content": "Hello"}], "max_tokens": 1}
        return context, http.post(_PLACES[1], json=chat).status_code == httpx.codes.OK


def _require_metrics(url: str) -> None:
    values = live.read(_metrics(url), time.monotonic()).values
    if missing := [name for name in (_RUNNING, _WAITING, _KV_CACHE) if name not in values]:
        raise SoakError(
            f"/metrics has no {missing[0]}, which says what a soak leaves behind; take VLLM_DISABLE_LOG_STATS out of "
            "config.env"
        )


def _metrics(url: str) -> str:
    with httpx.Client(base_url=url, timeout=_PATIENCE_S, trust_env=False) as http:
        return http.get("/metrics").text


@dataclass(frozen=True)
class _Rest:
    unended: float
    kv_cache_used: float
    ready: bool


def _at_rest(url: str) -> _Rest:
    """What still runs or waits when there was time to end, the share of the KV cache in use, and /health."""
    deadline = time.monotonic() + _REST_S
    with httpx.Client(base_url=url, timeout=_PATIENCE_S, trust_env=False) as http:
        while True:
            values = live.read(_metrics(url), time.monotonic()).values
            busy = values[_RUNNING] + values[_WAITING]
            if not busy or time.monotonic() > deadline:
                break
            time.sleep(0.2)
        ready = http.get("/health").status_code == httpx.codes.OK
        return _Rest(float(busy), float(values[_KV_CACHE]), ready)
