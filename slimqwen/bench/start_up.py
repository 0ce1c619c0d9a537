"""Start-up: seconds between starting a variant's server and its first token, phase by phase.

A start is cold (an empty compile cache), warm (the cache that a cold start left behind) or baked (the cache that the
variant's recipe packed). A variant that compiles nothing has one kind of start, eager. The operating system's own cache
of files is left as it is, so "cold" is about compiled code alone.
"""

import re
import shutil
import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from functools import partial
from pathlib import Path
from statistics import median
from types import MappingProxyType
from typing import ClassVar, Self

import httpx
from pydantic import Field, model_validator

from slimqwen import host_load
from slimqwen.bench import BenchError
from slimqwen.host_load import HostLoad, Watch
from slimqwen.progress import Progress, silent
from slimqwen.records import provenance, store
from slimqwen.records.record import Block, Figure, NonNegative, Ratio, Record
from slimqwen.records.table import Table
from slimqwen.serving import baked_cache
from slimqwen.serving.command import ServerCommand
from slimqwen.serving.http_client import open_client
from slimqwen.serving.server import RunningServer, free_port, run_server
from slimqwen.stats import intervals
from slimqwen.variant import Variant
from slimqwen.vllm_plugin import warm_up

KINDS = ("cold", "warm", "baked", "eager")

PHASES: Mapping[str, str] = MappingProxyType(
    {
        "import": "starting the processes, importing vLLM in each, the HTTP server: the rest of the time until ready",
        "load_weights": "building the model and loading its weights, from vLLM's log",
        "compile": "compiling the graphs, or loading them from the cache, from the compile watch",
        "warm_up": "profiling, allocating the KV cache and warming up the engine, from vLLM's log, without compiling",
        "first_requests": "the server's warm-up requests before it counts as ready, from its log",
        "first_token": "from readiness to the first token of the first request",
    }
)
"""Meaning of each phase; together they last from the start of the first process to the first token."""

_TIMEOUT_S = 600

_TOTAL_LOAD = re.compile(r"Model loading took \S+ GiB memory and ([\d.]+) seconds")
_PARTS_OF_LOAD = re.compile(r"(?:Initializing model|Loading weights) took ([\d.]+) seconds")
_REQUESTS = re.compile(r"Warm-up took ([\d.]+) s")
_ENGINE = re.compile(r"init engine \([^)]*\) took ([\d.]+) s")


class Graph(Block):
    """One compiled graph of a start."""

    name: str = Field(min_length=1)
    loaded: bool = Field(description="Loaded from the compile cache; else it was compiled.")
    seconds: NonNegative
    why_compiled: str


class Start(Block):
    """One start of the server."""

    ready_seconds: NonNegative = Field(
        description="From the start of the process to the first good answer of /health."
    )
    phases: dict[str, NonNegative] = Field(default={}, description="Seconds by phase; empty in old records.")
    graphs: tuple[Graph, ...]


Starts = tuple[Start, ...]


