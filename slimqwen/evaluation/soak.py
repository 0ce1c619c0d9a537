"""A soak: a mixed load for a quarter of an hour or more, and whether the server's memory stays flat all that time.

The load is completions and chats, streamed or not, malformed ones among them, from more clients than the server runs at
once, and one client that leaves in the middle of its streams. Memory is what all processes of the server hold resident.
"""

import asyncio
import contextlib
import json
import random
import time
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import httpx
import psutil
from scipy import stats

from slimqwen.evaluation.served import ServerLostError
from slimqwen.evaluation.verdict import Verdict
from slimqwen.progress import Progress, silent
from slimqwen.serving import launch, live
from slimqwen.variant import Variant

MAX_GROWTH_MIB_PER_HOUR = 30
"""Of all processes together, after the first third: 4 were seen, which are allocators' noise of 0.4 MiB in ten minutes.
A leak of 2 KiB a request would be 30 MiB an hour at four requests a second."""

MAX_NEW_FILES = 8
"""Open files, sockets included, more at the end than before: connections that are kept alive for the next request."""

CLIENTS_A_SEQUENCE = 4
"""Clients for each sequence that the server runs at once: three of them wait."""

_EVERY_S = 5
_SETTLED = 1 / 3
"""Of the time: what allocators and caches take in the beginning is no leak."""

