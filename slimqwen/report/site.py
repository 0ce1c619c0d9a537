"""The report: one page, readable offline, with the demo's result, what to serve, the leaderboard and every variant.

Variants that git does not track are the user's own, and come before those that are shipped.
"""

import contextlib
from collections.abc import Mapping, Sequence, Set
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jinja2

from slimqwen import variant as variants
from slimqwen.errors import SlimqwenError
from slimqwen.evals.changed_items import changed_items_table
from slimqwen.progress import Progress, silent
from slimqwen.records import collection, provenance, registry, store
from slimqwen.records.collection import Collection, Problem, StoredRecord
from slimqwen.records.record import Record
from slimqwen.records.table import Table
from slimqwen.report import choice, leaderboard, quality_pairs, tables
from slimqwen.report.cells import cells_table
from slimqwen.report.choice import DEMO as DEMO
from slimqwen.report.field import read_reports
from slimqwen.report.leaderboard import Row
from slimqwen.report.pareto_chart import draw_front
from slimqwen.report.unproven import list_unproven

_HERE = Path(__file__).parent

_WORST_ITEMS = 10
"""Items that changed, of which a variant's section shows the worst."""


@dataclass(frozen=True)
class Site:
    """A written report: its page, its numbers of variants and records, and problems of files that were left out."""

    index: Path
    variants: int
    records: int
    problems: tuple[Problem, ...]


def build_page(root: Path, destination: Path, progress: Progress = silent) -> Site:
    """Write the report's page, index.html; an older page is replaced by a rename.

    Args:
        destination: folder of the page, created if missing.
    """
    records = collection.collect(root, demo=DEMO)
    problems = {problem.location: problem for problem in records.problems}
    own = provenance.own_variants(root)
    names = sorted(variants.local_names(root), key=lambda name: (name not in own, name))
    rows: list[Row] = []
    for done, name in enumerate(names):
        progress("pair the records", done, len(names))
        variant_rows, unusable = leaderboard.rows_of(records, name)
        rows += variant_rows
        problems |= {problem.location: problem for problem in unusable}
    rows = sorted(leaderboard.sort_rows(rows), key=lambda row: row.variant not in own)
    demo = _demo_tables(records, problems)
    problems |= {problem.location: problem for problem in read_reports(root)[1]}
    cells: list[Table] = []
    with contextlib.suppress(SlimqwenError):  # damaged records are among the problems
        cells = [cells_table(records)]
    left_out = tuple(problems[location] for location in sorted(problems))
    content = {
        "demo": demo,
        "choices": choice.put_own_first(choice.choose_variants(rows), rows, own),
        "leaderboard": leaderboard.leaderboard_table([row for row in rows if row.is_measured]),
        "cells": cells,
        "front": _draw_largest_front(rows, own),
        "sections": [_variant_section(records, name, rows) for name in names],
        "problems": left_out,
        "record_count": len(records.records),
        "style": (_HERE / "assets" / "report.css").read_text(encoding="utf-8"),
    }
    progress("pair the records", len(names), len(names))
    environment = jinja2.Environment(
        loader=jinja2.FileSystemLoader(_HERE / "templates"),
        autoescape=True, trim_blocks=True, lstrip_blocks=True, undefined=jinja2.StrictUndefined,
    )  # fmt: skip
    text = environment.get_template("page.html.jinja").render(content)
    destination.mkdir(parents=True, exist_ok=True)
    index = destination / "index.html"
    store.publish(index, text.encode(), replace=True)
    return Site(index, len(names), len(records.records), left_out)


def _demo_tables(records: Collection, problems: dict[str, Problem]) -> list[Table]:
    """Summary of each variant in demo/ whose baseline is there, too; unusable records are added to `problems`."""
    summaries = []
    for folder in sorted((records.root / DEMO).glob("*/")):
        claims = records.measurements.get(folder.name)
        if claims is None or claims.baseline is None or not (folder.parent / claims.baseline).is_dir():
            continue
        try:
            summaries.append(tables.summary_table(records.root, claims.baseline, folder.name, DEMO))
        except leaderboard.DAMAGED as error:
            location = f"{DEMO}/{folder.name}"
            problems[location] = Problem(location, f"{error}; run `slimqwen demo` again")
    return summaries


def _draw_largest_front(rows: Sequence[Row], own: Set[str]) -> str | None:
    """Chart of the baseline and hardware with the most points, of those with one's own variants if there are any."""
    groups: dict[tuple[str, str], list[Row]] = {}
    for row in rows:
        groups.setdefault(row.group, []).append(row)
    for members in sorted(
        groups.values(),
        key=lambda each: (not own.isdisjoint(row.variant for row in each), len(each)),
        reverse=True,
    ):
        if chart := draw_front(members):
            return chart
    return None


def _variant_section(records: Collection, name: str, rows: Sequence[Row]) -> Mapping[str, Any]:
    """Content of a variant's section: claims, the tables of its newest record of each kind and topic, all records."""
    row = next(row for row in rows if row.variant == name)
    newest: dict[tuple[str, str], StoredRecord[Record]] = {}
    for kind in registry.kinds().values():
        for entry in records.select(kind, name):
            newest.setdefault((entry.kind, entry.record.topic), entry)
    shown = []
    for entry in newest.values():
        with contextlib.suppress(*leaderboard.DAMAGED):  # damaged items are among the problems
            shown += entry.record.tables(entry.path)
    baseline = row.baseline
    for first, second in quality_pairs.find_pairs(records, name, baseline).values() if baseline else ():
        with contextlib.suppress(*leaderboard.DAMAGED):
            shown += tables.response_tables(first.path, second.path, records.root)
            changed = changed_items_table(first.path, second.path, most=_WORST_ITEMS)
            shown += [changed] if changed else []
    own = [entry for entry in records.records if entry.variant == name]
    return {
        "row": row,
        "unproven": list_unproven(records, [each for each in rows if each.variant == name]),
        "missing": [
            (evidence.kind.replace("_", " "), choice.measuring_command(row, evidence.kind))
            for evidence in row.evidence
            if evidence.verdict == "missing"
        ],
        "tables": shown,
        "records": sorted(own, key=lambda entry: entry.ended, reverse=True),
    }
