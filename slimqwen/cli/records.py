"""`slimqwen record`: check, compare, repeat, export and list records."""

from pathlib import Path
from typing import Annotated

import typer
from rich.markup import escape

from slimqwen import variant as variants
from slimqwen.cli.console import command, console, progress_bar, relative, say, table
from slimqwen.cli.options import Port, RecordsFolder, matching_variants

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
def replay(
    record: Annotated[Path, typer.Argument(help="such as experiments/tiny-awq/quality_….json")],
    port: Port = None,
) -> None:
    """Repeat the measurement of a record, and say whether the result is the same.

    Exit code 0: every answer is the same, or the ratio of times has 1.00 in its interval; 1: it is not; 2: error.
    """
    from slimqwen.records import replay

    with progress_bar() as progress:
        result = replay.replay(record.resolve(), command=command(), port=port, progress=progress)
    for shown in result.tables:
        console.print(shown.as_rich())
    say(result.summary)
    if result.differences:
        say("not as it was then:")
        for difference in result.differences:
            say(f"  {difference}")
    else:
        say("checkpoint, data, flags, hardware, versions and commit are what they were then")
    say(f"record: {relative(result.repetition)}")
    raise typer.Exit(0 if result.reproduced else 1)


@app.command()
def mlflow(
    uri: Annotated[
        str | None, typer.Option(help="MLflow tracking store (default: the SQLite file mlruns/mlflow.db)")
    ] = None,
) -> None:
    """Send the records to an MLflow tracking store, except those that it already has."""
    from slimqwen.records import mlflow_export

    with progress_bar() as progress:
        exported = mlflow_export.export(variants.repository_root(), uri, progress)
    say(
        f"{len(exported.added)} records sent, {exported.known} were there already: experiment "
        f"{mlflow_export.EXPERIMENT} of {exported.uri}"
    )
    for problem in exported.problems:
        say(f"left out: {problem.location}: {problem.reason}")


@app.command()
def log(
    variant: Annotated[
        str | None, typer.Option(metavar="NAME", help="only this variant", autocompletion=matching_variants)
    ] = None,
    last: Annotated[int, typer.Option(min=0, help="lines, 0 for all")] = 20,
) -> None:
    """Show the dated log of results, newest first, negative ones included."""
    from slimqwen.report import log

    entries, problems = log.entries(variants.repository_root(), variant=variant, last=last or None)
    shown = table(["ended (UTC)", "variant", "kind", "finding", "commit"], [])
    for entry in entries:
        day = entry.ended.replace("T", " ").removesuffix("Z")
        shown.add_row(day, entry.variant or "-", entry.kind, entry.finding, entry.commit)
    console.print(shown)
    for problem in problems:
        say(f"left out: {problem.location}: {problem.reason}")


@app.command()
def schemas() -> None:
    """Write the JSON Schema of every record kind, generated from its model, into slimqwen/records/schemas.json."""
    from slimqwen.records import schemas

    say(f"written: {relative(schemas.write())}")
