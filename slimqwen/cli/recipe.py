"""`slimqwen recipe`: makes a checkpoint by stages, verifies it, deletes unused outputs."""

import re
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

import typer

from slimqwen import api
from slimqwen import variant as variants
from slimqwen.cli.console import console, duration, from_here, progress_bar, relative, say, table
from slimqwen.cli.options import VariantOption
from slimqwen.errors import SlimqwenError
from slimqwen.variant import Variant

if TYPE_CHECKING:
    from collections.abc import Sequence

    from slimqwen.recipe import runner
    from slimqwen.text.calibration_mix import Source
    from slimqwen.text.documents import Understanding

_EXAMPLE_CHARACTERS = 400

app = typer.Typer(help="Make a variant's checkpoint stage by stage.", no_args_is_help=True)


@app.command("run")
def run_variant_recipe(
    variant: VariantOption,
    until: Annotated[
        str | None,
        typer.Option(metavar="STAGE", help="last stage to run; the first of several with this name"),
    ] = None,
    shape: Annotated[
        bool,
        typer.Option(
            help="run no stage; write a checkpoint's dimensions without weights to weights/shape-NAME, to time them"
        ),
    ] = False,
    dry_run: Annotated[
        bool,
        typer.Option(
            "--dry-run",
            help="run no stage; show memory, disk and time of each, and which outputs would be reused",
        ),
    ] = False,
    gpu: Annotated[
        str | None,
        typer.Option(metavar="GPU", help="with --dry-run: also the time on this GPU, by its data sheet"),
    ] = None,
) -> None:
    """Run recipe.yaml and write weights/NAME; resumes an interrupted run and reuses outputs that are up to date."""
    if dry_run:
        _show_dry_run(variant, gpu)
        return
    if gpu:
        raise typer.BadParameter(
            "--gpu needs --dry-run, because a run uses this machine; add --dry-run, or leave out --gpu"
        )
    if shape:
        from slimqwen.plan import shapes

        with progress_bar() as progress:
            folder = shapes.write_variant_shape(variant, progress)
        say(
            f"{relative(folder)}: the dimensions of {variant.name}, without weights. To time them, add a variant whose "
            f"config.env says BASE={variant.name}, VLLM_MODEL={folder.relative_to(variant.root)} and "
            "VLLM_LOAD_FORMAT=dummy."
        )
        return
    from slimqwen.recipe import variant_recipe
    from slimqwen.recipe.registry import STAGES

    _announce_upgrade(variant)
    with progress_bar() as progress:
        outcomes = api.run_recipe(variant, until=until, progress=progress)
    rows = table(["stage", ""], ("time", "peak memory", "size before", "after"))
    for outcome in outcomes:
        rows.add_row(
            outcome.stage,
            "reused" if outcome.reused else "done",
            "" if outcome.reused else f"{outcome.manifest.wall_seconds:.0f} s",
            f"{outcome.manifest.peak_memory_bytes / 1e9:.2f} GB",
            f"{outcome.bytes_before / 1e6:.1f} MB",
            f"{outcome.bytes_after / 1e6:.1f} MB",
        )
    console.print(rows)
    if any(outcome.outdated for outcome in outcomes):
        say(
            "outputs that an earlier version of slimqwen made were made anew, for their keys are made in another way; "
            "`slimqwen recipe clean` deletes them"
        )
    is_complete = len(outcomes) == len(variant_recipe.read_recipe(variant).steps)
    weights = variant.root / "weights" / variant.name
    say(f"checkpoint: {relative(weights if is_complete else outcomes[-1].folder)}")
    for outcome in outcomes:
        if decision := STAGES[outcome.stage].summarise(outcome.manifest.facts):
            say(f"{outcome.stage}: {decision}")
    if compared := _compare_with_baseline(variant, outcomes):
        say(f"redistill_mtp: {compared}")
    for outcome in outcomes:
        if not outcome.reused:
            say(f"log of {outcome.stage}: {relative(outcome.log)}")
    if is_complete and variant.baseline:
        say(f"next: `slimqwen gate {variant.name}`")


def _announce_upgrade(variant: Variant) -> None:
    """Say before a run that it makes outputs anew for no other reason than that slimqwen or a package has changed."""
    from slimqwen.recipe import variant_recipe

    weights = variant.root / "weights" / variant.name
    if not weights.is_symlink():
        return  # there is nothing to keep; and the first digest of a large base takes minutes, which a run shows
    try:
        forecasts = variant_recipe.forecast_recipe(variant)
    except SlimqwenError:
        return  # the run names every fault of the recipe
    if remade := next((each.stage for each in forecasts if each.is_upgrade), None):
        say(
            f"{remade} has an output, but slimqwen's code or a package has changed since: it and what follows from it "
            f"are made anew. {relative(weights)} stays as it is until the last stage has run: Ctrl-C keeps it. "
            f"`slimqwen recipe run {variant.name} --dry-run` names what changed."
        )


