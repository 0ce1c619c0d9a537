"""Start-up: seconds from starting a variant's server until it is ready, by phase.

A start is cold (with an empty compile cache) or baked (with the cache that the variant's recipe packed). A variant that
compiles nothing has one kind of start, eager. The operating system's file cache is not cleared, so "cold" refers only
to compiled code.
"""

import re
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict
from functools import partial
from pathlib import Path
from statistics import median
from types import MappingProxyType
from typing import ClassVar, Self

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
from slimqwen.serving.server import free_port, run_server
from slimqwen.stats import intervals
from slimqwen.variant import Variant
from slimqwen.vllm_plugin import warm_up

KINDS = ("cold", "baked", "eager")

PHASES: Mapping[str, str] = MappingProxyType(
    {
        "import": "all other time until ready: starting processes, importing vLLM in each, starting the HTTP server",
        "load_weights": "building the model and loading its weights, from vLLM's log",
        "compile": "compiling the graphs, or loading them from the cache, from the compile watch",
        "warm_up": "profiling, allocating the KV cache and warming up the engine, from vLLM's log, without compiling",
        "first_requests": "the server's warm-up requests before it counts as ready, from its log",
    }
)
"""Meaning of each phase; the phases add up to the time from the start of the first process until readiness."""

_TOTAL_LOAD = re.compile(r"Model loading took \S+ GiB memory and ([\d.]+) seconds")
_PARTS_OF_LOAD = re.compile(r"(?:Initializing model|Loading weights) took ([\d.]+) seconds")
_REQUESTS = re.compile(r"Warm-up took ([\d.]+) s")
_ENGINE = re.compile(r"init engine \([^)]*\) took ([\d.]+) s")


class StartGraph(Block):
    """One compiled graph of a start."""

    name: str = Field(min_length=1)
    loaded: bool = Field(description="Whether it was loaded from the compile cache; if not, compiled.")
    seconds: NonNegative
    why_compiled: str


class Start(Block):
    """One start of the server."""

    ready_seconds: NonNegative = Field(description="From process start to the first status 200 of /health.")
    phases: dict[str, NonNegative] = Field(description="Seconds by phase.")
    graphs: tuple[StartGraph, ...]


Starts = tuple[Start, ...]


class StartUp(Record):
    """Seconds of a variant's server starts by phase: with a cold or a baked compile cache, or eager (uncompiled)."""

    kind: ClassVar = "start_up"
    version: ClassVar = 2
    verb: ClassVar = "bench startup"
    leaderboard_columns: ClassVar[Mapping[str, str]] = {"ready_seconds": "start-up until ready, s"}

    cold: Starts | None = Field(default=None, min_length=2, description="Starts with an empty compile cache.")
    baked: Starts | None = Field(
        default=None, min_length=2, description="Starts with the cache that the recipe packed."
    )
    eager: Starts | None = Field(
        default=None, min_length=2, description="Starts of a variant that compiles nothing."
    )
    ready_cold_over_baked: Ratio | None = Field(
        default=None,
        description="Time until ready of cold over that of baked starts, geometric mean over rounds.",
    )
    phases: dict[str, str] = Field(description="Meaning of each phase.")

    @model_validator(mode="after")
    def _has_starts(self) -> Self:
        if not (self.eager or self.cold):
            raise ValueError("a record needs starts of kind cold or eager")
        return self

    @property
    def starts(self) -> Mapping[str, Starts]:
        """The measured starts by kind (cold, baked or eager), in the order of `KINDS`."""
        return {kind: starts for kind in KINDS if (starts := getattr(self, kind)) is not None}

    def figures(self) -> Mapping[str, Figure]:
        """Every number of the record by name; `ready_seconds` is of baked starts, else of eager, else of cold ones."""
        starts = self.baked or self.eager or self.cold
        assert starts
        middle, low, high = summarise_starts(starts)["ready"]
        return {**super().figures(), "ready_seconds": Figure(middle, "s", low=low, high=high)}

    def tables(self, path: Path) -> list[Table]:
        """Table of the seconds of each phase by kind of start."""
        meanings = {**self.phases, "ready": "until the server is ready: all phases"}
        columns: dict[str, Callable[[str], object]] = {
            "phase": lambda phase: phase.replace("_", " "),
            "meaning": lambda phase: meanings[phase],
        }
        for kind, starts in self.starts.items():
            columns[f"{kind}, s"] = partial(_format_seconds, summarise_starts(starts))
        count = min(map(len, self.starts.values()))
        notes = [
            f"Medians of {count} starts of each kind in turns; in brackets the fastest and the slowest, a "
            f"{1 - 2 ** (1 - count):.0%} interval of the median."
        ]
        if self.ready_cold_over_baked:
            notes.append(f"Until ready, cold / baked: {self.ready_cold_over_baked:.2f}.")
        notes += provenance.source_notes(self, path)
        return [Table.from_rows(f"Start-up of {self.variant}", meanings, columns, *notes, text_columns=2)]


