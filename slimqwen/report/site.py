"""The site: the board and the charts as pages that open from disk, ask no network and are whole or not there."""

import contextlib
import shutil
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.parse import quote

import jinja2

from slimqwen import variant as variants
from slimqwen.errors import SlimqwenError
from slimqwen.evaluation import comparison
from slimqwen.progress import Progress, silent
from slimqwen.records import collection
from slimqwen.records.collection import Collection, Found, Problem
from slimqwen.report import charts, columns, leaderboard
from slimqwen.report.charts import Chart
from slimqwen.report.leaderboard import Board, Row
from slimqwen.report.lineage import Family, StageSize

_HERE = Path(__file__).parent
_MARK = Path("assets") / "report.css"
_STALE_SECONDS = 3600
_MOST_FRONTS = 3
_MOST_LINES = 6
_MOST_PROBLEMS = 200


class ReportError(SlimqwenError):
    """The place that a report is to go to holds something else."""


@dataclass(frozen=True)
class Built:
    """A site that was written.

    Attributes:
        index: the page to open.
        variants: how many there is a page of.
        records: how many it stands on.
        problems: the files that were left out.
    """

    index: Path
    variants: int
    records: int
    problems: tuple[Problem, ...]


@dataclass(frozen=True)
class Source:
    """Everything that pages are made from, read once."""

    records: Collection
    family: Family
    board: Board
    names: tuple[str, ...]
    problems: tuple[Problem, ...]


def read(root: Path, progress: Progress = silent) -> Source:
    """Read the records and the variants of a repository; what cannot be used becomes a problem.

    Args:
        root: the repository.
        progress: hears the variants paired with their baselines.
    """
    progress("read the records", 0, 1)
    records = collection.collect(root)
    family = Family(root)
    names = tuple(sorted({*variants.names(root), *records.measurements}))
    rows: list[Row] = []
    problems = {problem.place: problem for problem in (*records.problems, *family.problems)}
    for done, name in enumerate(names):
        progress("pair the records", done, len(names))
        of_variant, unusable = leaderboard.rows_of(records, name)
        rows += of_variant
        problems |= {problem.place: problem for problem in unusable}
    progress("pair the records", len(names), len(names))
    ordered = tuple(problems[place] for place in sorted(problems))
    return Source(records, family, leaderboard.assemble(rows), names, ordered)


def build(root: Path, destination: Path, progress: Progress = silent) -> Built:
    """Write the site; an older one at its place is replaced when the new one is whole, and stays where none comes.

    Args:
        root: the repository.
        destination: the folder, made if missing.
        progress: hears the pages done.

    Raises:
        ReportError: the destination holds something that is no report.
    """
    if destination.exists() and (
        not destination.is_dir() or (not (destination / _MARK).is_file() and any(destination.iterdir()))
    ):
        raise ReportError(
            f"{destination} holds something that is no report; name another folder, or empty it"
        )
    destination.parent.mkdir(parents=True, exist_ok=True)
    _delete_stale(destination)
    source = read(root, progress)
    with tempfile.TemporaryDirectory(prefix=f".{destination.name}.", dir=destination.parent) as place:
        fresh, old = Path(place, "fresh"), Path(place, "old")
        (fresh / "variants").mkdir(parents=True)
        shutil.copytree(_HERE / "assets", fresh / "assets")
        _write_pages(source, fresh, progress)
        if destination.exists():
            destination.rename(old)
        try:
            fresh.rename(destination)
        except BaseException:
            with contextlib.suppress(FileNotFoundError):
                old.rename(destination)
            raise
    return Built(destination / "index.html", len(source.names), len(source.records.records), source.problems)


def figures(root: Path, folder: Path, progress: Progress = silent) -> list[Path]:
    """Write the main charts as SVG files for a README: the largest front against latency and size, and start-up.

    Args:
        root: the repository.
        folder: made if missing.
        progress: hears the records read.

    Returns:
        the files; none where the records have nothing to show.
    """
    source = read(root, progress)
    drawn: dict[str, Chart] = {}
    for front in source.board.fronts:
        if front.cost == "size" or front.cost.endswith("E2EL"):
            kind = "pareto-size" if front.cost == "size" else "pareto-latency"
            drawn[kind] = drawn.get(kind) or charts.pareto(front)
    starts = charts.start_up(_newest_of(source, "start_up")[:_MOST_LINES])
    if starts:
        drawn["start-up"] = starts
    charts.draw(list(drawn.values()))
    folder.mkdir(parents=True, exist_ok=True)
    written = []
    for name, chart in drawn.items():
        file = folder / f"{name}.svg"
        file.write_text(chart.standalone, encoding="utf-8")
        written.append(file)
    return written


