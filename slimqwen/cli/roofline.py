"""`slimqwen roofline`: computes the fastest speed that a variant could reach on a GPU."""

from dataclasses import replace
from pathlib import Path
from typing import Annotated

import typer

from slimqwen.cli.console import command, console, show_record
from slimqwen.cli.options import VariantOption
from slimqwen.variant import Variant


def roofline(
    variant: VariantOption,
    gpu: Annotated[str, typer.Option(metavar="NAME", help="GPU of eval/devices.yaml, such as a10g")],
    context: Annotated[
        list[int] | None,
        typer.Option(help="context length in tokens; may be repeated (default: 128, 2048, 8192)"),
    ] = None,
    acceptance_length: Annotated[
        float | None,
        typer.Option(help="acceptance length to assume if no record of `slimqwen eval acceptance` fits"),
    ] = None,
    keep: Annotated[bool, typer.Option("--record", help="write the roofline as a record")] = False,
) -> None:
    """Compute an upper bound of a variant's speed on a GPU, for each optimisation, from its tensors' dimensions."""
    from slimqwen.records import store
    from slimqwen.roofline import bounds

    length, source = _newest_acceptance_length(variant)
    if length is None and acceptance_length is not None:
        length, source = acceptance_length, f"{acceptance_length:g}, assumed: {source}"
    record = bounds.compute_roofline(
        variant,
        gpu,
        context_lens=tuple(context or bounds.CONTEXT_LENS),
        acceptance_length=length,
        acceptance_source=source,
        command=command(),
    )
    if keep:
        show_record(store.write_record(variant.folder, record))
        return
    path = Path("not written")
    for shown in record.tables(path):
        notes = tuple(note for note in shown.notes if path.name not in note)  # that file is not written
        console.print(replace(shown, notes=notes).as_rich())


def _newest_acceptance_length(variant: Variant) -> tuple[float | None, str]:
    """The newest acceptance length of this checkpoint at the variant's K and its source; or None and the reason."""
    from slimqwen.evals.acceptance import Acceptance
    from slimqwen.records import provenance, store
    from slimqwen.serving import checked_lines

    flags = checked_lines.resolve(variant).flags
    speculation = flags["speculative-config"].value if "speculative-config" in flags else None
    depth = int((speculation or {}).get("num_speculative_tokens", 0))
    weights = variant.weights
    present = provenance.checkpoint_files(weights, variant.root) if weights.is_dir() else None
    for path in store.records(variant.folder, Acceptance):
        record = store.read_record(path, Acceptance)
        if record.split or present is None or not record.provenance.checkpoint.has_recipe_of(present):
            continue
        for row in record.depths:
            if row.depth == depth:
                return row.length.value, f"{row.length.value:.3f} at K = {depth}, {variant.name}/{path.name}"
    return None, f"no acceptance record of {variant.name} has this checkpoint and K = {depth}"
