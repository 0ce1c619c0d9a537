"""The start-up ledger: where the seconds go between starting a variant's server and its first token.

A start is cold (an empty compile cache), warm (the cache that a cold start left behind) or baked (the cache that the
variant's recipe packed). A variant that compiles nothing has one kind, eager. The operating system's own cache of files
is left as it is, so "cold" is about compiled code alone.
"""

import re
import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from statistics import median
from types import MappingProxyType
from typing import Any

import httpx

from slimqwen.errors import SlimqwenError
from slimqwen.evaluation import statistics
from slimqwen.progress import Progress, silent
from slimqwen.serving import baked_cache, launch
from slimqwen.serving.baked_cache import BakedCacheError, Graph
from slimqwen.variant import Variant

KINDS = ("cold", "warm", "baked", "eager")

PHASES: Mapping[str, str] = MappingProxyType(
    {
        "import": "starting the processes, importing vLLM in each, the HTTP server: the rest of the time until ready",
        "load_weights": "making the model and loading its weights, as vLLM's log states",
        "compile": "compiling the graphs, or loading them from the cache, as the compile watch states",
        "warm_up": "profiling, making the KV cache and warming up, as vLLM's log states, without the line above",
        "first_requests": "what the server asks itself before it counts as ready, as its warm-up states",
        "first_token": "from being ready to the first token of a first request",
    }
)
"""What each phase is; together they last from the start of the first process to the first token."""

_WHOLE_LOAD = re.compile(r"Model loading took \S+ GiB memory and ([\d.]+) seconds")
_PARTS_OF_LOAD = re.compile(r"(?:Initializing model|Loading weights) took ([\d.]+) seconds")
_REQUESTS = re.compile(r"Warm-up took ([\d.]+) s")
_ENGINE = re.compile(r"init engine \([^)]*\) took ([\d.]+) s")


class StartUpError(SlimqwenError):
    """vLLM's log does not state a phase, or the first request got no answer."""


def ledger(variant: Variant, rounds: int, log: Path, progress: Progress = silent) -> dict[str, Any]:
    """Start a variant's server in each of its ways, in turns and in another order every round.

    Args:
        variant: what is started.
        rounds: starts of each kind, at least 2.
        log: receives vLLM's output of every start, one after another.
        progress: hears the starts done.

    Returns:
        Kind -> its starts in rounds' order, each {"ready_seconds", "phases": {phase: seconds}, "graphs": [{"name",
        "loaded", "seconds", "why_compiled"}]}; "ready_cold_over_<kind>" -> {"value", "low", "high"}; "phases" -> what
        each is.

    Raises:
        BakedCacheError: the baked cache is not usable, or a start compiled or loaded where its kind forbids it.
        ServerFailedError: vLLM did not start.
        StartUpError: a phase cannot be told.
        TooFewItemsError: fewer than 2 rounds.
    """
    if rounds < 2:
        raise statistics.TooFewItemsError(f"{rounds} start(s) of a kind show no spread: take 2 or more")
    command = launch.resolve(variant, port=launch.free_port())
    kinds = ["eager"]
    if command.cache is not None:
        kinds = ["cold", "warm"]
        if command.cache.baked is not None:
            kinds.append("baked")
            command = launch.resolve(variant, port=command.port, require_baked=True)
    log.parent.mkdir(parents=True, exist_ok=True)
    log.unlink(missing_ok=True)
    starts: dict[str, list[dict[str, Any]]] = {kind: [] for kind in kinds}
    with tempfile.TemporaryDirectory(prefix="slimqwen-start-") as place:
        for number in range(rounds):
            # A warm start needs the cold one's cache, so only the baked one changes its place.
            for kind in kinds if number % 2 == 0 else [*kinds[2:], *kinds[:2]]:
                progress("starts", sum(map(len, starts.values())), len(kinds) * rounds)
                own_cache = Path(place) / f"cache-{number}"
                one = command.with_cache_root(own_cache) if kind in ("cold", "warm") else command
                starts[kind].append(_checked(kind, _start(one, Path(place) / "vllm.log", log), log))
    progress("starts", len(kinds) * rounds, len(kinds) * rounds)
    ready = {kind: [start["ready_seconds"] for start in starts[kind]] for kind in kinds}
    ratios = {
        f"ready_cold_over_{kind}": asdict(
            statistics.ratio_of_rounds(ready["cold"], ready[kind], in_turns=True)
        )
        for kind in kinds
        if kind in ("warm", "baked")
    }
    return {**starts, **ratios, "phases": dict(PHASES)}


