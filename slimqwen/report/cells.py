"""The table of cells, which are pairs of variant and card: predicted, measured here, and reported by others."""

import contextlib
from collections.abc import Iterable, Sequence
from dataclasses import replace
from pathlib import Path

from slimqwen import variant as variants
from slimqwen.errors import SlimqwenError
from slimqwen.fit.memory import ServerSettings
from slimqwen.fit.subject import promised_subject
from slimqwen.fit.verdict import fit_on_gpus
from slimqwen.plan import trouble
from slimqwen.plan.devices import Gpu, read_gpus
from slimqwen.plan.facts import Plan
from slimqwen.plan.record import is_current, list_recorded_plans
from slimqwen.records import provenance
from slimqwen.records.collection import Collection
from slimqwen.records.field_report import FieldRow
from slimqwen.records.table import Table
from slimqwen.report.field import list_rows, read_reports

_WORKLOAD = "classes"
"""The workload whose first class the table shows: one short request at a time."""

_COLUMNS = (
    *("variant", "card", "planned", "KV tokens, planned", "bound, tok/s"),
    *("measured, tok/s (tokens a step)", "reported"),
)
_NOTES = (
    "Planned by vLLM's own code; bound: the roofline of one sequence, drafts at the published acceptance length.",
    f"Measured and reported: the first class of the workload {_WORKLOAD}, one request at a time, the prompt's time "
    "included. Measured by records in this repository; reported by files of eval/field/, not repeated here.",
)


def cells_table(records: Collection) -> Table:
    """A row for each variant and card that was planned, measured or reported.

    A card is a GPU or CPU. Measured are only timings that a variant's measurements.json cites.

    Raises:
        SlimqwenError: a variant or a record cannot be read.
    """
    root = records.root
    known, gpus = trouble.read_known_trouble(root), read_gpus(root)
    shipped = provenance.shipped_variants(root)
    claims = {name: found for name, found in records.measurements.items() if name in shipped}
    cited = {f"experiments/{name}/{file}" for name, found in claims.items() for file in found.records}
    own = replace(records, records=tuple(each for each in records.records if each.location in cited))
    measured = _first_classes((card, row) for (card, _), row in list_rows(own, []))
    reported: dict[tuple[str, str], list[FieldRow]] = {}
    for report in read_reports(root)[0]:
        for place, found in _first_classes((report.card.name, row) for row in report.rows).items():
            reported.setdefault(place, []).extend(found)
    rows: list[tuple[str, ...]] = []
    for name in dict.fromkeys([*shipped, *sorted(name for name, _ in reported)]):
        plans = {plan.gpu: plan for plan in list_recorded_plans(root, name) if is_current(plan)}
        timed = {card for variant, card in (*measured, *reported) if variant == name}
        cards = [card for card in gpus if card in plans.keys() | timed] + sorted(timed - gpus.keys())
        bounds = _bound_speed(name, root, [gpus[card] for card in cards if card in gpus])
        for card in cards:
            timings = (_span(found.get((name, card), [])) for found in (measured, reported))
            cells = (name, card, *_predict(plans.get(card), known), bounds.get(card), *timings)
            rows.append(tuple(cell or "-" for cell in cells))
    return Table("Variants and cards", _COLUMNS, tuple(rows), _NOTES, text_columns=3)


def _first_classes(rows: Iterable[tuple[str, FieldRow]]) -> dict[tuple[str, str], list[FieldRow]]:
    """(variant, card) -> the row of the workload's first class."""
    first: dict[tuple[str, str], list[FieldRow]] = {}
    for card, row in rows:
        if row.workload == _WORKLOAD:
            first.setdefault((row.variant, card), [row])
    return first


def _bound_speed(name: str, root: Path, gpus: Sequence[Gpu]) -> dict[str, str]:
    """GPU -> roofline of one sequence, tokens/s; empty for a variant whose dimensions nobody has published."""
    if gpus and name in variants.names(root):
        with contextlib.suppress(SlimqwenError):
            subject = promised_subject(variants.load(name, root))
            fits = fit_on_gpus(subject, ServerSettings.of(subject, None, None), gpus)
            return {gpu: f"{each[0].drafted or each[0].tokens_per_second:.0f}" for gpu, each in fits.items()}
    return {}


def _predict(plan: Plan | None, known: Sequence[trouble.KnownTrouble]) -> tuple[str | None, str | None]:
    """Whether a start is planned to succeed, and the tokens of its KV cache."""
    if plan is None:
        return None, None
    found = trouble.match_trouble(plan, known)
    deaths = "; ".join(f"{each.effect}: {each.name}" for each in found if each.prevents_start)
    costs = sum(each.effect == "costs" for each in found)
    outlook = f"stops at {plan.failed_at}" if plan.error else f"starts{f', {costs} costs' if costs else ''}"
    return deaths or outlook, f"{plan.kv_cache.tokens:,}" if plan.kv_cache else None


def _span(rows: Sequence[FieldRow]) -> str | None:
    """Speed and acceptance length; of several reports the slowest and the fastest, and their number."""
    if not rows:
        return None
    ends = (end(rows, key=lambda row: row.tokens_per_s) for end in (min, max))
    text = " to ".join(dict.fromkeys(f"{row.tokens_per_s:.0f} ({row.tokens_per_step:.2f})" for row in ends))
    return f"{text}, {len(rows)} reports" if len(rows) > 1 else text
