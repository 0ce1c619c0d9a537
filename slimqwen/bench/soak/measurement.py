"""Measurement of a soak: the load, samples of the server's processes meanwhile, and the verdict.

There are more clients than the server runs sequences at once. Memory is what all processes of the server hold resident.
"""

import asyncio
import itertools
import math
import resource
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import psutil
from scipy import stats

from slimqwen.bench import BenchError
from slimqwen.bench.client import counters, unfinished_requests
from slimqwen.bench.soak.load import EXPECTED, PATHS, TIMEOUT_S, leave_streams, load
from slimqwen.bench.soak.record import Growth, Limits, OpenFiles, ProcessGrowth, Resident, Soak
from slimqwen.progress import Progress, silent
from slimqwen.records import provenance, store
from slimqwen.serving.command import ServerCommand
from slimqwen.serving.server import free_port, run_server
from slimqwen.serving.shared_server import ServerLostError, max_model_len
from slimqwen.stats.verdict import Verdict
from slimqwen.variant import Variant
from slimqwen.vllm_plugin.api_key import authorization

MAX_GROWTH_MIB_PER_HOUR = 30
"""Largest growth of all processes together after the first third. Measured were 4, the noise of allocators: 0.4 MiB in
ten minutes. A leak of 2 KiB a request would be 30 MiB an hour at four requests a second."""

NOISE_MIB = 2
"""Growth after the first third up to which no slope is a fault. Allocators take memory in steps, so samples depend on
each other and the interval of the slope is too narrow."""

MAX_NEW_FILES = 8
"""Largest growth of open files, sockets included: connections are kept alive for the next request."""

CLIENTS_PER_SEQUENCE = 4
"""Clients for each sequence that the server runs at once: three of them wait."""

DEFAULT_SEQUENCES = 256
"""Least number of sequences that vLLM runs at once if no flag limits them (`EngineArgs.get_batch_defaults`)."""

SHORTEST_S = 60
"""Shortest soak, seconds."""

_SAMPLE_EVERY_S = 5
_SETTLED_SHARE = 1 / 3
"""Share of the time that allocators and caches need to settle."""

_OWN_FILES = 128
"""Open files of this process beside the clients' connections."""

_LEFT_TOKENS = 200
"""Length of a stream that its client leaves in the middle, tokens."""

_RUNNING, _WAITING, _KV_CACHE = (
    f"vllm:{name}" for name in ("num_requests_running", "num_requests_waiting", "kv_cache_usage_perc")
)


@dataclass(frozen=True)
class Sample:
    """Resident memory of each process of a server, MiB, and the time since the first sample."""

    seconds: float
    resident_mib: tuple[float, ...]


def write(
    variant: Variant, seconds: float, log: Path, *, command: Sequence[str], progress: Progress = silent
) -> Path:
    """Start a variant's server, load it, judge its memory and write the record.

    Raises:
        BenchError: the duration is too short, or the system allows too few open files.
        ServingError: the server did not start.
        ServerLostError: one of its processes ended under the load.
    """
    if not seconds >= SHORTEST_S:
        raise BenchError(
            f"a soak of {seconds:g} s is too short to judge; give it {SHORTEST_S} s or more, 15 minutes by default"
        )
    started = provenance.utc_now()
    server_command = ServerCommand.resolve(variant, port=free_port())
    clients = CLIENTS_PER_SEQUENCE * int(server_command.flags.get("max-num-seqs") or DEFAULT_SEQUENCES)
    allow_connections(clients)
    with run_server(server_command, log=log) as server:
        figures = load_and_watch(server.base_url, server.pid, seconds, clients, progress)
    record = Soak(
        variant=variant.name, provenance=provenance.of_served_variant(variant, command, started), **figures
    )
    return store.write(variant.root / "results", record)


def load_and_watch(
    url: str, pid: int, seconds: float, clients: int, progress: Progress = silent
) -> dict[str, Any]:
    """Load a server that is ready, for any time, and judge its memory.

    Returns:
        The fields of `Soak` except variant and provenance.

    Raises:
        BenchError: the time is too short for two samples after the first third, or the server has no counters.
        ServerLostError: one of its processes ended.
    """
    try:
        family = [psutil.Process(pid), *psutil.Process(pid).children(recursive=True)]
        # The name of a program, not its path; vLLM's processes give themselves titles.
        programs = [Path(next(iter(process.cmdline()), "")).name or process.name() for process in family[1:]]
        before = _open_files(family)
        _require_metrics(url)
        chats = _accepts_chats(url)
        paths = PATHS if chats else PATHS[:1]
        samples, streams_left, outcomes = asyncio.run(_soak(url, family, seconds, clients, paths, progress))
        unfinished, kv_cache_used, ready = _at_rest(url)
        files = OpenFiles(before=before, after=_open_files(family))
    except (psutil.Error, httpx.HTTPError) as error:
        raise ServerLostError(f"the server was lost under the load ({error!r}); its log says why") from None
    settled = [sample for sample in samples if sample.seconds > seconds * _SETTLED_SHARE]
    if len(settled) < 2:
        raise BenchError(
            f"{len(samples)} samples of memory in {seconds:g} s are too few; give the soak longer"
        )
    total = growth([(sample.seconds, sum(sample.resident_mib)) for sample in settled])
    by_process = [
        growth([(sample.seconds, sample.resident_mib[index]) for sample in settled])
        for index in range(len(family))
    ]
    resident = Resident(settled=sum(settled[0].resident_mib), end=sum(settled[-1].resident_mib))
    growth_mib, new_files_count = resident.end - resident.settled, files.after - files.before
    conditions = {
        "no request was answered": not outcomes["answered"],
        "no stream was open to be left": not streams_left,
        f"memory grew by {growth_mib:.1f} MiB": total.low > MAX_GROWTH_MIB_PER_HOUR
        and growth_mib > NOISE_MIB,
        f"{new_files_count} more files are open": new_files_count > MAX_NEW_FILES,
        f"{unfinished:g} requests never ended": unfinished > 0,
        "the KV cache is not empty": kv_cache_used > 0,
        "the server is not ready": not ready,
    }
    unexpected = sorted((outcome, count) for outcome, count in outcomes.items() if outcome not in EXPECTED)
    faults = [f"{count} requests: {outcome}" for outcome, count in unexpected]
    faults += [fault for fault, is_violated in conditions.items() if is_violated]
    return {
        "seconds": samples[-1].seconds,
        "clients": clients,
        "chats": chats,
        "requests": dict(outcomes),
        "streams_left": streams_left,
        "resident_mib": resident,
        "growth_mib_per_hour": total,
        "by_process": tuple(
            ProcessGrowth(process=name, **each.as_json())
            for name, each in zip(("API server", *programs), by_process, strict=True)
        ),
        "open_files": files,
        "kv_cache_used": kv_cache_used,
        "limits": Limits(
            growth_mib_per_hour=MAX_GROWTH_MIB_PER_HOUR, noise_mib=NOISE_MIB, new_files=MAX_NEW_FILES
        ),
        "faults": tuple(faults),
        "verdict": judge(faults, total),
    }


