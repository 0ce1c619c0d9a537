"""`slimqwen variant`: list, create and promote variants."""

from typing import Annotated

import typer

from slimqwen import variant as variants
from slimqwen.cli.console import console, relative, say
from slimqwen.cli.options import VariantOption
from slimqwen.cli.report import update_tables

app = typer.Typer(help="List, create and promote variants.", no_args_is_help=True)


@app.command("list")
def list_() -> None:
    """List the variants: hypothesis, baseline, state of the weights, latest figures."""
    from slimqwen.report import tables

    console.print(tables.variants_table(variants.repository_root(), with_weights=True).as_rich())


@app.command()
def new(
    name: Annotated[str, typer.Option(metavar="NAME", help="name of the new folder in experiments/")],
    base: Annotated[
        str, typer.Option(metavar="NAME", help="variant whose flags and checkpoint it starts from")
    ],
    hypothesis: Annotated[
        str, typer.Option(help="what it is expected to show, one sentence that can be refuted")
    ],
    stage: Annotated[
        list[str] | None,
        typer.Option(help="stage of its own recipe; repeat it in the order of the stages"),
    ] = None,
) -> None:
    """Create experiments/NAME: a planned variant, ready for its flags or its recipe."""
    from slimqwen.recipe import template
    from slimqwen.variant import scaffold

    recipe = template.render(variants.load(base), stage) if stage else None
    folder = scaffold.create(name, base, hypothesis, recipe=recipe)
    for file in sorted(folder.iterdir()):
        say(f"written: {relative(file)}")
    update_tables(variants.repository_root())


@app.command()
def promote(variant: VariantOption) -> None:
    """Mark a variant as promoted and write its model card, if its gate passed on its present checkpoint."""
    from slimqwen.evals import promotion

    promoted = promotion.promote_variant(variant)
    gate = relative(promoted.gate)
    if not promoted.changed:
        say(f"{variant.name} is promoted already, by {gate}; nothing changed")
        return
    say(f"{variant.name} is promoted, by {gate}")
    if promoted.card:
        say(f"model card: {relative(promoted.card)}")
    else:
        say(f"no model card: no recipe made {relative(variant.weights)}")
    update_tables(variant.root)
