"""Check that the streaming client kept up with the server that it timed.

On a busy host the client process waits for a CPU while the server goes on generating, then reads several tokens of an
answer at once: their gaps, and the TPOT of the answer, become as small as zero. The server's engine times the same gaps
by its own clock, so a client that reports much smaller ones was starved. Larger ones need no check: HTTP can only add
time.
"""

from collections.abc import Mapping, Sequence
from typing import Any

from slimqwen.bench import BenchError

LEAST_SHARE_OF_MEAN = 0.8
"""Least mean TPOT of all answers together, as a share of the server's own mean TPOT of the same time.

Delays of the first and the last token differ by a few milliseconds an answer, which is 4 % of a short one."""

LEAST_SHARE_OF_STEP = 0.1
"""Least mean gap of one answer, as a share of the server's mean inter-token latency.

A step with others' prompts in it is several times as long as one without, so answers differ widely."""

_TPOT, _ITL = "vllm:request_time_per_output_token_seconds", "vllm:inter_token_latency_seconds"


def require_counters(counters: Mapping[str, float]) -> None:
    """Check that a server has the counters that `fault` needs.

    Raises:
        BenchError: they are missing.
    """
    if f"{_ITL}_sum" not in counters:
        raise BenchError(
            f"/metrics has no {_ITL}, which shows whether the client kept up with the server; take "
            "VLLM_DISABLE_LOG_STATS out of config.env"
        )


def fault(rows: Sequence[Mapping[str, Any]], before: Mapping[str, float], after: Mapping[str, float]) -> str:
    """Compare the gaps between tokens as the client saw them with those that the server counted.

    Args:
        rows: answers, each with tpot_ms, itl_ms, ttft_ms, e2el_ms, output_tokens and error.
        before: counters of the server before them; `after` likewise.

    Returns:
        How the client's gaps are too small to come from the server; empty where they are not.
    """
    server_tpot_ms, server_itl_ms = (_mean_ms(name, before, after) for name in (_TPOT, _ITL))
    successes = [row for row in rows if row["error"] is None and row["output_tokens"] > 1]
    if not successes or not server_tpot_ms or not server_itl_ms:
        return ""
    for row in successes:
        # All tokens after the first in one chunk have no gap: their whole time counts as one.
        gap_ms = (row["e2el_ms"] - row["ttft_ms"]) / max(1, len(row["itl_ms"]))
        if gap_ms < LEAST_SHARE_OF_STEP * server_itl_ms:
            return (
                f"an answer's tokens came {gap_ms:.1f} ms apart and the server's inter-token latency was "
                f"{server_itl_ms:.1f} ms"
            )
    tpot_ms = sum(row["tpot_ms"] for row in successes) / len(successes)
    if tpot_ms < LEAST_SHARE_OF_MEAN * server_tpot_ms:
        return f"TPOT was {tpot_ms:.1f} ms and by the server's own clock {server_tpot_ms:.1f} ms"
    return ""


def _mean_ms(name: str, before: Mapping[str, float], after: Mapping[str, float]) -> float:
    """Mean of the observations that a histogram of seconds gained, milliseconds; 0 without any."""
    total, count = (
        after.get(f"{name}_{part}", 0.0) - before.get(f"{name}_{part}", 0.0) for part in ("sum", "count")
    )
    return 1e3 * total / count if count else 0.0