def _write_pages(source: Source, folder: Path, progress: Progress) -> None:
    pages = _environment()
    contents = {f"variants/{_file_name(name)}": _variant_page(source, name) for name in source.names}
    contents["index.html"] = _index_page(source)
    charts.draw([chart for content in contents.values() for chart in content["charts"]], progress)
    for done, (place, content) in enumerate(contents.items()):
        progress("write the pages", done, len(contents))
        template = "variant.html.jinja" if "name" in content else "index.html.jinja"
        (folder / place).write_text(pages.get_template(template).render(content), encoding="utf-8")
    progress("write the pages", len(contents), len(contents))


def _environment() -> jinja2.Environment:
    pages = jinja2.Environment(
        loader=jinja2.FileSystemLoader(_HERE / "templates"),
        autoescape=True,
        trim_blocks=True,
        lstrip_blocks=True,
        undefined=jinja2.StrictUndefined,
    )
    pages.filters["page"] = lambda name: quote(_file_name(name))
    pages.filters["words"] = lambda kind: str(kind).replace("_", "-")
    pages.filters["commit"] = columns.commit
    pages.filters["speed_up"] = columns.speed_up
    return pages


def _file_name(variant: str) -> str:
    return f"{variant}.html"


def _index_page(source: Source) -> dict[str, Any]:
    board = source.board
    wanted = columns.columns(board)
    groups: dict[tuple[str, str], list[Chart]] = {}
    for front in board.fronts:
        if len(groups) < _MOST_FRONTS or (front.baseline, front.hardware) in groups:
            groups.setdefault((front.baseline, front.hardware), []).append(charts.pareto(front))
    across = _across(source)
    return {
        "up": "",
        "board": board,
        "charts": [*(chart for drawn in groups.values() for chart in drawn), *across],
        "columns": wanted,
        "rows": [(row, columns.as_cells(row, wanted)) for row in board.rows],
        "hardware": sorted({row.hardware for row in board.rows if row.hardware}),
        "suites": sorted({suite for row in board.rows for suite in row.suites}),
        "stands": list(dict.fromkeys(row.stands for row in board.rows)),
        "fronts": groups,
        "hidden_fronts": sorted(
            {front.baseline for front in board.fronts} - {baseline for baseline, _ in groups}
        ),
        "across": across,
        "unmeasured": [row for row in board.rows if row.newest is None],
        "problems": source.problems[:_MOST_PROBLEMS],
        "problem_count": len(source.problems),
        "record_count": len(source.records.records),
        "newest": max((str(one.record["provenance"]["ended"]) for one in source.records.records), default=""),
        "cpu_note": leaderboard.CPU_NOTE,
        "made_by": leaderboard.MADE_BY,
    }


def _across(source: Source) -> list[Chart]:
    """Charts with a line a variant: those measured last."""
    found: list[Chart | None] = []
    counted = _newest_of(source, "acceptance")[:_MOST_LINES]
    if counted:
        found.append(charts.acceptance(counted))
    contexts = _newest_of(source, "latency", "context")[:_MOST_LINES]
    if contexts:
        found.append(charts.time_per_token(contexts))
    timed = _newest_of(source, "latency", "classes")
    if timed:
        # Distributions are comparable only where the requests and the hardware are the same.
        basis = comparison.latency_basis(timed[0].record)
        alike = [one for one in timed if comparison.latency_basis(one.record) == basis][:_MOST_LINES]
        found += _distributions(alike)
    starts = _newest_of(source, "start_up")[:_MOST_LINES]
    if starts:
        found.append(charts.start_up(starts))
    found += [charts.coverage(one) for one in _newest_of(source, "vocab_coverage")[:2]]
    for row in source.board.rows:
        sizes = _stage_sizes(source, row)
        if len(sizes) > 2:
            found.append(charts.stage_sizes(row.variant, sizes))
            break
    staged = [one for one in _newest_of(source, "fidelity") if one.record["stages"]]
    if staged:
        found.append(charts.stage_fidelity(staged[0]))
    return [chart for chart in found if chart]


def _newest_of(source: Source, kind: str, workload: str | None = None) -> list[Found]:
    """The newest record of a kind of each variant, the newest first."""
    found = []
    for name in source.names:
        records = source.records.of(name, kind)
        found += [one for one in records if workload is None or one.record["workload"] == workload][:1]
    return sorted(found, key=lambda one: str(one.record["provenance"]["ended"]), reverse=True)


