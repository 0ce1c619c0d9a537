"""The vLLM servers that run now, and what their own `/metrics` says: rates between scrapes, shares, medians."""

import contextlib
import itertools
import math
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType

import httpx
import psutil
from prometheus_client.parser import text_string_to_metric_families

from slimqwen.serving import launch

TIMEOUT_S = 1.0
"""How long a server may take to say its metrics."""

RATE_WINDOW_S = 5.0
"""What tokens per second are an average over."""

SHARE_WINDOW_S = 60.0
"""What shares and medians are of; where nothing happened in it, of all since the server's start."""

_TTFT, _ITL = "vllm:time_to_first_token_seconds_bucket", "vllm:inter_token_latency_seconds_bucket"
_KV_CACHE = "vllm:kv_cache_usage_perc"
_DRAFTS = ("accepted_tokens", "drafts", "draft_tokens")
_MODULE = "vllm.entrypoints.launchers.api_server.entry"


@dataclass(frozen=True)
class Server:
    """A process that is a vLLM server.

    Attributes:
        pid: of its API server.
        started: Unix time, seconds.
        variant: that it serves, None where the process does not say.
        model: the checkpoint folder, as on its command line.
        port: TCP.
    """

    pid: int
    started: float
    variant: str | None
    model: str
    port: int

    @property
    def name(self) -> str:
        """The variant's, else that of the checkpoint's folder."""
        return self.variant or f"weights/{Path(self.model).name}"


@dataclass(frozen=True)
class Scrape:
    """What a server's `/metrics` said at one time.

    Attributes:
        taken: on a clock that only goes forward, seconds.
        values: gauges and counters by sample name, summed over engines; of the KV cache's use, the fullest engine's.
        buckets: of histograms by sample name: counts up to bounds, in seconds, the last one infinite.
    """

    taken: float
    values: Mapping[str, float]
    buckets: Mapping[str, Mapping[float, float]]

    def counts_on(self, before: "Scrape") -> bool:
        """Whether no counter is behind an earlier scrape's, as after a restart."""
        counters = (name for name in before.values if name.endswith("_total"))
        return all(self.values.get(name, 0.0) >= before.values[name] for name in counters)


@dataclass(frozen=True)
class Figures:
    """What a server does; None for what it has not shown yet, or does not do.

    Attributes:
        running: requests in work.
        waiting: requests queued.
        kv_cache: its share in use.
        prompt_tokens_per_s: read, those from the prefix cache included.
        generation_tokens_per_s: written.
        acceptance_length: tokens gained by a draft, 1 + accepted / drafts.
        acceptance_rate: accepted drafted tokens of all drafted.
        ttft_s: median time to the first token, interpolated within its histogram's bucket.
        itl_s: median time between tokens, likewise.
        prefix_hits: share of the tokens looked up in the prefix cache that it had.
        preemptions: since the server's start.
    """

    running: float | None
    waiting: float | None
    kv_cache: float | None
    prompt_tokens_per_s: float | None
    generation_tokens_per_s: float | None
    acceptance_length: float | None
    acceptance_rate: float | None
    ttft_s: float | None
    itl_s: float | None
    prefix_hits: float | None
    preemptions: float | None


def find(root: Path) -> list[Server]:
    """The servers that were started from a repository, by port: by `make serve`, an evaluation or a stage.

    Args:
        root: the repository; another checkout's servers are not this one's.
    """
    found: dict[int, Server] = {}
    parents: dict[int, int] = {}
    for process in psutil.process_iter():
        with contextlib.suppress(psutil.Error, ValueError):
            words = process.cmdline()
            if words[1:3] != ["-m", _MODULE] or Path(process.cwd()) != root.resolve():
                continue
            given = dict(itertools.pairwise(words))
            found[process.pid] = Server(
                pid=process.pid,
                started=process.create_time(),
                variant=process.environ().get(launch.VARIANT_VARIABLE),
                model=given.get("--model", ""),
                port=int(given.get("--port", 8000)),
            )
            parents[process.pid] = process.ppid()
    # A process that a server has just forked is still called like it.
    return sorted(
        (server for pid, server in found.items() if parents[pid] not in found), key=lambda server: server.port
    )