_PATIENCE_S = 300
_AFTER_LOSS_S = 0.5
_PLACES = ("/v1/completions", "/v1/chat/completions")
_EXPECTED = ("answered", "overload", "refused")


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
        {"seconds", "clients", "requests": {outcome: count}, "streams_left", "resident_mib": {"settled", "end"},
        "growth_mib_per_hour": Growth, "by_process": [{"process", Growth}], "open_files": {"before", "after"},
        "kv_cache_used", "limits", "faults": [what should not have been], "verdict"}; fail where there is a fault,
        inconclusive where the interval of growth has its limit within.

    Raises:
        ServerFailedError: the server did not start.
        ServerLostError: one of its processes ended under the load.
    """
    command = launch.resolve(one, port=launch.free_port())
    clients = CLIENTS_A_SEQUENCE * int(command.flags.get("max-num-seqs", 1))
    with launch.serving(command, log=log) as server:
        return load_and_watch(server.base_url, server.pid, seconds, clients, progress)


def load_and_watch(
    url: str, pid: int, seconds: float, clients: int, progress: Progress = silent
) -> dict[str, Any]:
    """The same of a server that is ready: `run` without starting it."""
    family = [psutil.Process(pid), *psutil.Process(pid).children(recursive=True)]
    names = ["API server", *(" ".join(each.cmdline())[:20].strip() or each.name() for each in family[1:])]
    before = sum(each.num_fds() for each in family)
    try:
        looks, left, outcomes = asyncio.run(_soak(url, family, seconds, clients, progress))
    except psutil.Error as gone:
        raise ServerLostError(
            f"the server lost a process under the load ({gone}); its log says why"
        ) from None
    settled = [look for look in looks if look.seconds > seconds * _SETTLED]
    total = growth([(look.seconds, sum(look.resident_mib)) for look in settled])
    kv_cache_used, ready = _at_rest(url)
    after = sum(each.num_fds() for each in family)
    faults = [f"{count} requests: {what}" for what, count in outcomes.items() if what not in _EXPECTED]
    faults += [] if outcomes["answered"] else ["no request was answered"]
    faults += ["memory grew"] if total.low > MAX_GROWTH_MIB_PER_HOUR else []
    faults += [f"{after - before} more files are open"] if after - before > MAX_NEW_FILES else []
    faults += ["the KV cache is not empty"] if kv_cache_used else []
    faults += [] if ready else ["the server is not ready"]
    unsure = total.high > MAX_GROWTH_MIB_PER_HOUR
    return {
        "seconds": looks[-1].seconds,
        "clients": clients,
        "requests": dict(outcomes),
        "streams_left": left,
        "resident_mib": {"settled": sum(settled[0].resident_mib), "end": sum(looks[-1].resident_mib)},
        "growth_mib_per_hour": asdict(total),
        "by_process": [
            {
                "process": name,
                **asdict(growth([(look.seconds, look.resident_mib[place]) for look in settled])),
            }
            for place, name in enumerate(names)
        ],
        "open_files": {"before": before, "after": after},
        "kv_cache_used": kv_cache_used,
        "limits": {"growth_mib_per_hour": MAX_GROWTH_MIB_PER_HOUR, "new_files": MAX_NEW_FILES},
        "faults": faults,
        "verdict": Verdict.FAIL if faults else Verdict.INCONCLUSIVE if unsure else Verdict.PASS,
    }


def growth(points: Sequence[tuple[float, float]]) -> Growth:
    """How fast something grows.

    Args:
        points: seconds and MiB, two at least.
    """
    hours, values = [second / 3600 for second, _ in points], [value for _, value in points]
    slope = stats.theilslopes(values, hours)
    return Growth(float(slope.slope), float(slope.low_slope), float(slope.high_slope))


def question(number: int) -> Question:
    """One of a mixed load: completions and chats, streamed or not, of 2 to 8 tokens; one in eight is malformed."""
    if number % 8 == 7:
        wrong = (b'{"prompt": "The"', b'{"prompt": "The", "max_tokens": 10000000}', b'{"prompt": 5}', b"\xff")
        return Question(_PLACES[0], wrong[number // 8 % len(wrong)], None, False)
    tokens, streams = 2 + number % 7, number % 2 == 0
    body: dict[str, Any] = {"max_tokens": tokens, "ignore_eos": True, "temperature": number % 3 / 2}
    if streams:
        body |= {"stream": True, "stream_options": {"include_usage": True}}
    place = _PLACES[number // 2 % 2]
    text = f"Who lives in house {number}?"
    body |= {"prompt": text} if place == _PLACES[0] else {"messages": [{"role": "user", "content": text}]}
    return Question(place, json.dumps(body).encode(), tokens, streams)


def outcome(asked: Question, answer: httpx.Response) -> str:
    """How a request ended: answered, overload or refused; what is wrong, for anything else."""
    if answer.status_code == httpx.codes.TOO_MANY_REQUESTS:
        clear = answer.json()["error"]["message"] and answer.headers.get("Retry-After")
        return "overload" if clear else "429 says nothing"
    if asked.tokens is None:
        said = answer.json()
        clear = answer.status_code == httpx.codes.BAD_REQUEST and (said.get("error") or said.get("detail"))
        return "refused" if clear else f"{answer.status_code} for {asked.content!r}: {answer.text}"
    if answer.status_code != httpx.codes.OK:
        return f"{answer.status_code} for {asked.content!r}: {answer.text}"
    if not asked.streams:
        parts = [answer.json()]
    else:
        *lines, last = [line.removeprefix("data: ") for line in answer.text.splitlines() if line]
        if last != "[DONE]":
            return f"cut off after {last}"
        parts = [json.loads(line) for line in lines]
    reasons = [choice["finish_reason"] for part in parts for choice in part.get("choices", ())]
    tokens = [part["usage"]["completion_tokens"] for part in parts if part.get("usage")]
    if reasons[-1:] != ["length"] or tokens[-1:] != [asked.tokens]:
        return f"{tokens} tokens, {reasons}, for {asked.content!r}"
    return "answered"


async def load(url: str, numbers: Iterable[int], clients: int) -> Counter[str]:
    """Ask questions; each client asks the next one once it has its answer, and waits when told to.

    Args:
        url: of a server, without a trailing slash.
        numbers: of the questions.
        clients: at once.

    Returns:
        how many came out how.
    """
    left, outcomes = iter(numbers), Counter[str]()
    async with _client(url) as http:

        async def ask() -> None:
            for number in left:
                asked = question(number)
                headers = {"Content-Type": "application/json"}
                try:
                    answer = await http.post(asked.path, content=asked.content, headers=headers)
                    found = outcome(asked, answer)
                except httpx.HTTPError as error:
                    found = f"lost: {error!r}"
                outcomes[found] += 1
                if found == "overload":
                    await asyncio.sleep(float(answer.headers["Retry-After"]))
                elif found.startswith("lost"):
                    await asyncio.sleep(_AFTER_LOSS_S)

        await asyncio.gather(*(ask() for _ in range(clients)))
    return outcomes


def _client(url: str) -> httpx.AsyncClient:
    return httpx.AsyncClient(
        base_url=url,
        timeout=_PATIENCE_S,
        trust_env=False,
        limits=httpx.Limits(max_connections=None),
        headers=launch.authorization(),
    )


async def _soak(
    url: str, family: Sequence[psutil.Process], seconds: float, clients: int, progress: Progress
) -> tuple[list[Look], int, Counter[str]]:
    until = time.monotonic() + seconds

    def numbers() -> Iterable[int]:
        number = 0
        while time.monotonic() < until:
            yield number
            number += 1

    looks, left, outcomes = await asyncio.gather(
        _watch(family, seconds, progress), _leave(url, until), load(url, numbers(), clients)
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


async def _leave(url: str, until: float) -> int:
    """A client that opens streams and leaves in the middle of them; how many it left."""
    draw = random.Random(0)
    left = 0
    body = {"prompt": "The", "max_tokens": 500, "ignore_eos": True, "stream": True}
    async with _client(url) as http:
        while time.monotonic() < until:
            # What is lost here is lost to the other clients too, and they say it.
            with contextlib.suppress(httpx.HTTPError):
                async with http.stream("POST", _PLACES[0], json=body) as answer:
                    wanted = 1 + draw.randrange(20)
                    async for _ in answer.aiter_bytes():
                        wanted -= 1
                        if not wanted:
                            break
                    left += answer.status_code == httpx.codes.OK
            await asyncio.sleep(0.2)
    return left


def _at_rest(url: str) -> tuple[float, bool]:
    """The share of the KV cache in use once nothing runs or waits, and whether the server says that it is ready."""
    deadline = time.monotonic() + _PATIENCE_S
    with httpx.Client(base_url=url, timeout=_PATIENCE_S, trust_env=False) as http:
        while True:
            values = live.read(http.get("/metrics").text, time.monotonic()).values
            busy = values["vllm:num_requests_running"] + values["vllm:num_requests_waiting"]
            if not busy or time.monotonic() > deadline:
                break
            time.sleep(0.2)
        return float(values["vllm:kv_cache_usage_perc"]), http.get("/health").status_code == httpx.codes.OK
