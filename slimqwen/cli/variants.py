"""`slimqwen variant`: lists, creates, removes, promotes and publishes variants."""

import json
import os
import re
from pathlib import Path
from typing import Annotated

import typer

from slimqwen import variant as variants
from slimqwen.cli.console import console, progress_bar, relative, say, silence_hub_client
from slimqwen.cli.options import VariantOption
from slimqwen.cli.report import update_page
from slimqwen.errors import SlimqwenError
from slimqwen.variant import Variant

app = typer.Typer(help="List, create, remove, promote and publish variants.", no_args_is_help=True)


@app.command("list")
def list_variants() -> None:
    """List all variants: hypothesis, baseline, state of the weights, latest figures."""
    from slimqwen.report import tables

    console.print(tables.variants_table(variants.repository_root(), with_weights=True).as_rich())


@app.command()
def new(
    name: Annotated[str, typer.Option(metavar="NAME", help="name of the new folder in experiments/")],
    base: Annotated[
        str | None,
        typer.Option(metavar="NAME", help="variant whose flags and checkpoint the new one starts from"),
    ] = None,
    checkpoint: Annotated[
        str | None,
        typer.Option(
            metavar="FOLDER|FILE.gguf|OWNER/NAME[/FILE.gguf][@COMMIT]",
            help="create a baseline of this checkpoint instead: a folder, a GGUF file, or either on a hub",
        ),
    ] = None,
    source: Annotated[
        str | None,
        typer.Option("--from", metavar="NAME", help="variant whose config.env and recipe are copied instead"),
    ] = None,
    hypothesis: Annotated[
        str | None,
        typer.Option(help="what the variant is expected to show, in one sentence that can be refuted"),
    ] = None,
    stage: Annotated[
        list[str] | None,
        typer.Option(help="stage of the variant's own recipe; may be repeated, in order"),
    ] = None,
    corpus: Annotated[
        str,
        typer.Option(
            metavar="self|general|FILE|FOLDER",
            help="text of the recipe: the model's own, a public mix, or yours",
        ),
    ] = "self",
    drafter: Annotated[
        str | None,
        typer.Option(
            metavar="FOLDER|OWNER/NAME[@COMMIT]",
            help="drafting model of another maker (EAGLE, DFlash, a small language model), a folder or on a hub",
        ),
    ] = None,
    evaluation: Annotated[
        str | None,
        typer.Option(
            metavar="NAME",
            help="what judges the variant: folder of eval/own/, or name of eval/suites/ (default: the base's; core)",
        ),
    ] = None,
) -> None:
    """Create experiments/NAME: a baseline of a checkpoint, a variant of another one, or a copy, to edit it."""
    from slimqwen.evals.suites.suite import Suite
    from slimqwen.recipe import template
    from slimqwen.variant import scaffold

    has_one_origin = sum(origin is not None for origin in (base, checkpoint, source)) == 1
    adds_to_nothing = (stage or drafter) and not base
    if not has_one_origin or adds_to_nothing or (source and evaluation):
        raise typer.BadParameter(
            "give --checkpoint FOLDER for a baseline, --base NAME for a variant of it, or --from NAME alone for a copy"
        )
    if evaluation:
        # Checks that the evaluation exists and has questions now, not only at the gate.
        Suite.load(evaluation, variants.repository_root()).require_questions(variants.repository_root())
    if checkpoint:
        folder = create_baseline(name, checkpoint, hypothesis, evaluation or "core")
    elif source:
        folder = scaffold.copy(name, source, hypothesis)
    else:
        assert base is not None
        text = name_text(corpus, variants.repository_root() / "experiments" / name)
        recipe = template.render_recipe(variants.load(base), stage, text) if stage else None
        own = f"with drafts by {drafter}" if drafter else "with its own flags"
        changes = f"with {', '.join(stage)}" if stage else own
        expected = hypothesis or f"{base} {changes} is faster and keeps every score within its margin."
        lines = {"EVALUATION": evaluation} if evaluation else {}
        lines |= _add_drafter(name, drafter, variants.load(base)) if drafter else {}
        folder = scaffold.create(name, base, expected, recipe=recipe, lines=lines)
    update_page(folder)
    for file in sorted(folder.iterdir()):
        say(f"written: {relative(file)}")
    if (folder / "recipe.yaml").is_file():
        say(f"next: `slimqwen recipe run --variant {name} --dry-run`")
    elif checkpoint:
        say(
            f"next: `slimqwen serve {name}`, or `slimqwen variant new --name NAME --base {name} --stage STAGE`"
        )