def measure_start_up(
    variant: Variant,
    rounds: int,
    log: Path,
    *,
    command: Sequence[str],
    even_if_busy: bool = False,
    progress: Progress = silent,
) -> Path:
    """Time starts of a variant's server of each kind that it has, in turns, and write the record.

    Args:
        variant: variant whose server is started and ended again.
        rounds: number of starts of each kind, at least 2.
        log: file that collects the logs of all starts; it is emptied first.
        command: command line that the record states as its origin.
        even_if_busy: whether to measure on a busy host; the record is then marked, and never compared.
        progress: receives (activity, done, total) in starts.

    Returns:
        Path of the record.

    Raises:
        BenchError: a cold start loaded a graph, a baked one compiled a graph, or vLLM's log lacks a phase.
        HostBusyError: the host was too busy in all attempts at a start.
        ServingError: the baked cache is not usable, or vLLM did not start.
        TooFewItemsError: `rounds` is below 2.
    """
    if rounds < 2:
        raise intervals.TooFewItemsError(
            f"--rounds {rounds} shows no spread between starts; use --rounds 2 or more"
        )
    started = provenance.utc_now()
    server_command = ServerCommand.resolve(variant, port=free_port())
    kinds = ["eager"]
    if server_command.cache is not None:
        kinds = ["cold"]
        if server_command.cache.baked is not None:
            kinds.append("baked")
            server_command = ServerCommand.resolve(
                variant.with_lines({"REQUIRE_BAKED": "1"}), port=server_command.port
            )
    log.parent.mkdir(parents=True, exist_ok=True)
    log.unlink(missing_ok=True)
    starts: dict[str, list[Start]] = {kind: [] for kind in kinds}
    loads: list[HostLoad] = []
    for number in range(rounds):
        for kind in kinds if number % 2 == 0 else reversed(kinds):
            progress("starts", len(loads), len(kinds) * rounds)
            start, load = host_load.retry_until_idle(
                partial(_time_round, kind, server_command, log),
                f"{kind} start {number + 1}",
                even_if_busy=even_if_busy,
            )
            starts[kind].append(start)
            loads.append(load)
    progress("starts", len(loads), len(loads))
    ready = {kind: [start.ready_seconds for start in series] for kind, series in starts.items()}
    record = StartUp.model_validate(
        {
            "variant": variant.name,
            **starts,
            "ready_cold_over_baked": intervals.ratio_of_rounds(ready["cold"], ready["baked"], in_turns=True)
            if "baked" in ready
            else None,
            "phases": dict(PHASES),
            "provenance": provenance.of_served_variant(
                variant, command, started, host_load=host_load.highest_load(loads)
            ),
        }
    )
    return store.write_record(variant.folder, record)


def summarise_starts(starts: Starts) -> dict[str, tuple[float, float, float]]:
    """Median, fastest and slowest seconds of each phase, and of the time until ready under the name "ready".

    Fastest and slowest are a distribution-free confidence interval of the median: all n starts lie on one side of the
    true median with probability 2^(1 - n).
    """
    columns = {phase: [start.phases[phase] for start in starts] for phase in starts[0].phases}
    columns["ready"] = [start.ready_seconds for start in starts]
    return {name: (median(seconds), min(seconds), max(seconds)) for name, seconds in columns.items()}


