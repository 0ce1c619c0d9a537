"""`slimqwen report`: builds the page of all records; options check, tabulate or export the records instead."""

from pathlib import Path
from typing import Annotated, Any

import typer
from rich.markup import escape

from slimqwen import variant
from slimqwen.cli.command_list import commands_file, render_commands
from slimqwen.cli.console import console, errors, progress_bar, relative, say, table
from slimqwen.errors import SlimqwenError

_SHOWN_PROBLEMS = 20


def report(
    context: typer.Context,
    output: Annotated[
        Path | None, typer.Option(metavar="FOLDER", help="folder of the page (default: report/)")
    ] = None,
    check: Annotated[
        bool,
        typer.Option("--check", help="check all records and their tables; exit code 1: there is a fault"),
    ] = False,
    tables: Annotated[
        bool,
        typer.Option("--tables", help="rewrite tables in Markdown, docs/commands.md and docs/stages.md"),
    ] = False,
    newest: Annotated[
        bool,
        typer.Option("--newest", help="with --tables: replace the records that a table names by newer ones"),
    ] = False,
    field: Annotated[
        bool,
        typer.Option(
            "--field",
            help="write what this machine measured, without a name or path of yours, into eval/field/",
        ),
    ] = False,
    mlflow: Annotated[
        str | None,
        typer.Option(
            metavar="URI", help="send new records to an MLflow store: sqlite:///mlruns/mlflow.db, http://…"
        ),
    ] = None,
    schemas: Annotated[
        bool,
        typer.Option("--schemas", help="write slimqwen/records/schemas.json from the record kinds"),
    ] = False,
) -> None:
    """Build report/index.html: what to serve, the leaderboard, each variant; or do what the options say instead."""
    if newest and not tables:
        raise typer.BadParameter("--newest works only with --tables; add --tables")
    root = variant.repository_root()
    if schemas:
        _write_schemas()
    if field:
        _write_field_report(root)
    if tables:
        _rewrite_tables(root, context.find_root().command, newest=newest)
    if mlflow is not None:
        _export_records(root, mlflow)
    if check:
        _check_records(root)
    if not (check or tables or schemas or mlflow or field):
        _build_page(root, output or root / "report")


def update_page(folder: Path, *, newest: bool = False) -> None:
    """Rewrite the tables of one variant's README.md, if it has one; if that fails, print the cause and go on.

    Args:
        folder: folder of the variant, experiments/<variant>.
        newest: whether newer records replace those that a table names.
    """
    from slimqwen.report import markdown

    page = folder / "README.md"
    try:
        markdown.update_tables(folder.parents[1], [page] if page.is_file() else [], newest=newest)
    except (SlimqwenError, OSError, UnicodeError) as error:
        say(f"the tables of {relative(page)} were not rewritten: {error}")


def _build_page(root: Path, folder: Path) -> None:
    from slimqwen.report import site

    with progress_bar() as progress:
        built = site.build_page(root, folder, progress)
    for problem in built.problems[:_SHOWN_PROBLEMS]:
        errors.print(f"left out: {problem.location}: {problem.reason}", markup=False)
    if len(built.problems) > _SHOWN_PROBLEMS:
        errors.print(f"… and {len(built.problems) - _SHOWN_PROBLEMS} more, on the page")
    say(
        f"{built.index}: {built.variants} variants, {built.records} records, {len(built.problems)} files left out"
    )


def _check_records(root: Path) -> None:
    from slimqwen.report import checks

    result = checks.check_records(root)
    if result.faults:
        shown = table(["file", "what is wrong", "what to do"], [])
        for fault in result.faults:
            shown.add_row(*map(escape, (fault.location, fault.fault, fault.cure)))
        shown.columns[0].overflow = "fold"  # a shortened path could not be opened
        console.print(shown)
    for note in result.notes:
        say(note)
    say(f"{result.records} records, {f'{len(result.faults)} faults' if result.faults else 'no fault'}")
    raise typer.Exit(1 if result.faults else 0)


def _rewrite_tables(root: Path, command: Any, *, newest: bool) -> None:
    from slimqwen.cli.stage_list import render_stages, stages_file
    from slimqwen.report import markdown

    rewritten = markdown.update_tables(root, newest=newest)
    for file, content in (
        (commands_file(root), render_commands(command)),
        (stages_file(root), render_stages()),
    ):
        if not file.is_file() or file.read_text(encoding="utf-8") != content:
            file.write_text(content, encoding="utf-8")
            rewritten.append(file)
    for file in rewritten:
        say(f"rewritten: {relative(file)}")


def _export_records(root: Path, uri: str) -> None:
    from slimqwen.records import mlflow_export

    with progress_bar() as progress:
        exported = mlflow_export.export_records(root, uri, progress)
    say(
        f"{len(exported.added)} records sent, {exported.known} were there already: experiment "
        f"{mlflow_export.EXPERIMENT} of {exported.uri}"
    )
    for problem in exported.problems:
        say(f"left out: {problem.location}: {problem.reason}")


def _write_field_report(root: Path) -> None:
    from slimqwen.report.field import write_report

    file, content, left_out = write_report(root)
    for problem in left_out:
        say(f"left out: {problem.location}: {problem.reason}")
    rows, card = len(content.rows), content.card.name
    say(f"written: {relative(file)}, {rows} rows of {card}; read it, then send it with docs/cells.md")


def _write_schemas() -> None:
    from slimqwen.records import schemas

    say(f"written: {relative(schemas.write_schemas())}")