def _compare_with_baseline(variant: Variant, outcomes: "Sequence[runner.Outcome]") -> str | None:
    """Compare the drafts of a trained head with the served baseline's, in a line; an error is a line too."""
    from slimqwen.captured_log import capture_output
    from slimqwen.recipe import served_baseline

    log = variant.root / "logs" / f"baseline-of-{variant.name}.log"
    try:
        with progress_bar() as progress, capture_output(log):
            return served_baseline.compare_drafts(variant, outcomes, progress)
    except SlimqwenError as error:
        return f"not compared with the served baseline: {error} (log: {relative(log)})"


@app.command()
def verify(variant: VariantOption) -> None:
    """Check a checkpoint: hash its files, compare its tensors with its config.json, load it in vLLM."""
    from slimqwen import checkpoint
    from slimqwen.captured_log import capture_output
    from slimqwen.formats import find_format
    from slimqwen.serving import in_process

    log = variant.root / "logs" / f"verify-{variant.name}.log"
    with progress_bar() as progress:
        manifest = checkpoint.verify(
            variant.weights, variants.making_command(variant.weights, variant.root), progress
        )
        progress("loading in vLLM", 0, 0)
        with capture_output(log):
            in_process.try_out(variant.weights)
    size = sum(record.bytes for record in manifest.files.values())
    form = find_format(checkpoint.quantisation(checkpoint.read_config(variant.weights)))
    exception = (
        "" if form.is_known else f" (except tensors in the format {form.method}, which are not checked)"
    )
    say(
        f"{relative(variant.weights)}: {len(manifest.files)} files, {size / 1e6:.1f} MB, as its manifest says; "
        f"its tensors are those its config.json promises{exception}; vLLM loads it and answers (log: {relative(log)})"
    )


@app.command()
def clean() -> None:
    """Delete the recipe outputs that no variant uses."""
    from slimqwen.recipe import variant_recipe

    root = variants.repository_root()
    freed = variant_recipe.clean(root)
    say(f"freed {freed / 1e6:.1f} MB of weights/store")
    for link, size in variant_recipe.list_orphaned_links(root).items():
        say(
            f"{relative(link)} keeps {size / 1e6:.1f} MB, though no variant is called {link.name}; "
            f"`rm {relative(link)}` and another `slimqwen recipe clean` free what nothing else uses"
        )


@app.command()
def corpus(
    variant: VariantOption,
    source: Annotated[
        list[str],
        typer.Option(
            metavar="NAME=FILE[:WEIGHT]",
            help="a file or folder of .jsonl, .json, .csv, .parquet or .txt (.gz, .zst); may be repeated",
        ),
    ],
    tokens: Annotated[int, typer.Option(help="number of tokens over all sources")],
    output: Annotated[Path, typer.Option(metavar="FILE.jsonl", help="file to write")],
    seed: Annotated[int, typer.Option(help="seed for the order of the documents")] = 0,
    divide: Annotated[
        Literal["blocks", "paragraphs", "lines", "whole"],
        typer.Option(
            help="documents of a .txt file: 8 KiB each, or what empty lines divide, lines, the file"
        ),
    ] = "blocks",
) -> None:
    """Mix a calibration text; the variant's tokenizer counts the tokens, its chat template renders chats."""
    from slimqwen import checkpoint
    from slimqwen.text import calibration_mix

    checkpoint.check_folder(variant.weights, variants.making_command(variant.weights, variant.root))
    output.parent.mkdir(parents=True, exist_ok=True)
    sources = [replace(_parse_source(text), division=divide) for text in source]
    with progress_bar() as progress:
        manifest = calibration_mix.build_calibration_text(
            variant.weights, sources, tokens, seed, output, progress, _show_understanding
        )
    rows = table(["source"], ("weight", "documents", "duplicates", "near-duplicates", "taken", "tokens"))
    for row in manifest["sources"]:
        counts = (row[key] for key in ("documents", "duplicates", "near_duplicates", "taken", "tokens"))
        rows.add_row(row["name"], f"{row['weight']:g}", *map(str, counts))
    console.print(rows)
    if manifest["tokens"] < manifest["tokens_wanted"]:
        say(f"all sources together have {manifest['tokens']:,} of {manifest['tokens_wanted']:,} tokens")
    else:
        for row in manifest["sources"]:
            if row["ran_out"]:
                say(f"{row['name']} has too little text; the other sources fill its share")
    say(f"text: {output}, manifest: {calibration_mix.manifest_path(output)}")