class StartUp(Record):
    """Seconds of a variant's starts, phase by phase, by what the compile cache held."""

    kind: ClassVar = "start_up"
    folder: ClassVar = "results"
    verb: ClassVar = "bench startup"
    leaderboard_columns: ClassVar[Mapping[str, str]] = {"ready_seconds": "start-up until ready, s"}

    cold: Starts | None = Field(default=None, min_length=2, description="Starts with an empty compile cache.")
    warm: Starts | None = Field(
        default=None, min_length=2, description="Starts with the cache that a cold start left behind."
    )
    baked: Starts | None = Field(
        default=None, min_length=2, description="Starts with the cache that the recipe packed."
    )
    eager: Starts | None = Field(
        default=None, min_length=2, description="Starts of a variant that compiles nothing."
    )
    ready_cold_over_warm: Ratio | None = Field(
        default=None, description="Geometric mean over rounds; before 2026-11-22, of medians."
    )
    ready_cold_over_baked: Ratio | None = Field(
        default=None, description="Geometric mean over rounds; before 2026-11-22, of medians."
    )
    phases: dict[str, str] = Field(default={}, description="Meaning of each phase.")

    @model_validator(mode="after")
    def _has_starts(self) -> Self:
        if not (self.eager or (self.cold and (self.warm or self.baked))):
            raise ValueError("expected cold and warm or baked starts, or eager ones")
        return self

    @property
    def starts(self) -> Mapping[str, Starts]:
        """The starts by kind, in the order of `KINDS`."""
        return {kind: starts for kind in KINDS if (starts := getattr(self, kind)) is not None}

    def figures(self) -> Mapping[str, Figure]:
        """All numbers, and `ready_seconds` of the way the variant starts: baked, else eager, else cold."""
        starts = self.baked or self.eager or self.cold
        assert starts
        middle, low, high = summary(starts)["ready"]
        return {**super().figures(), "ready_seconds": Figure(middle, "s", low=low, high=high)}

    def tables(self, path: Path) -> list[Table]:
        """Seconds of each phase by kind of start."""
        meanings = {
            **self.phases,
            "ready": "until the server answers: all but the first token",
            "total": "until the first token",
        }
        columns = {kind: summary(starts) for kind, starts in self.starts.items()}

        def cell(middle: float, low: float, high: float) -> str:
            return f"{middle:.1f} [{low:.1f}, {high:.1f}]"

        rows = tuple(
            (phase.replace("_", " "), meanings[phase], *(cell(*column[phase]) for column in columns.values()))
            for phase in next(iter(columns.values()))
        )
        count = min(map(len, self.starts.values()))
        notes = [
            f"Medians of {count} starts of each kind in turns; in brackets the fastest and the slowest, a "
            f"{1 - 2 ** (1 - count):.0%} interval of the median."
        ]
        for kind, ratio in (("warm", self.ready_cold_over_warm), ("baked", self.ready_cold_over_baked)):
            if ratio:
                notes.append(f"Until ready, cold / {kind}: {ratio:.2f}.")
        headings = ("phase", "meaning", *(f"{kind}, s" for kind in columns))
        title = f"Start-up of {self.variant}"
        return [Table(title, headings, rows, (*notes, *provenance.source_notes(self, path)), text_columns=2)]


def write(
    variant: Variant,
    rounds: int,
    log: Path,
    *,
    command: Sequence[str],
    even_if_busy: bool = False,
    progress: Progress = silent,
) -> Path:
    """Start a variant's server in all of its kinds of start, in turns, and write the record.

    Args:
        log: file that collects the logs of all starts.

    Raises:
        BenchError: a start compiled or loaded where its kind forbids it, or vLLM's log lacks a phase.
        HostBusyError: the host was too busy in all attempts at a start.
        ServingError: the baked cache is not usable, or vLLM did not start.
        TooFewItemsError: fewer than 2 rounds.
    """
    if rounds < 2:
        raise intervals.TooFewItemsError(f"{rounds} start(s) of a kind show no spread: take 2 or more")
    started = provenance.utc_now()
    server_command = ServerCommand.resolve(variant, port=free_port())
    kinds = ["eager"]
    if server_command.cache is not None:
        kinds = ["cold", "warm"]
        if server_command.cache.baked is not None:
            kinds.append("baked")
            server_command = ServerCommand.resolve(
                variant.with_lines({"REQUIRE_BAKED": "1"}), port=server_command.port
            )
    log.parent.mkdir(parents=True, exist_ok=True)
    log.unlink(missing_ok=True)
    starts: dict[str, list[Start]] = {kind: [] for kind in kinds}
    loads: list[HostLoad] = []
    with tempfile.TemporaryDirectory(prefix="slimqwen-start-") as folder:
        for number in range(rounds):
            # A warm start needs the cold one's cache, so only the baked one changes its place in the order.
            for kind in kinds if number % 2 == 0 else [*kinds[2:], *kinds[:2]]:
                progress("starts", len(loads), len(kinds) * rounds)
                start, load = host_load.retry_until_idle(
                    partial(_round, kind, server_command, Path(folder), number, log),
                    f"{kind} start {number + 1}",
                    even_if_busy=even_if_busy,
                )
                starts[kind].append(start)
                loads.append(load)
    progress("starts", len(kinds) * rounds, len(kinds) * rounds)
    ready = {kind: [start.ready_seconds for start in series] for kind, series in starts.items()}
    ratios = {
        f"ready_cold_over_{kind}": intervals.ratio_of_rounds(ready["cold"], ready[kind], in_turns=True)
        for kind in ("warm", "baked")
        if kind in ready
    }
    record = StartUp.model_validate(
        {
            "variant": variant.name,
            **starts,
            **ratios,
            "phases": dict(PHASES),
            "provenance": provenance.of_served_variant(
                variant, command, started, host_load=host_load.highest_load(loads)
            ),
        }
    )
    return store.write_record(variant.root / "results", record)


