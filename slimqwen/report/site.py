"""The report as a site: leaderboard, fronts and a page per variant, readable offline and replaced as a whole."""

import contextlib
import shutil
import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any
from urllib.parse import quote

import jinja2

from slimqwen import variant as variants
from slimqwen.bench.latency.tables import speedup_table
from slimqwen.errors import SlimqwenError
from slimqwen.evals import quality_comparison
from slimqwen.evals.quality import Quality
from slimqwen.progress import Progress, silent
from slimqwen.records import collection, registry
from slimqwen.records.collection import Collection, Problem, StoredRecord
from slimqwen.records.provenance import CPU_NOTE, commit_name
from slimqwen.records.record import Record
from slimqwen.records.table import Table
from slimqwen.report import (
    charts,
    columns,
    comparison_charts,
    cost,
    fronts,
    glossary,
    leaderboard,
    tables,
)
from slimqwen.report.charts import Chart
from slimqwen.report.columns import Cell, Column
from slimqwen.report.cost import Prices
from slimqwen.report.fronts import Board
from slimqwen.report.leaderboard import Row
from slimqwen.report.lineage import Family, parameters

_HERE = Path(__file__).parent
_MARK = Path("assets") / "report.css"
_STALE_SECONDS = 3600
_MOST_FRONTS = 3
_MOST_PROBLEMS = 200

DEMO = "demo"
"""Folder of the repository for the records of `slimqwen demo`."""


class ReportError(SlimqwenError):
    """A report that cannot be built, because its folder holds something else."""


@dataclass(frozen=True)
class Site:
    """A written site.

    Attributes:
        index: page to open.
        problems: unusable files, which were left out.
    """

    index: Path
    variants: int
    records: int
    problems: tuple[Problem, ...]


@dataclass(frozen=True)
class Source:
    """Content of the pages.

    Attributes:
        demo: baseline, variant and their summary by the demo's own records.
    """

    records: Collection
    family: Family
    board: Board
    names: tuple[str, ...]
    problems: tuple[Problem, ...]
    prices: Prices
    demo: list[tuple[str, str, Table]]


@dataclass(frozen=True)
class FamilyRows:
    """The leaderboard's rows of one family of variants with their cells, planned ones last."""

    founder: str
    rows: tuple[tuple[Row, Sequence[Cell]], ...]

    @property
    def variants(self) -> int:
        """Number of variants."""
        return len({row.variant for row, _ in self.rows})

    @property
    def measured(self) -> int:
        """Number of variants with evidence."""
        return len({row.variant for row, _ in self.rows if row.is_measured})


def read(root: Path, progress: Progress = silent, prices: Path | None = None) -> Source:
    """Read all records and variants; unusable files become problems.

    Args:
        prices: file of the user's prices; None for eval/prices.yaml.
    """
    progress("read the records", 0, 1)
    user_prices = cost.read_prices(root, prices)
    records = collection.collect(root)
    family = Family(root)
    names = tuple(variants.names(root))
    rows: list[Row] = []
    problems = {problem.location: problem for problem in (*records.problems, *family.problems)}
    for done, name in enumerate(names):
        progress("pair the records", done, len(names))
        variant_rows, unusable = leaderboard.rows_of(records, name)
        rows += variant_rows
        problems |= {problem.location: problem for problem in unusable}
    progress("pair the records", len(names), len(names))
    demo = _demo_runs(records, problems)
    ordered = tuple(problems[location] for location in sorted(problems))
    return Source(records, family, fronts.board(rows), names, ordered, user_prices, demo)


def _demo_runs(records: Collection, problems: dict[str, Problem]) -> list[tuple[str, str, Table]]:
    """The variants of demo/ whose baselines are there too; records that cannot be used become a problem."""
    runs = []
    for folder in sorted((records.root / DEMO).glob("*/")):
        claims = records.measurements.get(folder.name)
        if claims is None or claims.baseline is None or not (folder.parent / claims.baseline).is_dir():
            continue
        try:
            table = tables.summary_table(records.root, claims.baseline, folder.name, DEMO)
        except leaderboard.DAMAGED as error:
            location = f"{DEMO}/{folder.name}"
            problems[location] = Problem(location, f"{error}; run `slimqwen demo` again")
        else:
            runs.append((claims.baseline, folder.name, table))
    return runs


