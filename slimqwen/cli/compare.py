"""`slimqwen compare`: what to serve on this machine, or a comparison of two measured variants."""

from pathlib import Path
from typing import Annotated

import typer

from slimqwen import variant as variants
from slimqwen.cli.console import console, say
from slimqwen.cli.options import matching_variants


def compare_variants(
    names: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="[A B]",
            help="baseline and variant; one name: a variant and its baseline; none: what to serve on this machine",
            autocompletion=matching_variants,
        ),
    ] = None,
    items: Annotated[
        bool, typer.Option("--items", help="the items that changed instead, worst first, with both responses")
    ] = False,
    settings: Annotated[
        bool,
        typer.Option("--settings", help="the lines of config.env, stages and parameters that differ instead"),
    ] = False,
    external: Annotated[
        Path | None,
        typer.Option(
            "--with",
            metavar="FILE",
            help="result of GuideLLM, AIPerf or `vllm bench serve` to set beside their latency instead",
        ),
    ] = None,
) -> None:
    """Say what to serve on this machine; or compare two variants: scores paired by item, latency ratios, size."""
    from slimqwen.report import choice, tables

    asked = [
        name for name, given in {"items": items, "settings": settings, "with": external}.items() if given
    ]
    if len(asked) > 1:
        raise typer.BadParameter(f"give --{' or --'.join(asked)}, not both")
    if not names and asked:
        raise typer.BadParameter(f"--{asked[0]} is for a comparison; name one variant, or two")
    if not names:
        _say_what_to_serve()
        return
    if len(names) > 2:
        raise typer.BadParameter(f"{len(names)} variants are too many; name two, one or none")
    subjects = [variants.load(name) for name in names]
    if len(subjects) == 1:
        if subjects[0].baseline is None:
            raise typer.BadParameter(f"{names[0]} has no baseline; name the variant to compare it with")
        subjects.insert(0, variants.load(subjects[0].baseline))
    if settings:
        from slimqwen.report.settings import settings_table

        console.print(settings_table(*subjects).as_rich())
        return
    folders = [each.folder for each in subjects]
    if external:
        from slimqwen.report.external import external_table

        console.print(external_table(folders[0], folders[1], external.expanduser()).as_rich())
        return
    if items:
        table = tables.changed_items(*folders)
        if table is None:
            say("No item changed its score, and no response began or ceased to run away.")
        else:
            console.print(table.as_rich())
        return
    for shown in tables.comparison_tables(*folders):
        console.print(shown.as_rich())
    for phrase in choice.list_other_builds(subjects):
        say(f"{phrase}.")


def _say_what_to_serve() -> None:
    from slimqwen.records import provenance
    from slimqwen.report import choice

    root = variants.repository_root()
    here = provenance.hardware_name(provenance.hardware())
    choices = choice.collect_choices(root)
    measured_here = [each for each in choices if each.hardware == here]
    for each in measured_here:
        for sentence in each.advice:
            say(sentence)
    others = sorted({each.hardware for each in choices} - {here})
    if not measured_here:
        say(
            f"Nothing was measured on {here}: `slimqwen gate NAME`, then `slimqwen bench latency NAME --baseline`, "
            "measure a variant and its baseline."
        )
    if others:
        say(f"Measured on other machines: {'; '.join(others)}; `slimqwen report` has what to serve there.")
    if unjudged := choice.list_unjudged(root):
        say(
            f"Not judged yet: {', '.join(unjudged)}; `slimqwen gate {unjudged[0]}` compares it with its baseline."
        )
