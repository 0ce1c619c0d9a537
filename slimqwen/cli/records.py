"""`slimqwen record`: check, compare, repeat, export and list records."""

from pathlib import Path
from typing import Annotated

import typer
from rich.markup import escape

from slimqwen import variant as variants
from slimqwen.cli.console import console, progress_bar, relative, say, table
from slimqwen.cli.options import RecordsFolder, matching_variants

app = typer.Typer(help="Check, compare, repeat, export and list records.", no_args_is_help=True)


@app.command()
def check(
    root: Annotated[Path | None, typer.Option(metavar="FOLDER", help="another repository")] = None,
    base: Annotated[
        str | None,
        typer.Option(
            metavar="COMMIT",
            help="records may not differ from this commit's (default: where this branch left the main branch, else the "
            "parent of HEAD)",
        ),
    ] = None,
) -> None:
    """Check every record and what Markdown files say about them; change nothing. Exit code 1: something is wrong."""
    from slimqwen.report import checks

    result = checks.check((root or variants.repository_root()).resolve(), base)
    if result.faults:
        shown = table(["file", "what is wrong", "what to do"], [])
        for fault in result.faults:
            shown.add_row(*map(escape, (fault.location, fault.fault, fault.cure)))
        shown.columns[0].overflow = "fold"  # a path that is cut cannot be opened
        console.print(shown)
    for note in result.notes:
        say(note)
    say(f"{result.records} records, {f'{len(result.faults)} faults' if result.faults else 'no fault'}")
    raise typer.Exit(1 if result.faults else 0)


@app.command()
def compare(
    baseline: Annotated[
        str, typer.Argument(metavar="A", help="the baseline", autocompletion=matching_variants)
    ],
    variant: Annotated[
        str, typer.Argument(metavar="B", help="the variant", autocompletion=matching_variants)
    ],
    records_dir: RecordsFolder = None,
) -> None:
    """Compare two measured variants: scores paired by item, latency as ratios, size of their checkpoints."""
    from slimqwen.report import tables

    subjects = [variants.load(name) for name in (baseline, variant)]
    folders = [records_dir / each.name if records_dir else each.folder for each in subjects]
    for shown in tables.comparison_tables(*folders):
        console.print(shown.as_rich())


@app.command()
def mlflow(
    uri: Annotated[
        str | None, typer.Option(help="MLflow tracking store (default: the SQLite file mlruns/mlflow.db)")
    ] = None,
) -> None:
    """Send the records to an MLflow tracking store, except those that it already has."""
    from slimqwen.records import mlflow_export

    with progress_bar() as progress:
        exported = mlflow_export.export_records(variants.repository_root(), uri, progress)
    say(
        f"{len(exported.added)} records sent, {exported.known} were there already: experiment "
        f"{mlflow_export.EXPERIMENT} of {exported.uri}"
    )
    for problem in exported.problems:
        say(f"left out: {problem.location}: {problem.reason}")


@app.command()
def schemas() -> None:
    """Write the JSON Schema of every record kind, generated from its model, into slimqwen/records/schemas.json."""
    from slimqwen.records import schemas

    say(f"written: {relative(schemas.write())}")