def build(root: Path, destination: Path, progress: Progress = silent, prices: Path | None = None) -> Site:
    """Write the site; an older one is replaced once the new one is complete.

    Args:
        destination: folder of the site, created if missing.
        prices: file of the user's prices; None for eval/prices.yaml.

    Raises:
        ReportError: the destination holds something else.
        SettingsError: the prices are missing or cannot be used.
    """
    if destination.exists() and (
        not destination.is_dir() or (not (destination / _MARK).is_file() and any(destination.iterdir()))
    ):
        raise ReportError(
            f"{destination} holds something other than a report; name another folder, or empty it"
        )
    destination.parent.mkdir(parents=True, exist_ok=True)
    _delete_stale(destination)
    source = read(root, progress, prices)
    with tempfile.TemporaryDirectory(prefix=f".{destination.name}.", dir=destination.parent) as temporary:
        new, old = Path(temporary, "new"), Path(temporary, "old")
        (new / "variants").mkdir(parents=True)
        shutil.copytree(_HERE / "assets", new / "assets")
        _write_pages(source, new, progress)
        if destination.exists():
            destination.rename(old)
        try:
            new.rename(destination)
        except BaseException:
            with contextlib.suppress(FileNotFoundError):
                old.rename(destination)
            raise
    return Site(destination / "index.html", len(source.names), len(source.records.records), source.problems)


def figures(root: Path, folder: Path, progress: Progress = silent) -> list[Path]:
    """Write the largest fronts against latency and against size as SVG files for a README.

    Args:
        folder: created if missing.

    Returns:
        The files; empty without a front.
    """
    source = read(root, progress)
    drawn: dict[str, Chart] = {}
    for front in source.board.fronts:
        if front.cost == "size" or front.cost.endswith("E2EL"):
            name = "pareto-size" if front.cost == "size" else "pareto-latency"
            drawn[name] = drawn.get(name) or comparison_charts.pareto(front)
    charts.draw(list(drawn.values()))
    folder.mkdir(parents=True, exist_ok=True)
    for name, chart in drawn.items():
        (folder / f"{name}.svg").write_text(chart.standalone, encoding="utf-8")
    return [folder / f"{name}.svg" for name in drawn]


def _write_pages(source: Source, folder: Path, progress: Progress) -> None:
    pages = _environment(glossary.read(source.records.root))
    contents = {f"variants/{name}.html": _variant_page(source, name) for name in source.names}
    contents["index.html"] = _index_page(source)
    drawn = [chart for content in contents.values() for chart in content["charts"]]
    charts.draw(drawn, progress, source.records.root / ".cache" / "charts")
    for done, (path, content) in enumerate(contents.items()):
        progress("write the pages", done, len(contents))
        template = "variant.html.jinja" if "name" in content else "index.html.jinja"
        (folder / path).write_text(pages.get_template(template).render(content), encoding="utf-8")
    progress("write the pages", len(contents), len(contents))


def _environment(terms: Mapping[str, str]) -> jinja2.Environment:
    """Templates with their filters, and the glossary's meanings by term."""
    pages = jinja2.Environment(
        loader=jinja2.FileSystemLoader(_HERE / "templates"),
        autoescape=True,
        trim_blocks=True,
        lstrip_blocks=True,
        undefined=jinja2.StrictUndefined,
    )
    pages.filters["page"] = lambda name: quote(f"{name}.html")
    pages.filters["words"] = lambda kind: kind.replace("_", "-")
    pages.filters["commit"] = commit_name
    pages.filters["explained"] = partial(glossary.explained, meanings=glossary.abbreviations(terms))
    pages.globals["cpu_note"] = CPU_NOTE
    pages.globals["terms"] = terms
    return pages


def _index_page(source: Source) -> dict[str, Any]:
    board = source.board
    board_columns = columns.columns(board)
    drawn: dict[tuple[str, str], list[Chart]] = {}
    for front in board.fronts:
        if len(drawn) < _MOST_FRONTS or (front.baseline, front.hardware) in drawn:
            drawn.setdefault((front.baseline, front.hardware), []).append(comparison_charts.pareto(front))
    shown = {baseline for baseline, _ in drawn}
    return {
        "up": "",
        "board": board,
        "demo": source.demo,
        "charts": [chart for group in drawn.values() for chart in group],
        "columns": board_columns,
        "families": _families(source, board_columns),
        "cost": cost.table(cost.throughputs(source.records), source.prices),
        "hardware": sorted({row.hardware for row in board.rows if row.hardware}),
        "suites": sorted({suite for row in board.rows for suite in row.suites}),
        "standing": list(dict.fromkeys(row.standing for row in board.rows)),
        "fronts": drawn,
        "hidden_fronts": sorted({front.baseline for front in board.fronts} - shown),
        "problems": source.problems[:_MOST_PROBLEMS],
        "problem_count": len(source.problems),
        "record_count": len(source.records.records),
        "newest": max((entry.ended for entry in source.records.records), default=""),
        "initials": columns.initials(
            [evidence.kind for evidence in board.rows[0].evidence] if board.rows else []
        ),
    }


