"""Columns of the leaderboard: a row's cells, each with the value it is sorted by."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from slimqwen.records.provenance import CPU_NOTE, commit_name
from slimqwen.report.fronts import Board
from slimqwen.report.leaderboard import TIMES, Evidence, Margins, Row, hardware

_VERDICTS = ("promoted", "pass", "inconclusive", "measured", "planned", "fail", "rejected", "unreadable")


@dataclass(frozen=True)
class Cell:
    """One cell.

    Attributes:
        text: figure; empty without one.
        order: sort key; None is last in either direction.
        note: second, smaller line.
        tone: verdict that colours the note.
        title: tooltip.
        evidence: shown as a strip of letters instead of the text.
    """

    text: str = ""
    order: float | str | None = None
    note: str = ""
    tone: str = ""
    title: str = ""
    evidence: tuple[Evidence, ...] = ()


@dataclass(frozen=True)
class Column:
    """One column.

    Attributes:
        group: columns that are shown or hidden together.
        suite: suite it belongs to; empty for none.
        descending: whether the first click puts the largest value on top.
        is_text: whether it holds words instead of figures.
    """

    label: str
    group: str
    cell: Callable[[Row], Cell]
    suite: str = ""
    descending: bool = False
    is_text: bool = False


def columns(board: Board) -> list[Column]:
    """Columns that the board's rows need, from left to right, without the variant's own."""
    tasks = dict.fromkeys(key for row in board.rows for key in row.scores)
    classes = dict.fromkeys(name for row in board.rows if row.timed for name in row.timed.classes)
    headings = dict.fromkeys(heading for row in board.rows for heading in row.figures)
    has_suites = len({suite for suite, _ in tasks}) > 1
    board_columns = [
        Column("verdict", "choice", _verdict, is_text=True),
        Column("evidence", "choice", _evidence, is_text=True),
        Column("speed-up", "choice", _speed_up, descending=True),
        Column("worst task, in margins", "choice", _worst, descending=True),
        Column("on the front of", "choice", _front, descending=True, is_text=True),
        Column("baseline", "choice", lambda row: Cell(row.baseline or "", row.baseline), is_text=True),
        Column("hypothesis", "choice", _hypothesis, is_text=True),
    ]
    for suite, task in tasks:
        label = f"{task} ({suite})" if has_suites else task
        board_columns.append(Column(label, "quality", _score(suite, task), suite=suite, descending=True))
    for measure, name in TIMES.items():
        board_columns += [
            Column(f"{name} {prompt_class}, ms", "latency", _median(prompt_class, measure))
            for prompt_class in classes
        ]
    board_columns.append(Column("checkpoint, MB", "cost", _size))
    board_columns += [Column(heading, "cost", _figure(heading)) for heading in headings]
    board_columns += [
        Column("newest record", "origin", _newest, descending=True, is_text=True),
        Column("commit", "origin", _commit, is_text=True),
        Column("hardware", "origin", _hardware, is_text=True),
    ]
    return board_columns


def initials(kinds: Sequence[str]) -> dict[str, str]:
    """A letter for each kind of record: the first free one of its words' initials, else of its letters."""
    letters: dict[str, str] = {}
    for kind in kinds:
        candidates = [*(word[0] for word in kind.split("_")), *kind.replace("_", "")]
        letters[kind] = next((letter for letter in candidates if letter not in letters.values()), kind[0])
    return letters


def _margins(gain: Margins) -> str:
    return f"{gain.value:+.2f} [{gain.low:+.2f}, {gain.high:+.2f}]"


def _verdict(row: Row) -> Cell:
    note = "; ".join(row.doubts) or (row.status if row.status != row.standing else "")
    return Cell(row.standing, _VERDICTS.index(row.standing), note, "fail" if row.doubts else "")


def _evidence(row: Row) -> Cell:
    return Cell(order=len(row.missing), evidence=row.evidence)


def _front(row: Row) -> Cell:
    return Cell(", ".join(row.fronts), len(row.fronts))


def _hypothesis(row: Row) -> Cell:
    return Cell(row.hypothesis, row.hypothesis.lower() or None)


def _speed_up(row: Row) -> Cell:
    if row.timed is None or row.timed.baseline is None:
        return Cell()
    if row.timed.speed is None:
        return Cell(note="" if row.timed.in_turns else "not timed in turns")
    title = "Time of all requests, baseline / variant, timed in turns; 95 % interval"
    return Cell(row.timed.speed.ratio, row.timed.speed.speedup, title=title)


def _worst(row: Row) -> Cell:
    return Cell(_margins(row.worst), row.worst.low, row.worst.task) if row.worst else Cell()


def _score(suite: str, task: str) -> Callable[[Row], Cell]:
    def cell(row: Row) -> Cell:
        score = row.scores.get((suite, task))
        if score is None:
            return Cell()
        result = score.row
        order = result.value if result.higher_is_better else -result.value
        text = f"{result.value:.3f} ± {result.standard_error:.3f}"
        note = verdict = ""
        if score.change:
            difference, verdict = score.change.difference, str(score.change.judgement.verdict)
            note = f"{difference.value:+.3f} ± {difference.standard_error:.3f} {verdict}"
        title = f"{result.measure.replace('_', ' ')}, {result.item_count} of {result.available_count} items"
        if score.gain:
            title += f"; gain in margins {_margins(score.gain)}"
        return Cell(text, order, note, verdict, title)

    return cell


def _median(prompt_class: str, measure: str) -> Callable[[Row], Cell]:
    def cell(row: Row) -> Cell:
        figures = row.timed.classes.get(prompt_class) if row.timed else None
        if figures is None:
            return Cell()
        title = f"{figures.prompt_tokens} -> {figures.output_tokens} tokens, {figures.request_count} requests"
        median_ms = getattr(figures, measure).median
        return Cell(f"{median_ms:,.1f}", median_ms, title=title)

    return cell


def _figure(heading: str) -> Callable[[Row], Cell]:
    def cell(row: Row) -> Cell:
        if heading not in row.figures:
            return Cell()
        figure, entry = row.figures[heading]
        text = f"{figure.value:,.4g}"
        if figure.low is not None and figure.high is not None:
            text += f" [{figure.low:,.4g}, {figure.high:,.4g}]"
        elif figure.standard_error is not None:
            text += f" ± {figure.standard_error:.2g}"
        note = "" if hardware(entry) == row.hardware else f"on {hardware(entry)}"
        return Cell(text, figure.value, note, title=entry.location)

    return cell


def _size(row: Row) -> Cell:
    return Cell(f"{row.size_bytes / 1e6:,.2f}", row.size_bytes) if row.size_bytes else Cell()


def _newest(row: Row) -> Cell:
    if row.newest is None:
        return Cell()
    ended = row.newest.record.provenance.ended
    return Cell(ended[:10], ended, row.newest.kind.replace("_", "-"), title=row.newest.location)


def _commit(row: Row) -> Cell:
    text = commit_name(row.newest.record.provenance.git) if row.newest else ""
    return Cell(text, text or None)


def _hardware(row: Row) -> Cell:
    if not row.hardware:
        return Cell()
    note, title = ("no evidence about a GPU", CPU_NOTE) if row.on_cpu else ("", "")
    return Cell(row.hardware, row.hardware, note, title=title)