def name_text(corpus: str, folder: Path) -> str:
    """The text as the recipe.yaml in `folder` must name it: names unchanged, paths relative to the folder.

    Raises:
        typer.BadParameter: `corpus` is a path, and nothing is there.
    """
    path = Path(corpus).expanduser()
    if not path.suffix and len(path.parts) == 1 and not path.exists():
        return corpus
    if not path.exists():
        raise typer.BadParameter(
            f"--corpus: {corpus} is not there; name a file or folder, `self` (the model writes it) or `general` "
            "(public)"
        )
    return os.path.relpath(path, folder)


_BASELINE = "The checkpoint as it is published: what every variant of it has to beat at equal quality."


_OF_GGUF = "The weights of {}: what every variant of them has to beat at equal quality."


def create_baseline(
    name: str, checkpoint: str, hypothesis: str | None, evaluation: str, command: str = ""
) -> Path:
    """Write a baseline variant of a folder, GGUF file or hub repository, and print what was found in the checkpoint.

    Args:
        name: name of the new variant.
        checkpoint: folder, GGUF file, or owner/name[/file.gguf][@commit] of a hub.
        hypothesis: what the variant is expected to show; None for a sentence on baselines.
        evaluation: name of what judges its variants.
        command: command that continues an interrupted download; empty for `slimqwen variant new`.

    Returns:
        Folder of the variant.
    """
    from slimqwen.models.gguf_file import describe_origin
    from slimqwen.recipe.base_variant import REASONS, CheckpointFacts
    from slimqwen.variant import scaffold
    from slimqwen.variant.config_env import quoted

    root = variants.repository_root()
    scaffold.require_new(name, root)
    source: dict[str, str] = {}
    weights = Path(checkpoint).expanduser().resolve()
    # A path whose parent folder exists is a misspelt folder, not a hub repository.
    is_path = weights.exists() or ("@" not in checkpoint and weights.parent.is_dir())
    if not is_path and re.fullmatch(r"[\w.-]+/[\w.-]+(/.+\.gguf)?(@[0-9a-f]{40})?", checkpoint):
        weights, source = _download_copy(name, checkpoint, command)
    elif weights.suffix == ".gguf" and weights.is_file():
        weights = _convert_file(name, weights)
    facts = CheckpointFacts.read(weights)
    for found, value in facts.lines():
        say(f"{found + ':':<15}{value}")
    origin = describe_origin(weights)
    if origin:
        say(f"{'made of:':<15}{origin}")
    expected = _OF_GGUF.format(origin) if origin else _BASELINE
    shown = weights.relative_to(root) if weights.is_relative_to(root) else weights
    lines = {**source, "EVALUATION": evaluation, "VLLM_MODEL": quoted(str(shown)), **facts.settings()}
    return scaffold.create(name, None, hypothesis or expected, lines=lines, reasons=REASONS, root=root)


def _convert_file(name: str, file: Path) -> Path:
    """Make a 16-bit checkpoint of a GGUF file in weights/<name>; return its folder."""
    from slimqwen.models.gguf_file import GgufFile, make_checkpoint

    weights = variants.repository_root() / "weights" / name
    with progress_bar() as progress:
        make_checkpoint(GgufFile(file), weights, progress)
    return weights


def _download_copy(name: str, checkpoint: str, command: str) -> tuple[Path, dict[str, str]]:
    """Download owner/name[/file.gguf][@commit] into weights/<name>; return the folder and lines for config.env."""
    silence_hub_client()
    from slimqwen import hub

    repository, _, revision = checkpoint.partition("@")
    weights = variants.repository_root() / "weights" / name
    place = "MODEL" if command else "--checkpoint"
    command = command or f"`slimqwen variant new --name {name} --checkpoint {checkpoint}`"
    with progress_bar() as progress:
        asked = hub.Repository(repository, "model", revision or None, command, place)
        manifest = hub.download_copy(asked, weights, progress)
    return weights, {"SOURCE": repository, "REVISION": str(manifest.facts["revision"])}


