"""The leaderboard's columns: a row -> cells, each with what it is sorted by."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from slimqwen.evaluation.comparison import LatencyRow
from slimqwen.report.leaderboard import CPU_NOTE, Board, Margins, Row, Score, Witness, in_margins

LATENCY_MEASURES = {"e2el_ms": "E2EL", "ttft_ms": "TTFT", "tpot_ms": "TPOT"}


@dataclass(frozen=True)
class Cell:
    """What a row says in a column.

    Attributes:
        text: the figure; empty where there is none.
        order: what it is sorted by; None comes last, whichever way.
        note: a second, smaller line.
        tone: a verdict that gives the note its colour.
        title: more words, for a pointer.
        witnesses: shown as a strip of letters, instead of the text.
    """

    text: str = ""
    order: float | str | None = None
    note: str = ""
    tone: str = ""
    title: str = ""
    witnesses: tuple[Witness, ...] = ()


@dataclass(frozen=True)
class Column:
    """One column.

    Attributes:
        label: its heading.
        group: the columns that are shown or hidden together.
        cell: row -> cell.
        suite: that it belongs to, if to one.
        descending: whether a first click puts the largest on top.
        text: whether it holds words rather than figures.
    """

    label: str
    group: str
    cell: Callable[[Row], Cell]
    suite: str = ""
    descending: bool = False
    text: bool = False


def columns(board: Board) -> list[Column]:
    """The columns that the board's rows need, from left to right; the variant's own comes before them."""
    several = len({suite for suite, _ in board.tasks}) > 1
    found = [
        Column("verdict", "choice", _verdict, text=True),
        Column("evidence", "choice", _evidence, text=True),
        Column("speed-up", "choice", _speed_up, descending=True),
        Column("worst task, in margins", "choice", _worst, descending=True),
        Column("on the front of", "choice", _front, descending=True, text=True),
        Column("baseline", "choice", lambda row: Cell(row.baseline or "", row.baseline), text=True),
        Column(
            "hypothesis",
            "choice",
            lambda row: Cell(row.hypothesis, row.hypothesis.lower() or None),
            text=True,
        ),
    ]
    for suite, task in board.tasks:
        label = f"{task} ({suite})" if several else task
        found.append(Column(label, "quality", _score(suite, task), suite=suite, descending=True))
    for measure, name in LATENCY_MEASURES.items():
        found += [Column(f"{name} {of}, ms", "latency", _median(of, measure)) for of in board.classes]
    found += [
        Column("acceptance length", "cost", _acceptance, descending=True),
        Column("checkpoint, MB", "cost", _size),
        Column("start-up, s", "cost", _start_up),
        Column("newest record", "origin", _newest, descending=True, text=True),
        Column("commit", "origin", _commit, text=True),
        Column("hardware", "origin", _hardware, text=True),
    ]
    return found


def change(score: Score) -> str:
    """A paired change in the words of the README's tables; empty where nothing was paired."""
    if score.change is None:
        return ""
    difference = score.change.difference
    return f"{difference.value:+.3f} ± {difference.standard_error:.3f}"


def margins(found: Margins) -> str:
    """A gain in margins with its interval."""
    return f"{found.value:+.2f} [{found.low:+.2f}, {found.high:+.2f}]"


def speed_up(found: LatencyRow) -> str:
    """A speed-up with its interval."""
    interval = " [{:.2f}, {:.2f}]".format(*found.interval) if found.interval else ""
    return f"{found.speedup:.2f}x{interval}"


def commit(git: dict[str, Any]) -> str:
    """Ten digits, and whether anything differed from it, as the tables say it."""
    return (git["commit"] or "none")[:10] + ("+changes" if git["dirty"] else "")


def _verdict(row: Row) -> Cell:
    order = ["promoted", "pass", "inconclusive", "measured", "planned", "fail", "rejected", "unreadable"]
    note = "; ".join(row.doubts) or (row.status if row.verdict else "")
    return Cell(row.stands, order.index(row.stands), note, "fail" if row.doubts else "")


def _evidence(row: Row) -> Cell:
    return Cell(order=len(row.missing), witnesses=row.witnesses)


def _front(row: Row) -> Cell:
    return Cell(", ".join(row.fronts), len(row.fronts))


def _speed_up(row: Row) -> Cell:
    if row.timed is None or row.timed.against is None:
        return Cell()
    if row.timed.speed is None:
        return Cell(note="" if row.timed.in_turns else "not timed in turns")
    ratios = sorted(row.timed.speedups.values())
    title = "Time of all requests, baseline over variant, timed in turns; 95 % interval"
    note = f"medians {ratios[0]:.2f}x to {ratios[-1]:.2f}x by class" if len(ratios) > 1 else ""
    return Cell(speed_up(row.timed.speed), row.timed.speed.speedup, note, title=title)


def _worst(row: Row) -> Cell:
    if row.worst is None:
        return Cell()
    return Cell(margins(row.worst), row.worst.low, row.worst.task)


def _score(suite: str, task: str) -> Callable[[Row], Cell]:
    def cell(row: Row) -> Cell:
        score = row.scores.get((suite, task))
        if score is None:
            return Cell()
        of = score.row
        better = of["value"] if of["higher_is_better"] else -of["value"]
        text = f"{of['value']:.3f} ± {of['standard_error']:.3f}"
        verdict = str(score.change.judgement.verdict) if score.change else ""
        title = f"{of['measure'].replace('_', ' ')}, {of['item_count']} of {of['available_count']} items"
        if score.change:
            title += f"; gain in margins {margins(in_margins(score.change))}"
        return Cell(text, better, f"{change(score)} {verdict}".strip(), verdict, title)

    return cell


def _median(name: str, measure: str) -> Callable[[Row], Cell]:
    def cell(row: Row) -> Cell:
        of = row.timed.classes.get(name) if row.timed else None
        if of is None:
            return Cell()
        title = f"{of['prompt_tokens']} -> {of['output_tokens']} tokens, {of['request_count']} requests"
        return Cell(f"{of[measure]['median']:,.1f}", of[measure]["median"], title=title)

    return cell


def _acceptance(row: Row) -> Cell:
    if row.acceptance is None:
        return Cell()
    depth, of = row.acceptance
    return Cell(f"{of['value']:.3f} ± {of['standard_error']:.3f}", of["value"], f"K = {depth}")


def _size(row: Row) -> Cell:
    return Cell(f"{row.size_bytes / 1e6:,.2f}", row.size_bytes) if row.size_bytes else Cell()


def _start_up(row: Row) -> Cell:
    of = row.start_up
    return Cell(f"{of.value:.1f} [{of.low:.1f}, {of.high:.1f}]", of.value, of.kind) if of else Cell()


def _newest(row: Row) -> Cell:
    if row.newest is None:
        return Cell()
    ended = str(row.newest.record["provenance"]["ended"])
    return Cell(ended[:10], ended, row.newest.kind.replace("_", "-"), title=row.newest.place)


def _commit(row: Row) -> Cell:
    if row.newest is None:
        return Cell()
    text = commit(row.newest.record["provenance"]["git"])
    return Cell(text, text)


def _hardware(row: Row) -> Cell:
    if not row.hardware:
        return Cell()
    return Cell(
        row.hardware,
        row.hardware,
        "no evidence about a GPU" if row.on_cpu else "",
        title=CPU_NOTE if row.on_cpu else "",
    )


def as_cells(row: Row, wanted: Sequence[Column]) -> list[Cell]:
    """A row's cells, one a column."""
    return [column.cell(row) for column in wanted]
