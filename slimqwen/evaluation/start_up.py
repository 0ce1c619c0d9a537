"""How long a variant takes to be ready: with its baked compile cache against a cold one, in turns."""

import tempfile
import time
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from slimqwen.evaluation import statistics
from slimqwen.progress import Progress, silent
from slimqwen.serving import baked_cache, launch
from slimqwen.serving.baked_cache import BakedCacheError, Graph


def cold_against_baked(
    command: launch.ServerCommand, rounds: int, log: Path, progress: Progress = silent
) -> dict[str, Any]:
    """Start a variant's server cold and from its baked cache, in turns, the two in another order every round.

    Args:
        command: of a variant whose baked cache is required.
        rounds: starts of each kind, at least 2.
        log: receives vLLM's output of every start, one after another.
        progress: hears the starts done.

    Returns:
        {"cold", "baked": [{"ready_seconds", "graphs": [{"name", "loaded", "seconds", "why_compiled"}]}] in rounds'
        order, "ready_cold_over_baked": {"value", "low", "high"}}.

    Raises:
        BakedCacheError: the cache is not usable, a start from it compiled, or a cold start loaded.
        ServerFailedError: vLLM did not start.
    """
    log.parent.mkdir(parents=True, exist_ok=True)
    log.unlink(missing_ok=True)
    starts: dict[str, list[dict[str, Any]]] = {"cold": [], "baked": []}
    with tempfile.TemporaryDirectory(prefix="slimqwen-start-") as place:
        for number in range(rounds):
            for kind in ("cold", "baked") if number % 2 == 0 else ("baked", "cold"):
                progress("starts", sum(map(len, starts.values())), 2 * rounds)
                root = Path(place) / f"cache-{number}"
                one = command if kind == "baked" else command.with_cache_root(root)
                seconds, graphs = _start(one, Path(place) / "vllm.log", log)
                if not graphs or any(graph.loaded != (kind == "baked") for graph in graphs):
                    how = ", ".join(
                        f"{graph.name} {'loaded' if graph.loaded else 'compiled'}" for graph in graphs
                    )
                    raise BakedCacheError(
                        f"a {kind} start is none: {how or 'no graph was seen'}; vLLM's log: {log}"
                    )
                starts[kind].append({"ready_seconds": seconds, "graphs": [asdict(graph) for graph in graphs]})
    progress("starts", 2 * rounds, 2 * rounds)
    ready = {kind: [start["ready_seconds"] for start in starts[kind]] for kind in starts}
    return {
        **starts,
        "ready_cold_over_baked": asdict(statistics.ratio_of_medians(ready["cold"], ready["baked"])),
    }


def _start(command: launch.ServerCommand, log: Path, kept: Path) -> tuple[float, Sequence[Graph]]:
    """Seconds until the server is ready, and how it came by its graphs."""
    started = time.monotonic()
    try:
        with launch.serving(command, log=log):
            seconds = time.monotonic() - started
    finally:
        text = log.read_text(encoding="utf-8", errors="replace") if log.is_file() else ""
        with kept.open("a", encoding="utf-8") as output:
            output.write(text)
    return round(seconds, 2), baked_cache.graphs(text)