def _families(source: Source, board_columns: Sequence[Column]) -> list[FamilyRows]:
    """The rows by family in the order of the board, but families with a measured variant first."""
    baselines = {row.variant: row.baseline for row in source.board.rows}
    members: dict[str, list[tuple[Row, Sequence[Cell]]]] = {}
    for row in source.board.rows:
        founder = source.family.founder(row.variant, baselines)
        members.setdefault(founder, []).append((row, [column.cell(row) for column in board_columns]))
    families = [
        FamilyRows(founder, tuple(sorted(rows, key=lambda pair: pair[0].status == "planned")))
        for founder, rows in members.items()
    ]
    return sorted(families, key=lambda family: not family.measured)


def _variant_page(source: Source, name: str) -> dict[str, Any]:
    board, family = source.board, source.family
    rows = [row for row in board.rows if row.variant == name]
    page_columns = [column for column in columns.columns(board) if column.label != "hypothesis"]
    records = [entry for entry in source.records.records if entry.variant == name]
    member = family.members.get(name)
    folder = f"experiments/{name}"
    return {
        "up": "../",
        "name": name,
        "rows": [(row, [(column, column.cell(row)) for column in page_columns]) for row in rows],
        "row": rows[0],
        "choices": [choice for choice in board.choices if choice.baseline == name and choice.serve],
        "searches": source.records.select(registry.kinds()["search"], name)[:1],
        "changes": family.changes(name) if member else None,
        "base": member.lineage[1] if member and len(member.lineage) > 1 else None,
        "tree": family.tree(name) if member else None,
        "recipe": family.recipe(name) if member else None,
        "parameters": parameters,
        "sizes": family.stage_sizes(name) if member else [],
        "tables": _tables(source, rows),
        "charts": _charts(source, rows),
        "records": sorted(records, key=lambda entry: entry.ended, reverse=True),
        "describe": leaderboard.hardware,
        "problems": [
            problem
            for problem in source.problems
            if problem.location == folder or problem.location.startswith(f"{folder}/")
        ],
        "initials": columns.initials([evidence.kind for evidence in rows[0].evidence]),
        "verbs": {kind: model.verb for kind, model in registry.kinds().items()},
    }


def _tables(source: Source, rows: Sequence[Row]) -> list[Table]:
    """Comparisons with the baseline, the service level, then the tables of the newest records."""
    name, baseline = rows[0].variant, rows[0].baseline or ""
    changes = [score.change for score in rows[0].scores.values() if score.change]
    measured = []
    if changes:
        record = source.records.select(Quality, name)[0].record
        title = f"Quality: {baseline} and {name}, paired by item"
        measured = [quality_comparison.paired_table(title, record, (baseline, name), changes)]
    for timed in filter(None, (row.timed for row in rows)):
        if timed.baseline and timed.comparison:
            measured.append(
                speedup_table(
                    (timed.baseline.record, timed.latency.record),
                    (timed.baseline.path, timed.latency.path),
                    (baseline, name),
                    timed.comparison,
                )
            )
    if cost_table := cost.table(cost.throughputs(source.records, name), source.prices):
        measured.append(cost_table)
    for entry in _newest(source, name):
        with contextlib.suppress(*leaderboard.DAMAGED):  # the problems name damaged items
            measured += entry.record.tables(entry.path)
    return measured


def _newest(source: Source, name: str) -> Sequence[StoredRecord[Record]]:
    """The newest record of each kind and topic."""
    newest: dict[tuple[str, str], StoredRecord[Record]] = {}
    for kind in registry.kinds().values():
        for entry in source.records.select(kind, name):
            newest.setdefault((entry.kind, entry.record.topic), entry)
    return tuple(newest.values())


def _charts(source: Source, rows: Sequence[Row]) -> list[Chart]:
    """Paired changes, a baseline's fronts, latency distributions, and the newest record of each kind with panels."""
    name = rows[0].variant
    drawn = [comparison_charts.changes(rows[0].scores.values())]
    machines = {row.hardware for row in rows}
    drawn += [
        comparison_charts.pareto(front)
        for front in source.board.fronts
        if front.baseline == name and front.hardware in machines
    ]
    for row in rows:
        if row.timed:
            sides = [row.timed.latency, *([row.timed.baseline] if row.timed.baseline else [])]
            with contextlib.suppress(*leaderboard.DAMAGED):  # the problems name damaged items
                drawn.append(comparison_charts.latency_distributions(sides))
    drawn += [charts.of_record(entry.record) for entry in _newest(source, name)]
    return [chart for chart in drawn if chart]


def _delete_stale(destination: Path) -> None:
    """Delete the folders of killed builds; a recent one may belong to a running build."""
    for folder in destination.parent.glob(f".{destination.name}.*"):
        if time.time() - folder.stat().st_mtime > _STALE_SECONDS:
            shutil.rmtree(folder, ignore_errors=True)
