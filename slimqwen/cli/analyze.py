"""`slimqwen analyze`: figures that are computed."""

from typing import Annotated

import typer

from slimqwen.cli.console import command, show_record
from slimqwen.cli.options import VariantOption

app = typer.Typer(
    help="Compute the roofline of a variant.",
    no_args_is_help=True,
)


@app.command("roofline")
def roofline_(
    variant: VariantOption,
    gpu: Annotated[str, typer.Option(metavar="NAME", help="name in eval/devices.yaml, such as a10g")],
    against: Annotated[
        list[str] | None, typer.Option(metavar="NAME", help="further variant, beside the baseline; repeat it")
    ] = None,
    context: Annotated[
        list[int] | None, typer.Option(help="context length in tokens; repeat it (default: 128, 2048, 8192)")
    ] = None,
    acceptance_length: Annotated[
        float | None, typer.Option(help="assumed where no record of `slimqwen eval acceptance` has one")
    ] = None,
) -> None:
    """Bound a variant's speed on a GPU: bytes and FLOPs of a step from the real tensors."""
    from slimqwen.analysis.roofline import bounds

    record = bounds.write(
        variant,
        gpu,
        others=against or (),
        context_lens=tuple(context or bounds.CONTEXT_LENS),
        acceptance_length=acceptance_length,
        command=command(),
    )
    show_record(record)


@app.command()
def waterfall(
    variant: VariantOption,
    gpu: Annotated[str, typer.Option(metavar="NAME", help="name in eval/devices.yaml, such as a10g")],
    context: Annotated[int, typer.Option(min=1, help="cached tokens")] = 2048,
) -> None:
    """Show bytes and shortest time of a decode step, lever by lever, from dimensions alone."""
    from slimqwen.analysis.roofline import waterfall

    show_record(waterfall.write(variant, gpu, context_len=context, command=command()))
