"""What the gate, the limits and the policy cost a request: a variant's server beside the same one without them."""

import contextlib
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import httpx

from slimqwen.errors import SlimqwenError
from slimqwen.evaluation import statistics
from slimqwen.progress import Progress, silent
from slimqwen.serving import launch
from slimqwen.variant import Variant

TOKENS = 32
"""Of an answer."""

_MEASURES = ("ttft_ms", "tpot_ms")


class NoStreamError(SlimqwenError):
    """A server did not answer as it was asked."""


def cost(
    variant: Variant, rounds: int, pairs: int, logs: Path, progress: Progress = silent
) -> dict[str, Any]:
    """Ask both servers the same questions in turns, each first in every other pair, one question at a time.

    Both run at once: on a GPU, give the variant less than half of the memory. Two starts of one server differ by more
    than what is looked for, so both start anew every round.

    Args:
        variant: what is served.
        rounds: starts of each server, at least 2.
        pairs: questions to each server a round, at least 1.
        logs: a folder for vLLM's output.
        progress: hears the pairs done.

    Returns:
        "pairs": [{"round", "with": {"ttft_ms", "tpot_ms"}, "without": {…}}], and "<measure>_with_over_without":
        {"value", "low", "high"}, the ratio of a round's medians, over rounds (`statistics.ratio_of_rounds`).

    Raises:
        NoStreamError: a server did not answer as it was asked.
        TooFewItemsError: fewer than 2 rounds, or no pair.
        SlimqwenError: what `slimqwen.serving.launch.serving` raises.
    """
    if rounds < 2 or pairs < 1:
        raise statistics.TooFewItemsError(
            f"{rounds} round(s) of {pairs} pair(s) show no spread: take 2 rounds or more, of 1 pair or more"
        )
    found = []
    for number in range(rounds):
        progress("rounds", number, rounds)
        found += [{"round": number, **pair} for pair in _round(variant, number, pairs, logs)]
    progress("rounds", rounds, rounds)
    return {"pairs": found, **{f"{m}_with_over_without": asdict(_ratio(found, m)) for m in _MEASURES}}


def _round(variant: Variant, place: int, pairs: int, logs: Path) -> list[dict[str, dict[str, float]]]:
    found: list[dict[str, dict[str, float]]] = []
    with contextlib.ExitStack() as stack:
        urls = {}
        for name in ("with", "without") if place % 2 else ("without", "with"):
            command = launch.resolve(variant, port=launch.free_port())
            command = command if name == "with" else command.without_middleware()
            log = logs / f"middleware-{variant.name}-{name}.log"
            urls[name] = stack.enter_context(launch.serving(command, log=log)).base_url
        client = stack.enter_context(
            httpx.Client(headers=launch.authorization(), timeout=600, trust_env=False)
        )
        # The first question opens the connection, and is the bare server's whole warm-up.
        for number in range(-2, pairs):
            names = ("with", "without") if number % 2 else ("without", "with")
            asked = f"Question {place}, {number}: where is it?"
            pair = {name: _timed(client, urls[name], asked) for name in names}
            if number >= 0:
                found.append(pair)
    return found


def _ratio(pairs: Sequence[Mapping[str, Any]], measure: str) -> statistics.Ratio:
    sides: dict[str, dict[int, list[float]]] = {"with": {}, "without": {}}
    for pair in pairs:
        for name, rounds in sides.items():
            rounds.setdefault(pair["round"], []).append(pair[name][measure])
    return statistics.ratio_by_round(sides["with"], sides["without"], in_turns=True)[0]


def _timed(client: httpx.Client, url: str, prompt: str) -> dict[str, float]:
    """Milliseconds to the first token, and per token after it."""
    body = {"prompt": prompt, "max_tokens": TOKENS, "ignore_eos": True, "temperature": 0, "stream": True}
    asked = time.perf_counter()
    heard = []
    try:
        with client.stream("POST", f"{url}/v1/completions", json=body) as answer:
            answer.raise_for_status()
            for line in answer.iter_lines():
                if line.startswith("data: {"):
                    heard.append(time.perf_counter())
    except httpx.HTTPError as error:
        raise NoStreamError(f"{url} did not answer ({error}); its log is in logs/") from error
    if len(heard) < 2:
        raise NoStreamError(f"{url} streamed {len(heard)} of {TOKENS} tokens; its log is in logs/")
    first, last = heard[0], heard[-1]
    return {
        "ttft_ms": round((first - asked) * 1000, 3),
        "tpot_ms": round((last - first) / (TOKENS - 1) * 1000, 4),
    }