def judge(faults: Sequence[str], total: Growth) -> Verdict:
    """Fail where there is a fault, inconclusive where the interval of growth reaches beyond its limit, else pass."""
    if faults:
        return Verdict.FAIL
    return Verdict.PASS if total.high <= MAX_GROWTH_MIB_PER_HOUR else Verdict.INCONCLUSIVE


def growth(points: Sequence[tuple[float, float]]) -> Growth:
    """Growth of a quantity, MiB an hour.

    Args:
        points: seconds and MiB.

    Raises:
        BenchError: the points are too few for an interval.
    """
    hours, values = [seconds / 3600 for seconds, _ in points], [mib for _, mib in points]
    slope = stats.theilslopes(values, hours)
    if not all(map(math.isfinite, (slope.slope, slope.low_slope, slope.high_slope))):
        raise BenchError(f"{len(points)} samples of memory are too few; give the soak longer")
    return Growth(value=float(slope.slope), low=float(slope.low_slope), high=float(slope.high_slope))


def allow_connections(clients: int) -> None:
    """Raise this process's limit of open files to the need of its clients.

    Raises:
        BenchError: the system forbids it.
    """
    needed = clients + _OWN_FILES
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if hard != resource.RLIM_INFINITY and hard < needed:
        raise BenchError(
            f"{clients} clients need {needed} open files and {hard} are allowed; raise the limit (`ulimit -Hn`), or "
            "lower VLLM_MAX_NUM_SEQS in config.env"
        )
    if soft != resource.RLIM_INFINITY and soft < needed:
        resource.setrlimit(resource.RLIMIT_NOFILE, (needed, hard))


async def _soak(
    url: str,
    family: Sequence[psutil.Process],
    seconds: float,
    clients: int,
    paths: Sequence[str],
    progress: Progress,
) -> tuple[list[Sample], int, Counter[str]]:
    until = time.monotonic() + seconds

    numbers = itertools.takewhile(lambda _: time.monotonic() < until, itertools.count())
    return await asyncio.gather(
        _watch(family, seconds, progress),
        leave_streams(url, until, min(_LEFT_TOKENS, max_model_len(url) // 2)),
        load(url, numbers, clients, paths),
    )


async def _watch(family: Sequence[psutil.Process], seconds: float, progress: Progress) -> list[Sample]:
    samples: list[Sample] = []
    began = time.monotonic()
    while (now := time.monotonic() - began) < seconds:
        # A zombie still reports memory, as zero.
        if ended := [process for process in family if process.status() == psutil.STATUS_ZOMBIE]:
            raise psutil.NoSuchProcess(ended[0].pid)
        resident = tuple(process.memory_info().rss / 2**20 for process in family)
        samples.append(Sample(now, resident))
        progress("soaking, seconds", int(now), int(seconds))
        await asyncio.sleep(min(_SAMPLE_EVERY_S, seconds / 20))
    progress("soaking, seconds", int(seconds), int(seconds))
    return samples


def _open_files(family: Sequence[psutil.Process]) -> int:
    return sum(process.num_fds() for process in family)


def _accepts_chats(url: str) -> bool:
    """Whether the server accepts chats: a base model's checkpoint has no template for them."""
    with httpx.Client(base_url=url, timeout=TIMEOUT_S, trust_env=False, headers=authorization()) as http:
        chat = {"messages": [{"role": "user", "content": "Hello"}], "max_tokens": 1}
        return http.post(PATHS[1], json=chat).status_code == httpx.codes.OK


def _require_metrics(url: str) -> None:
    values = counters(url)
    if missing := [name for name in (_RUNNING, _WAITING, _KV_CACHE) if name not in values]:
        raise BenchError(
            f"/metrics has no {missing[0]}, which shows what a soak leaves behind; take VLLM_DISABLE_LOG_STATS out of "
            "config.env"
        )


def _at_rest(url: str) -> tuple[float, float, bool]:
    """After the load: number of unfinished requests, share of the KV cache in use, readiness."""
    unfinished, kv_cache_used = unfinished_requests(url), counters(url)[_KV_CACHE]
    ready = httpx.get(f"{url}/health", timeout=TIMEOUT_S, trust_env=False).status_code == httpx.codes.OK
    return unfinished, kv_cache_used, ready