def _add_drafter(name: str, drafter: str, base: Variant) -> dict[str, str]:
    """Fetch a drafting model into weights/<name>-drafter unless it is a folder; return the lines for config.env."""
    from slimqwen import checkpoint, hub
    from slimqwen.models.drafter import check_files, describe_drafter
    from slimqwen.variant import scaffold

    scaffold.require_new(name, base.root)
    checkpoint.check_folder(base.weights, variants.making_command(base.weights, base.root))
    folder = Path(drafter).expanduser().resolve()
    if not folder.is_dir():
        silence_hub_client()
        folder = base.root / "weights" / f"{name}-drafter"
        repository, _, revision = drafter.partition("@")
        command = f"`slimqwen variant new --name {name} --base {base.name} --drafter {drafter}`"
        asked = hub.Repository(repository, "model", revision or None, command, "--drafter")
        with progress_bar() as progress:
            hub.download_copy(asked, folder, progress, check_files)
    shown = folder.relative_to(base.root) if folder.is_relative_to(base.root) else folder
    speculation = describe_drafter(folder, base.weights, str(shown))
    say(f"{'drafter:':<15}{shown}, vLLM's method {speculation['method']}")
    return {"VLLM_SPECULATIVE_CONFIG": f"'{json.dumps(speculation)}'"}


@app.command()
def remove(
    name: Annotated[str, typer.Argument(metavar="NAME", help="folder of experiments/")],
    yes: Annotated[bool, typer.Option("--yes", help="do not ask")] = False,
) -> None:
    """Delete a variant that no other needs: its folder, its link in weights/, recipe outputs that nothing else uses."""
    from slimqwen.recipe import removal, variant_recipe

    planned = removal.plan_removal(name, variants.repository_root())
    for line in planned.describe():
        say(f"{name}: {line}")
    if not yes and not typer.confirm("remove it?"):
        say("nothing was deleted")
        return
    removal.remove_variant(planned)
    say(f"{name} was removed")
    try:
        freed = variant_recipe.clean(planned.root)
    except SlimqwenError as error:  # a recipe is running, or the checkpoint of another variant is damaged
        say(f"nothing was freed of weights/store: {error}; `slimqwen recipe clean` does it later")
    else:
        say(f"freed {freed / 1e6:.1f} MB of weights/store")


@app.command()
def publish(
    variant: VariantOption,
    to: Annotated[Path, typer.Option(metavar="FOLDER", help="folder to write; it must not exist")],
    licence: Annotated[
        str | None,
        typer.Option(metavar="NAME", help="licence to state where the base states none, such as apache-2.0"),
    ] = None,
) -> None:
    """Write a variant that passed its gate as a folder for a model hub: weights, card, licence, recipe, checksums."""
    from slimqwen.evals import publication
    from slimqwen.evals.model_card import describe_elsewhere

    target = to.expanduser().absolute()
    with progress_bar() as progress:
        files = publication.publish_variant(variant, target, licence, progress)
    size = sum(file.stat().st_size for file in files) / 1e6
    say(f"{to}: {len(files)} files, {size:,.1f} MB, from {variant.name}")
    say(f"without Slimqwen: `{publication.served_elsewhere(variant, to)}`. {describe_elsewhere(target)}")
    say(f"next: `hf upload OWNER/{target.name} {to}`")


@app.command()
def promote(variant: VariantOption) -> None:
    """Mark a variant as promoted and write its model card, if its gate passed with its present checkpoint."""
    from slimqwen.evals import promotion
    from slimqwen.report.unproven import find_unproven

    unproven = find_unproven(variant.root, variant.name)
    with progress_bar() as progress:
        promoted = promotion.promote_variant(variant, unproven, progress)
    for claim, reason in unproven.items():
        say(f"claimed, not proven: {claim}: {reason}")
    gate = relative(promoted.gate)
    if not promoted.changed:
        say(f"{variant.name} is promoted already by {gate}; nothing changed")
        _say_what_to_serve(variant)
        return
    say(f"{variant.name} was promoted by {gate}")
    if promoted.card:
        say(f"model card: {relative(promoted.card)}")
    else:
        say(f"no model card: no recipe made {relative(variant.weights)}")
    update_page(variant.folder)
    _say_what_to_serve(variant)


def _say_what_to_serve(variant: variants.Variant) -> None:
    from slimqwen.report import choice

    assert variant.baseline is not None
    for sentence in choice.advise_here(variant.root, variant.baseline):
        say(sentence)