def scrape(server: Server, client: httpx.Client) -> Scrape:
    """Ask a server for its metrics.

    Raises:
        httpx.ConnectError: nothing listens there, as while it starts.
        httpx.HTTPError: it does not answer within `TIMEOUT_S`, or refuses.
        ValueError: it answers with something else.
    """
    url = f"http://127.0.0.1:{server.port}/metrics"
    answer = client.get(url, headers=launch.authorization(), timeout=TIMEOUT_S).raise_for_status()
    return read(answer.text, time.monotonic())


def read(text: str, taken: float) -> Scrape:
    """Read metrics in Prometheus' text format.

    Args:
        taken: on a clock that only goes forward, seconds.

    Raises:
        ValueError: it is something else.
    """
    values: dict[str, float] = {}
    buckets: dict[str, dict[float, float]] = {}
    for family in text_string_to_metric_families(text):
        for sample in family.samples:
            name, value = sample.name, sample.value
            if name in (_TTFT, _ITL):
                counts = buckets.setdefault(name, {})
                bound = float(sample.labels["le"])
                counts[bound] = counts.get(bound, 0.0) + value
            elif name == _KV_CACHE:
                values[name] = max(values.get(name, 0.0), value)
            else:
                values[name] = values.get(name, 0.0) + value
    return Scrape(taken, MappingProxyType(values), MappingProxyType(buckets))


class History:
    """A server's scrapes of the last `SHARE_WINDOW_S`."""

    def __init__(self) -> None:
        self._scrapes: list[Scrape] = []

    def add(self, scrape: Scrape) -> Figures:
        """What a server does, as of a scrape that follows the ones before."""
        if self._scrapes and not scrape.counts_on(self._scrapes[-1]):
            self._scrapes = []
        self._scrapes = [one for one in self._scrapes if one.taken >= scrape.taken - SHARE_WINDOW_S]
        recent = [one for one in self._scrapes if one.taken >= scrape.taken - RATE_WINDOW_S]
        before = next(iter(recent or self._scrapes[-1:]), None)
        since = next(iter(self._scrapes), None)
        self._scrapes.append(scrape)
        accepted, drafts, drafted = (f"vllm:spec_decode_num_{what}_total" for what in _DRAFTS)
        length = _share(scrape, since, accepted, drafts)
        return Figures(
            running=scrape.values.get("vllm:num_requests_running"),
            waiting=scrape.values.get("vllm:num_requests_waiting"),
            kv_cache=scrape.values.get(_KV_CACHE),
            prompt_tokens_per_s=_rate(scrape, before, "vllm:prompt_tokens_total"),
            generation_tokens_per_s=_rate(scrape, before, "vllm:generation_tokens_total"),
            acceptance_length=None if length is None else 1 + length,
            acceptance_rate=_share(scrape, since, accepted, drafted),
            ttft_s=_median(scrape, since, _TTFT),
            itl_s=_median(scrape, since, _ITL),
            prefix_hits=_share(
                scrape, since, "vllm:prefix_cache_hits_total", "vllm:prefix_cache_queries_total"
            ),
            preemptions=scrape.values.get("vllm:num_preemptions_total"),
        )


def _rate(scrape: Scrape, before: Scrape | None, name: str) -> float | None:
    if before is None or name not in scrape.values:
        return None
    return (scrape.values[name] - before.values.get(name, 0.0)) / (scrape.taken - before.taken)


def _share(scrape: Scrape, since: Scrape | None, part: str, whole: str) -> float | None:
    """Of two counters' growth since a scrape; since the server's start where there was none."""
    for then in (since.values if since else {}, {}):
        growth = scrape.values.get(whole, 0.0) - then.get(whole, 0.0)
        if growth > 0:
            return (scrape.values.get(part, 0.0) - then.get(part, 0.0)) / growth
    return None


def _median(scrape: Scrape, since: Scrape | None, name: str) -> float | None:
    """Of what a histogram gained since a scrape; since the server's start where it gained nothing."""
    for then in (since.buckets.get(name, {}) if since else {}, {}):
        gained = {
            bound: count - then.get(bound, 0.0) for bound, count in scrape.buckets.get(name, {}).items()
        }
        half = gained.get(math.inf, 0.0) / 2
        if not half:
            continue
        lower = below = 0.0
        for bound, count in sorted(gained.items()):
            if count >= half:
                return (
                    lower if math.isinf(bound) else lower + (bound - lower) * (half - below) / (count - below)
                )
            lower, below = bound, count
    return None