def _variant_page(source: Source, name: str) -> dict[str, Any]:
    board, family = source.board, source.family
    rows = [row for row in board.rows if row.variant == name]
    wanted = [one for one in columns.columns(board) if one.label != "hypothesis"]
    records = [one for one in source.records.records if one.variant == name]
    known = name in family.members
    place = f"experiments/{name}"
    return {
        "up": "../",
        "name": name,
        "rows": [(row, list(zip(wanted, columns.as_cells(row, wanted), strict=True))) for row in rows],
        "row": rows[0],
        "changes": family.changes(name) if known else None,
        "base": family.members[name].lineage[1] if known and len(family.members[name].lineage) > 1 else None,
        "tree": family.tree(name) if known else None,
        "recipe": family.recipe(name) if known else None,
        "quality": [score for score in rows[0].scores.values() if score.change],
        "timed": [one for one in rows if one.timed],
        "measures": columns.LATENCY_MEASURES,
        "interval": _interval,
        "charts": _charts(source, rows[0], rows),
        "records": sorted(records, key=lambda one: str(one.record["provenance"]["ended"]), reverse=True),
        "describe": leaderboard.hardware,
        "problems": [
            one for one in source.problems if one.place == place or one.place.startswith(f"{place}/")
        ],
        "made_by": {kind: command.format(name) for kind, command in leaderboard.MADE_BY.items()},
        "cpu_note": leaderboard.CPU_NOTE,
        "margins": lambda score: columns.margins(leaderboard.in_margins(score.change)),
        "change": columns.change,
    }


def _charts(source: Source, row: Row, rows: Sequence[Row]) -> list[Chart]:
    name, records = row.variant, source.records
    found: list[Chart | None] = [charts.changes(row.scores.values())]
    for front in source.board.fronts:
        # A baseline's page is the place of the fronts of all that are held against it.
        if front.baseline == name and front.hardware in {one.hardware for one in rows}:
            found.append(charts.pareto(front))
    for one in rows:
        if one.timed:
            found += _distributions([one.timed.found, *([one.timed.against] if one.timed.against else [])])
    contexts = [one for one in records.of(name, "latency") if one.record["workload"] == "context"][:1]
    if contexts:
        found.append(charts.time_per_token(contexts))
    counted = records.of(name, "acceptance")[:1]
    baseline = records.of(row.baseline, "acceptance")[:1] if row.baseline else ()
    if counted:
        found.append(charts.acceptance_by_class(counted[0]))
    if counted and len(counted[0].record["depths"]) > 1:
        found.append(charts.acceptance([*counted, *baseline]))
    starts = records.of(name, "start_up")[:1]
    if starts:
        found.append(charts.start_up(starts))
    found += [charts.coverage(one) for one in records.of(name, "vocab_coverage")[:1]]
    sizes = _stage_sizes(source, row)
    if sizes:
        found.append(charts.stage_sizes(row.variant, sizes))
    found += [charts.stage_fidelity(one) for one in records.of(name, "fidelity") if one.record["stages"]][:1]
    return [chart for chart in found if chart]


def _stage_sizes(source: Source, row: Row) -> list[StageSize]:
    """From the manifests on this machine; elsewhere the records say what the whole recipe came to."""
    name = row.variant
    if name not in source.family.members:
        return []
    sizes = source.family.stage_sizes(name)
    recipe = source.family.recipe(name)
    if sizes or recipe is None or not row.size_bytes:
        return sizes
    bases = [one.size_bytes for one in source.board.rows if one.variant == recipe.base and one.size_bytes]
    return [StageSize(recipe.base, bases[0]), StageSize("all stages", row.size_bytes)] if bases else []


def _distributions(sides: Sequence[Found]) -> list[Chart]:
    with contextlib.suppress(
        SlimqwenError, ValueError, TypeError, KeyError
    ):  # damaged items: the problems name them
        return [charts.latency_distributions(sides)]
    return []


def _interval(found: Found, name: str, measure: str) -> str:
    """Of the median of a class, from the record's items; empty where they are damaged."""
    with contextlib.suppress(SlimqwenError, ValueError, TypeError, KeyError):  # as above
        return " [{:,.1f}, {:,.1f}]".format(*leaderboard.median_interval(found, name, measure))
    return ""


def _delete_stale(destination: Path) -> None:
    """What a build that was killed left behind; a young one may still be at work."""
    for left in destination.parent.glob(f".{destination.name}.*"):
        if time.time() - left.stat().st_mtime > _STALE_SECONDS:
            shutil.rmtree(left, ignore_errors=True)