def summary(starts: Sequence[Mapping[str, Any]]) -> dict[str, tuple[float, float, float]]:
    """Median, fastest and slowest in seconds of each phase, of the time until ready, and of all of it.

    The two ends are a confidence interval of the median that assumes nothing of the distribution: n starts all miss it
    on one side with probability 2^(1 - n).
    """
    columns: dict[str, list[float]] = {
        phase: [start["phases"].get(phase, 0.0) for start in starts]
        for phase in PHASES
        if "phases" in starts[0]
    }
    columns["ready"] = [start["ready_seconds"] for start in starts]
    if "phases" in starts[0]:
        columns["total"] = [sum(start["phases"].values()) for start in starts]
    return {name: (median(seconds), min(seconds), max(seconds)) for name, seconds in columns.items()}


def phases(log: str, ready_seconds: float, first_token_seconds: float) -> dict[str, float]:
    """The phases of one start, in seconds, from vLLM's log until the server was ready.

    Raises:
        StartUpError: the log does not state one.
    """
    whole = [float(seconds) for seconds in _WHOLE_LOAD.findall(log)]
    parts = [float(seconds) for seconds in _PARTS_OF_LOAD.findall(log)]
    engine = _ENGINE.search(log)
    if engine is None or not (whole or parts):
        raise StartUpError(
            "vLLM's log does not say how long loading the model and initialising the engine took; "
            "this version words it otherwise"
        )
    # A GPU's log states the whole, draft model included, a worker each; a CPU's the two parts of every model.
    loading = max(whole) if whole else sum(parts)
    compiling = sum(graph.seconds for graph in baked_cache.graphs(log))
    if "WarmUpError" in log:
        raise StartUpError("the server's warm-up failed, so its start says nothing; its log says why")
    requests = _REQUESTS.search(log)
    asking = float(requests[1]) if requests else 0.0
    return {
        "import": round(ready_seconds - loading - float(engine[1]) - asking, 2),
        "load_weights": round(loading, 2),
        "compile": round(compiling, 2),
        "warm_up": round(max(0.0, float(engine[1]) - compiling), 2),
        "first_requests": round(asking, 2),
        "first_token": round(first_token_seconds, 2),
    }


def _checked(kind: str, start: dict[str, Any], log: Path) -> dict[str, Any]:
    """The start, if it came by its graphs as its kind says."""
    graphs = start["graphs"]
    loads = kind in ("warm", "baked")
    if kind != "eager" and (not graphs or any(graph["loaded"] != loads for graph in graphs)):
        how = ", ".join(f"{graph['name']} {'loaded' if graph['loaded'] else 'compiled'}" for graph in graphs)
        raise BakedCacheError(f"a {kind} start is none: {how or 'no graph was seen'}; vLLM's log: {log}")
    return start


def _start(command: launch.ServerCommand, log: Path, kept: Path) -> dict[str, Any]:
    """One start: how long it took, phase by phase, and how it came by its graphs."""
    started = time.monotonic()
    try:
        with launch.serving(command, log=log) as server:
            ready = time.monotonic()
            said = _text(log)
            first_token = _first_token_seconds(server)
        found: Sequence[Graph] = baked_cache.graphs(_text(log))
    finally:
        with kept.open("a", encoding="utf-8") as output:
            output.write(_text(log))
    seconds = ready - started
    return {
        "ready_seconds": round(seconds, 2),
        "phases": phases(said, seconds, first_token),
        "graphs": [asdict(graph) for graph in found],
    }


def _first_token_seconds(server: launch.RunningServer) -> float:
    """Seconds that a first request for one token takes."""
    body = {"model": server.model, "prompt": "Once upon a time", "max_tokens": 1, "temperature": 0}
    asked = time.monotonic()
    try:
        # trust_env: a proxy of the shell must not stand between.
        httpx.post(
            f"{server.base_url}/v1/completions",
            json=body,
            headers=launch.authorization(),
            timeout=600,
            trust_env=False,
        ).raise_for_status()
    except httpx.HTTPError as error:
        raise StartUpError(
            f"the server did not answer its first request ({error}); see {server.log}"
        ) from error
    return time.monotonic() - asked


def _text(log: Path) -> str:
    return log.read_text(encoding="utf-8", errors="replace") if log.is_file() else ""