def _show_understanding(name: str, understanding: "Understanding") -> None:
    """Say what a source was understood as, with the beginning of its first document, before it is used."""
    other = "; `--divide paragraphs` divides by empty lines" if understanding.division == "blocks" else ""
    say(f"{name}: {understanding.describe()}{other}; the first:")
    lines = understanding.example[:_EXAMPLE_CHARACTERS].splitlines()
    for line in lines:
        say(f"  | {line}")
    if len(understanding.example) > _EXAMPLE_CHARACTERS:
        say(f"  | … ({len(understanding.example):,} characters in all)")


def _show_dry_run(variant: Variant, gpu: str | None) -> None:
    """Show memory, disk and time of each stage, and whether a run would reuse its output or what has changed."""
    from slimqwen.models.outline import Outline
    from slimqwen.plan import devices, shapes
    from slimqwen.recipe import inspection, variant_recipe
    from slimqwen.recipe.recipe_file import RecipeError, find_base_variant

    sheet = devices.read_gpu(gpu, variant.root) if gpu else None
    processor = inspection.Processor(sheet.peak("bf16"), sheet.bandwidth) if sheet else None

    base = variant_recipe.base_outline(variant)
    is_here = base is not None and base.folder.joinpath("tokenizer.json").is_file()
    if base is None:
        # The dimensions of a published checkpoint that is not downloaded yet are in eval/shapes/.
        name = find_base_variant(variant_recipe.read_recipe(variant).base, variant.root)
        first = variants.load(name, variant.root)
        base = Outline.of_shape(shapes.variant_shape(first), first.weights)
    to_fetch: list[str] = []
    recipe_faults, costs = variant_recipe.inspect_recipe(variant, base, to_fetch)
    faults = [*recipe_faults, *api.list_evaluation_faults(variant)]
    lacking = "" if faults else "its text is not here" if is_here else "its base is not here"
    is_complete = is_here and not faults and not to_fetch
    forecasts = variant_recipe.forecast_recipe(variant) if is_complete else [None] * len(costs)
    rows = table(
        ["stage", "would be"], ("memory", "disk", "time", "", *([f"on {sheet.name}"] if sheet else []))
    )
    rows.add_column("why")
    for cost, forecast in zip(costs, forecasts, strict=True):
        is_reused = forecast is not None and forecast.reused
        needs = (
            f"{cost.needs.memory_bytes / 1e9:.1f} GB",
            f"{cost.needs.disk_bytes / 1e9:.2f} GB",
            duration(cost.seconds),
            "as measured here" if cost.was_measured else "by arithmetic",
            *([duration(processor.seconds(cost.needs))] if processor else []),
        )
        rows.add_row(
            cost.step.stage.name,
            "reused" if is_reused else "run",
            *([""] * len(needs) if is_reused else needs),
            forecast.reason if forecast else lacking,
        )
        for change in forecast.changes if forecast else ():
            rows.add_row(
                *[""] * (2 + len(needs)),
                f"{change.ingredient}: {_short(change.before)} -> {_short(change.after)}",
            )
    console.print(rows)
    say("Memory and disk are upper bounds; computed times are right within a factor of about three.")
    new = [cost for cost, each in zip(costs, forecasts, strict=True) if each is None or not each.reused]
    total = f"{duration(sum(cost.seconds for cost in new))} on {inspection.describe_processor()}"
    if processor and sheet:
        total += f"; {duration(sum(processor.seconds(cost.needs) for cost in new))} on {sheet.name}, by its data sheet"
    say(f"All stages: {total}.")
    for line in to_fetch:
        say(f"to be fetched before the run: {line}")
    if faults:
        raise RecipeError(*faults)
    for understood in _describe_evaluation(variant):
        say(from_here(understood))
    for line in variant_recipe.lacking_space(costs, variant.root / "weights" / "store"):
        say(line)


def _describe_evaluation(variant: Variant) -> list[str]:
    """What was understood of the files that will judge the recipe's result; nothing without an own evaluation."""
    from slimqwen.records.settings import find_own_evaluation

    folder = find_own_evaluation(variant)
    if folder is None:
        return []
    from slimqwen.evals import own_evaluation  # slow to import

    return own_evaluation.describe(folder)


def _parse_source(text: str) -> "Source":
    """Parse NAME=FILE, or the NAME of a text in eval/texts; :WEIGHT may follow either."""
    from slimqwen.text.calibration_mix import Source
    from slimqwen.text.corpus import resolve_text

    match = re.fullmatch(r"([^=:]+)(?:=(.+?))?(?::(\d+(?:\.\d+)?))?", text)
    weight = float(match[3] or 1) if match else 0.0
    if match is None or not weight:
        raise typer.BadParameter(
            f"{text}: write NAME=FILE, or NAME=FILE:2 for twice the weight of the others"
        )
    return Source(match[1], Path(match[2]) if match[2] else resolve_text(match[1], Path()), weight)


def _short(value: str | None) -> str:
    if value is None:
        return "none"
    return f"{value[:12]}…" if len(value) == 64 else value