def summary(starts: Starts) -> dict[str, tuple[float, float, float]]:
    """Median, fastest and slowest seconds of each phase, of the time until ready, and of the total.

    The two ends are a distribution-free confidence interval of the median: n starts all miss it on one side with
    probability 2^(1 - n).
    """
    columns: dict[str, list[float]] = {
        phase: [start.phases[phase] for start in starts] for phase in starts[0].phases
    }
    columns["ready"] = [start.ready_seconds for start in starts]
    if starts[0].phases:
        columns["total"] = [sum(start.phases.values()) for start in starts]
    return {name: (median(seconds), min(seconds), max(seconds)) for name, seconds in columns.items()}


def phases(log: str, ready_seconds: float, first_token_seconds: float) -> dict[str, float]:
    """Seconds of each phase of one start.

    Args:
        log: vLLM's log until the server was ready.
        ready_seconds: from the start of the process until the server was ready.

    Raises:
        BenchError: the log lacks a phase, or says that the warm-up failed.
    """
    total_load_s = [float(seconds) for seconds in _TOTAL_LOAD.findall(log)]
    part_loads_s = [float(seconds) for seconds in _PARTS_OF_LOAD.findall(log)]
    engine = _ENGINE.search(log)
    if engine is None or not (total_load_s or part_loads_s):
        raise BenchError(
            "vLLM's log does not say how long loading the model and initialising the engine took; "
            "its version may differ"
        )
    # On a GPU each worker logs the total, draft model included; on a CPU vLLM logs the two parts of every model.
    loading = max(total_load_s) if total_load_s else sum(part_loads_s)
    compiling = sum(graph.seconds for graph in baked_cache.read_graphs(log))
    if warm_up.FAILED in log:
        raise BenchError("the server's warm-up failed, so its start is no measurement; its log says why")
    requests_line = _REQUESTS.search(log)
    requests_s = float(requests_line[1]) if requests_line else 0.0
    import_s = ready_seconds - loading - float(engine[1]) - requests_s
    if import_s < 0:
        raise BenchError("the phases in vLLM's log are longer than the start; its version may log one twice")
    return {
        "import": round(import_s, 2),
        "load_weights": round(loading, 2),
        "compile": round(compiling, 2),
        "warm_up": round(max(0.0, float(engine[1]) - compiling), 2),
        "first_requests": round(requests_s, 2),
        "first_token": round(first_token_seconds, 2),
    }


def _check_graphs(kind: str, start: Start, log: Path) -> None:
    if kind == "eager":
        return
    if not start.graphs:
        raise BenchError(f"expected a {kind} start, but vLLM's log names no graph; log: {log}")
    must_load = kind in ("warm", "baked")
    for graph in start.graphs:
        if graph.loaded != must_load:
            how = "was compiled" if must_load else "was loaded from the cache"
            raise BenchError(f"expected a {kind} start, but graph {graph.name} {how}; vLLM's log: {log}")


def _round(kind: str, command: ServerCommand, folder: Path, number: int, log: Path, watch: Watch) -> Start:
    if kind in ("cold", "warm"):
        root = folder / f"cache-{number}"
        if kind == "cold":
            shutil.rmtree(root, ignore_errors=True)
        command = command.with_cache_root(root)
    with watch.section():
        start = _start(command, folder / "vllm.log", log)
    _check_graphs(kind, start, log)
    return start


def _start(command: ServerCommand, log: Path, all_logs: Path) -> Start:
    """One start, with its phases and its graphs; its log is added to those of all starts."""
    started = time.monotonic()
    try:
        with run_server(command, log=log) as server:
            ready_seconds = time.monotonic() - started
            log_text = _text(log)
            first_token_seconds = time_first_token(server)
        graphs = baked_cache.read_graphs(_text(log))
    finally:
        with all_logs.open("a", encoding="utf-8") as output:
            output.write(_text(log))
    return Start(
        ready_seconds=round(ready_seconds, 2),
        phases=phases(log_text, ready_seconds, first_token_seconds),
        graphs=tuple(Graph(**asdict(graph)) for graph in graphs),
    )


def time_first_token(server: RunningServer) -> float:
    """Seconds of a completion of one token.

    Raises:
        BenchError: the server did not answer.
    """
    body = {"model": server.model, "prompt": "Once upon a time", "max_tokens": 1, "temperature": 0}
    with open_client(_TIMEOUT_S, server.base_url) as client:
        began = time.monotonic()
        try:
            client.post("/v1/completions", json=body).raise_for_status()
        except httpx.HTTPError as error:
            raise BenchError(f"{server.base_url} did not answer ({error}); its log: {server.log}") from error
        return time.monotonic() - began


def _text(log: Path) -> str:
    return log.read_text(encoding="utf-8", errors="replace") if log.is_file() else ""
