"""The dated log of results: every record that says something of a variant, the negative ones included.

A line states what the record found against the variant's baseline, by the same rules as the tables: paired, with the
interval that the verdict rests on. Where there is nothing to hold it against, it states the figures alone.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Any

from slimqwen import variant as variants
from slimqwen.errors import SlimqwenError
from slimqwen.evaluation import acceptance_share, comparison, engine_matrix, statistics
from slimqwen.evaluation.verdict import Verdict, overall
from slimqwen.records import collection, store
from slimqwen.records.collection import Collection, Found, Problem

_SEVERITY = (Verdict.FAIL, Verdict.INCONCLUSIVE, Verdict.PASS)


@dataclass(frozen=True)
class Entry:
    """One line of the log.

    Attributes:
        ended: when the measurement ended, UTC to the second.
        variant: that was measured; empty for an exploration of none.
        kind: of the record.
        finding: verdict, headline figure and its interval.
        commit: that it was measured at, `+changes` where the code differed from it.
        place: of the record, from the repository's root.
    """

    ended: str
    variant: str
    kind: str
    finding: str
    commit: str
    place: str


def entries(
    root: Path, *, variant: str | None = None, last: int | None = None
) -> tuple[list[Entry], tuple[Problem, ...]]:
    """The log, newest first.

    Args:
        root: the repository.
        variant: of this one alone.
        last: so many lines at most; None for all. Findings take time where intervals are computed.

    Returns:
        The lines, and what could not be read.

    Raises:
        UnknownVariantError: no such variant.
    """
    if variant is not None:
        variants.load(variant, root)
    everything = collection.collect(root)
    chosen = [found for found in everything.records if variant in (None, found.variant)]
    chosen.sort(key=lambda found: (_ended(found), found.place), reverse=True)
    shown = chosen[: len(chosen) if last is None else last]
    return [_entry(found, everything) for found in shown], everything.problems


def _entry(found: Found, among: Collection) -> Entry:
    try:
        finding = _FINDINGS.get(found.kind, _exploration)(found, among)
    except SlimqwenError as error:
        # A line of its own, so that damaged items do not take the whole log away.
        finding = str(error)
    git = found.record["provenance"]["git"]
    commit = (git["commit"] or "none")[:10] + ("+changes" if git["dirty"] else "")
    return Entry(_ended(found), found.variant, found.kind, finding, commit, found.place)


def _ended(found: Found) -> str:
    return str(found.record["provenance"]["ended"])


def _against(
    found: Found, among: Collection, compare: Callable[[Path, Path], Any]
) -> tuple[Found, Any] | None:
    """The baseline's record that this one is held against and what comes of it; None where none fits.

    Of those that fit it is the newest from before this one, as the comparison was when it was made; else from after.
    """
    claimed = among.measurements.get(found.variant)
    if claimed is None or claimed["baseline"] is None:
        return None
    run = found.record.get("run")
    # In turns with this one comes first.
    candidates = sorted(
        among.of(claimed["baseline"], found.kind),
        key=lambda one: (run is None or one.record.get("run") != run, _ended(one) > _ended(found)),
    )
    for candidate in candidates:
        try:
            return candidate, compare(candidate.path, found.path)
        except comparison.NotComparableError:
            continue
    return None


def _quality(found: Found, among: Collection) -> str:
    record = found.record
    prefix = f"{record['suite']}_"
    held = _against(found, among, comparison.compare_quality)
    if held is None:
        return ", ".join(
            f"{task.removeprefix(prefix)} {row['value']:.3f} ± {row['standard_error']:.3f}"
            for task, row in record["tasks"].items()
        )
    baseline, rows = held
    # Measures have units of their own, so what counts is how much of its margin each may have lost.
    worst = min(
        rows,
        key=lambda row: (
            _SEVERITY.index(row.judgement.verdict),
            row.judgement.low / (row.judgement.margin or 1),
        ),
    )
    judged = worst.judgement
    sign = 1 if worst.higher_is_better else -1
    verdict = overall([row.judgement.verdict for row in rows])
    return (
        f"{verdict}: {worst.task.removeprefix(prefix)} gains {sign * worst.difference.value:+.3f} "
        f"[{judged.low:+.3f}, {judged.high:+.3f}] where -{judged.margin:g} is allowed, the worst of {len(rows)}"
        f"{_of(baseline)}"
    )


def _latency(found: Found, among: Collection) -> str:
    record = found.record
    workload = "" if record["workload"] == "classes" else f"{record['workload']}: "
    held = _against(found, among, comparison.compare_latency)
    if held is None:
        figures = (
            f"{name} {row['e2el_ms']['mean']:,.0f} ± {row['e2el_ms']['standard_error']:,.0f}"
            for name, row in record["classes"].items()
        )
        return f"{workload}E2EL, ms: {', '.join(figures)}"
    baseline, rows = held
    joint = [row for row in rows if row.prompt_class == comparison.ALL_CLASSES]
    told = joint or [row for row in rows if row.measure == "e2el_ms"]
    speeds = (
        f"{row.prompt_class} {row.speedup:.2f}x [{row.interval[0]:.2f}, {row.interval[1]:.2f}]"
        for row in told
        if row.speedup is not None and row.interval is not None
    )
    return f"{workload}speed in E2EL: {', '.join(speeds)}{_of(baseline)}"


def _acceptance(found: Found, among: Collection) -> str:
    def compare(first: Path, second: Path) -> acceptance_share.Share:
        if _prompts(by_path[first]) != _prompts(found.record):
            raise comparison.NotComparableError("other prompts")
        return acceptance_share.compare(first, second)

    by_path = {one.path: one.record for one in among.records if one.kind == found.kind}
    held = _against(found, among, compare)
    if held is not None:
        baseline, share = held
        ratio = share.ratio
        return (
            f"{share.verdict}: acceptance length {share.second:.3f} at K = {share.depth}, {ratio.value:.1%} "
            f"[{ratio.low:.1%}, {ratio.high:.1%}]{_of(baseline)}"
        )
    lengths = [
        f"K = {row['depth']} {one['length']['value']:.3f} ± {one['length']['standard_error']:.3f}"
        for row in found.record["depths"]
        for one in row["settings"][:1]
    ]
    return f"acceptance length: {', '.join(lengths)}"


def _prompts(record: Mapping[str, Any]) -> tuple[Any, ...]:
    return record["plan"], record["gate_depth"], record["provenance"]["datasets"]


def _fidelity(found: Found, among: Collection) -> str:
    record = found.record
    figures = {mode: row["kl_nats"] for mode, row in record["modes"].items() if row["kl_nats"]}
    mode = max(figures, key=lambda each: figures[each]["value"], default=None)
    if mode is None:
        return str(record["verdict"])
    kl = figures[mode]
    half = statistics.Z * kl["standard_error"]
    return (
        f"{record['verdict']}: KL {kl['value']:.5f} nats a token [{kl['value'] - half:.5f}, {kl['value'] + half:.5f}], "
        f"limit {record['limits']['kl_nats']:g} ({mode}), of {record['baseline']}"
    )


def _engine(found: Found, among: Collection) -> str:
    states = [row["state"] for row in found.record["cells"]]
    tried = sum(state != engine_matrix.State.NOT_AVAILABLE for state in states)
    unsafe = states.count(engine_matrix.State.UNSAFE)
    return f"{engine_matrix.verdict(found.record)}: {unsafe} of {tried} combinations of modes unsafe"


def _gate(found: Found, among: Collection) -> str:
    record = found.record
    findings = store.read_items(found.path)
    short = {gate: verdict for gate, verdict in record["verdicts"].items() if verdict != Verdict.PASS}
    if not short:
        return f"pass: {', '.join(record['verdicts'])}, of {record['baseline']}"
    told = []
    for gate, verdict in short.items():
        worst = next((one for one in findings if (one["gate"], one["verdict"]) == (gate, verdict)), None)
        told.append(f"{gate} {verdict}{f' ({_finding(worst)})' if worst else ''}")
    return f"{record['verdict']}: {', '.join(told)}, of {record['baseline']}"


def _finding(item: Mapping[str, Any]) -> str:
    interval = "" if item["low"] is None else f" [{item['low']:+.3f}, {item['high']:+.3f}]"
    value = "" if item["value"] is None else f" {item['value']:.4g}"
    return f"{item['figure']}{value}{interval}, limit {item['limit']:g}"


def _exploration(found: Found, among: Collection) -> str:
    """The verdict, if it has one, and the figures that stand at its top with an interval or an error."""
    return ", ".join([*_verdicts(found.record), *_figures(found.record)]) or "-"


def _verdicts(record: Mapping[str, Any]) -> Iterator[str]:
    if "passed" in record:
        yield "pass" if record["passed"] else "fail"
    for name in ("verdict", "kept"):
        if isinstance(record.get(name), str):
            yield record[name] if name == "verdict" else f"kept {record[name]}"


def _figures(record: Mapping[str, Any]) -> Iterable[str]:
    for name, value in record.items():
        if isinstance(value, dict):
            shown = name.replace("_", " ")
            if {"value", "low", "high"} <= value.keys():
                yield f"{shown} {value['value']:.2f} [{value['low']:.2f}, {value['high']:.2f}]"
            elif {"mean_length", "standard_error"} <= value.keys():
                yield f"acceptance length {shown} {value['mean_length']:.3f} ± {value['standard_error']:.3f}"


def _of(baseline: Found) -> str:
    return f", of {baseline.variant}"


_FINDINGS: Mapping[str, Callable[[Found, Collection], str]] = MappingProxyType(
    {
        "quality": _quality,
        "latency": _latency,
        "acceptance": _acceptance,
        "fidelity": _fidelity,
        "engine": _engine,
        "gate": _gate,
    }
)
