"""Claims of a variant that no current record proves, each with the reason and the command that would measure it."""

from collections.abc import Sequence
from pathlib import Path

from slimqwen.bench.latency import Latency
from slimqwen.evals.gate import Gate
from slimqwen.records import collection
from slimqwen.records.collection import Collection
from slimqwen.report.choice import measuring_command
from slimqwen.report.leaderboard import Row, rows_of
from slimqwen.variant.claims import Claim


def find_unproven(root: Path, variant: str) -> dict[Claim, str]:
    """Find the claims of a variant that no current record proves; empty for a baseline.

    Args:
        root: the repository.

    Returns:
        Claim (speed, memory or quality) -> the reason, and the command that would measure it.
    """
    records = collection.collect(root)
    return list_unproven(records, rows_of(records, variant)[0])


def list_unproven(records: Collection, rows: Sequence[Row]) -> dict[Claim, str]:
    """Find the claims of a variant that no current record proves, from rows that `leaderboard.rows_of` has made.

    Args:
        records: the records of the repository.
        rows: the variant's rows, one for each hardware; a timing on any of them proves speed.

    Returns:
        Claim (speed, memory or quality) -> the reason, and the command that would measure it; empty for a baseline.
    """
    row = rows[0]
    measured = records.measurements.get(row.variant)
    if measured is None or measured.baseline is None:
        return {}
    reasons: dict[Claim, str | None] = {
        "speed": _doubt_speed(rows),
        "memory": _doubt_memory(records, row),
        "quality": _doubt_quality(row),
    }
    return {claim: reason for claim in measured.claimed if (reason := reasons[claim])}


def _doubt_speed(rows: Sequence[Row]) -> str | None:
    command = f"`{measuring_command(rows[0], Latency.kind)}` measures it"
    timed = [(row, row.timed) for row in rows if row.timed and row.timed.speed]
    if any(timing.is_faster and timing.as_scored for _, timing in timed):
        return None
    if not timed:
        return f"not timed in turns with {rows[0].baseline} while nothing else ran; {command}"
    seen = "; ".join(
        f"{timing.speed.ratio} as fast on {row.hardware}{'' if timing.as_scored else ', with another checkpoint'}"
        for row, timing in timed
        if timing.speed
    )
    return f"{seen}, which is not surely faster; {command}"


def _doubt_memory(records: Collection, row: Row) -> str | None:
    assert row.baseline is not None
    size, before = row.size_bytes, rows_of(records, row.baseline)[0][0].size_bytes
    if size is None or before is None:
        return f"not measured; `{measuring_command(row, Gate.kind)}` does"
    if size < before:
        return None
    return f"its checkpoint has {size / 1e6:,.1f} MB, that of {row.baseline} {before / 1e6:,.1f} MB"


def _doubt_quality(row: Row) -> str | None:
    gate = next(each for each in row.evidence if each.kind == Gate.kind)
    if gate.verdict == "pass" and not gate.is_stale:
        return None
    said = (
        "no gate record of its checkpoint"
        if gate.verdict == "missing" or gate.is_stale
        else f"gate: {gate.verdict}"
    )
    return f"{said}; `{measuring_command(row, Gate.kind)}` judges it"