def _format_seconds(summary: Mapping[str, tuple[float, float, float]], phase: str) -> str:
    middle, low, high = summary[phase]
    return f"{middle:.1f} [{low:.1f}, {high:.1f}]"


def split_phases(log: str, ready_seconds: float) -> dict[str, float]:
    """Split one start into phases: name of the phase (`PHASES`) -> its seconds.

    Args:
        log: text of vLLM's log until the server was ready.
        ready_seconds: time from the start of the process until the server was ready.

    Raises:
        BenchError: the log lacks a phase, or says that the warm-up failed.
    """
    total_load_s = [float(seconds) for seconds in _TOTAL_LOAD.findall(log)]
    part_loads_s = [float(seconds) for seconds in _PARTS_OF_LOAD.findall(log)]
    engine = _ENGINE.search(log)
    if engine is None or not (total_load_s or part_loads_s):
        raise BenchError(
            "vLLM's log does not say how long loading the model and initialising the engine took; "
            "run `make install` for the vLLM version that Slimqwen needs"
        )
    # On a GPU each worker logs the total with the draft model; on a CPU vLLM logs two parts for every model.
    loading = max(total_load_s) if total_load_s else sum(part_loads_s)
    compiling = sum(graph.seconds for graph in baked_cache.read_graphs(log))
    if warm_up.FAILED in log:
        raise BenchError(
            "the server's warm-up requests failed, so its start cannot be timed; read why in its log, below logs/"
        )
    requests_line = _REQUESTS.search(log)
    requests_s = float(requests_line[1]) if requests_line else 0.0
    import_s = ready_seconds - loading - float(engine[1]) - requests_s
    if import_s < 0:
        raise BenchError(
            "loading and initialising took longer in vLLM's log than the whole start; run `make install` for the vLLM "
            "version that Slimqwen needs"
        )
    return {
        "import": round(import_s, 2),
        "load_weights": round(loading, 2),
        "compile": round(compiling, 2),
        "warm_up": round(max(0.0, float(engine[1]) - compiling), 2),
        "first_requests": round(requests_s, 2),
    }


def _time_round(kind: str, command: ServerCommand, log: Path, watch: Watch) -> Start:
    """Time one start of a kind; a cold start gets a new, empty compile cache."""
    with tempfile.TemporaryDirectory(prefix="slimqwen-start-") as folder:
        if kind == "cold":
            command = command.with_cache_root(Path(folder) / "cache")
        with watch.section():
            start = _time_start(command, Path(folder) / "vllm.log", log)
    if kind != "eager" and not start.graphs:
        raise BenchError(
            f"expected a {kind} start, but vLLM's log names no compiled graph; read why in {log}"
        )
    for graph in start.graphs:
        if kind != "eager" and graph.loaded != (kind == "baked"):
            how = "was loaded from the cache" if graph.loaded else "was compiled"
            raise BenchError(
                f"expected a {kind} start, but graph {graph.name} {how}; read why in vLLM's log: {log}"
            )
    return start


def _time_start(command: ServerCommand, log: Path, all_logs: Path) -> Start:
    """Time one start, whose log is written to `log` and appended to `all_logs`; read its phases and graphs."""
    started = time.monotonic()
    try:
        with run_server(command, log=log, kept_log=all_logs):
            ready_seconds = time.monotonic() - started
            log_text = _text(log)
    finally:
        with all_logs.open("a", encoding="utf-8") as output:
            output.write(_text(log))
    return Start(
        ready_seconds=round(ready_seconds, 2),
        phases=split_phases(log_text, ready_seconds),
        graphs=tuple(StartGraph(**asdict(graph)) for graph in baked_cache.read_graphs(log_text)),
    )


def _text(log: Path) -> str:
    return log.read_text(encoding="utf-8", errors="replace") if log.is_file() else ""
