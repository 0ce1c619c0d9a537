"""Reads, inspects and runs the recipe of a variant, with the repository's own weights/ and store."""

import re
from collections.abc import Iterator, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path

from slimqwen import checkpoint
from slimqwen import variant as variants
from slimqwen.checkpoint import draft_head
from slimqwen.checkpoint.files import VOCAB_MAP, bytes_on_disk, side_files
from slimqwen.checkpoint.weights import changed_weights
from slimqwen.errors import SlimqwenError
from slimqwen.models.outline import Outline
from slimqwen.progress import Progress, silent
from slimqwen.recipe import recipe_file, runner
from slimqwen.recipe.inspection import StageCost, inspect_steps
from slimqwen.recipe.inspection import lacking_space as lacking_space
from slimqwen.recipe.recipe_file import Recipe, RecipeError, Step, find_base_variant
from slimqwen.text.corpus import TextSource, find_named_corpus
from slimqwen.variant import Variant


def read_recipe(variant: Variant) -> Recipe:
    """Read a variant's recipe.yaml.

    Raises:
        RecipeError: the recipe is missing or cannot be used.
    """
    recipe = recipe_file.read_recipe(variant.recipe_file)
    _require_base(recipe, variant.root)
    return recipe


def _require_base(recipe: Recipe, root: Path) -> None:
    """Raise a RecipeError with file and line if the base is no variant, after which nothing else can be found."""
    try:
        name = find_base_variant(recipe.base, root)
        if name not in variants.names(root):
            variants.load(name, root)
    except SlimqwenError as error:
        raise RecipeError(f"{recipe.base_place}: base: {error}", *recipe.faults) from None


def run_recipe(
    variant: Variant,
    stages: int | None = None,
    progress: Progress = silent,
    *,
    other_faults: Sequence[str] = (),
) -> list[runner.Outcome]:
    """Run a variant's recipe, and link weights/<name> to its result.

    Args:
        stages: number of stages to run, from the first; None for all.
        other_faults: further faults, a line each, for which the recipe is refused, such as those of its evaluation.

    Returns:
        One outcome per stage, in order.

    Raises:
        RecipeError: before any stage starts: the recipe has faults, all of which are named, weights/<name> is not or
            cannot be a link, or disk or memory are too small. Later: a stage failed.
        SlimqwenError: the base's weights are missing or damaged, or a stage refuses its input.
    """
    recipe = recipe_file.parse_recipe(variant.recipe_file)
    recipe = replace(recipe, faults=(*recipe.faults, *other_faults))
    _require_base(recipe, variant.root)
    resolve = partial(base_folder, root=variant.root)
    return runner.run_recipe(recipe, variant.name, variant.root / "weights", resolve, stages, progress)


def inspect_recipe(
    variant: Variant, base: Outline, to_fetch: list[str] | None = None
) -> tuple[tuple[str, ...], tuple[StageCost, ...]]:
    """Find every fault of a variant's recipe on the outline of its base, and the cost of each stage; runs no stage.

    Args:
        to_fetch: list that gets the lines about missing texts that a command fetches; None makes them faults.

    Returns:
        The faults, a line each, and the costs; a stage that does not fit its input has no cost.

    Raises:
        RecipeError: the recipe cannot be read.
    """
    recipe = recipe_file.parse_recipe(variant.recipe_file)
    store = variant.root / "weights" / "store"
    faults, costs = inspect_steps(recipe.steps, base, store, to_fetch)
    return recipe.faults + faults, costs


def base_outline(variant: Variant) -> Outline | None:
    """Outline of the base of a variant's recipe, from headers or index; None if the base is not on this machine.

    Raises:
        RecipeError: the recipe cannot be read.
        CorruptCheckpointError: config.json, the index or a header cannot be read.
    """
    base = find_base(variant)
    if not (base.weights / "config.json").is_file():
        return None
    return Outline.read(base.weights)


def find_base(variant: Variant) -> Variant:
    """The variant whose checkpoint a recipe transforms; the variant itself if it has no recipe.

    Raises:
        RecipeError: the recipe cannot be read.
    """
    if variant.recipe is None:
        return variant
    recipe = recipe_file.parse_recipe(variant.recipe)
    _require_base(recipe, variant.root)
    return variants.load(find_base_variant(recipe.base, variant.root), variant.root)


def list_corpora(variant: Variant) -> list[str]:
    """Names of eval/corpora/ whose mixes a variant's recipe reads; none without a recipe.

    Raises:
        RecipeError: the recipe cannot be read.
    """
    if variant.recipe is None:
        return []
    recipe = recipe_file.parse_recipe(variant.recipe)
    texts = [value for step in recipe.steps for _, value in step.parameters if isinstance(value, TextSource)]
    found = [find_named_corpus(text.path, variant.root) for text in texts]
    return sorted({each[0] for each in found if each})


def stages_until(variant: Variant, name: str) -> int:
    """Number of stages of a variant's recipe up to and including the first stage called `name`.

    Raises:
        RecipeError: the recipe cannot be used, or has no such stage.
    """
    recipe = read_recipe(variant)
    names = [step.stage.name for step in recipe.steps]
    if name not in names:
        raise RecipeError(f"{recipe.file} has no stage {name}; choose one of {', '.join(names)}")
    return names.index(name) + 1


def forecast_recipe(variant: Variant) -> list[runner.StageForecast]:
    """Forecast for each stage whether a run would reuse its stored output, and which ingredients have changed.

    Raises:
        SlimqwenError: the recipe, the base, the data of a stage or a manifest of the store is missing or damaged.
    """
    return runner.forecast_recipe(
        read_recipe(variant), variant.root / "weights", partial(base_folder, root=variant.root)
    )


def clean(root: Path) -> int:
    """Delete the recipe outputs that no variant serves, uses or would reuse; returns the bytes freed.

    Raises:
        RecipeError: a recipe is running, or a variant's recipe cannot be used.
    """
    keep: list[str] = []
    for name in variants.local_names(root):
        variant = variants.load(name, root)
        keep += _named_entries(variant)
        if variant.recipe is None:
            continue
        try:
            keep += [forecast.key for forecast in forecast_recipe(variant) if forecast.key]
        except checkpoint.MissingCheckpointError:
            continue
    return runner.clean_store(root / "weights", keep)


def list_orphaned_links(root: Path) -> dict[Path, int]:
    """Links of weights/ that keep a recipe's output although no variant uses it, with its bytes on disk."""
    store = (root / "weights" / "store").resolve()
    known = variants.names(root)
    served = {entry for name in known for entry in _named_entries(variants.load(name, root))}
    return {
        link: bytes_on_disk(link.resolve())
        for link in sorted((root / "weights").glob("*"))
        if link.is_symlink()
        and link.name not in known
        and link.resolve().name not in served
        and link.is_dir()
        and link.resolve().parent == store
    }


def _named_entries(variant: Variant) -> Iterator[str]:
    """Entries of the store that a variant's lines name by a path, such as a checkpoint that another variant made."""
    store = (variant.root / "weights" / "store").resolve()
    for setting in variant.settings.values():
        yield from re.findall(r"(?<=/store/)[0-9a-f]+", setting.value)  # inside JSON, as of a draft model
        path = (variant.root / setting.value).resolve()  # the path may be a link
        if path.is_relative_to(store):
            yield from path.relative_to(store).parts[:1]


def base_folder(base: str, root: Path) -> Path:
    """Check the weights of a recipe's base and return their folder.

    Args:
        base: name of a variant, or a hub repository of which a variant is a copy.

    Raises:
        RecipeError: no variant is a copy of the repository.
        MissingCheckpointError, CorruptCheckpointError: the weights are missing or damaged.
    """
    variant = variants.load(find_base_variant(base, root), root)
    checkpoint.check_folder(variant.weights, variants.making_command(variant.weights, root))
    return variant.weights


def unexplained_changes(variant: Variant) -> list[str]:
    """Names of tensors that a variant's checkpoint changed relative to its recipe's base, though no stage may do so.

    Raises:
        RecipeError: the recipe cannot be used.
        MissingCheckpointError, CorruptCheckpointError: a checkpoint is missing or damaged.
    """
    recipe = read_recipe(variant)
    base = base_folder(recipe.base, variant.root)
    return unexplained_by(recipe.steps, base, variant.weights)


def unexplained_by(steps: Sequence[Step], base: Path, weights: Path) -> list[str]:
    """Names of tensors that differ between a checkpoint and its base, though no step may change them.

    Args:
        steps: steps of the recipe that made the checkpoint.
        base: folder of the base.
        weights: folder of the checkpoint.

    Raises:
        CorruptCheckpointError: a checkpoint cannot be read.
    """
    patterns = [pattern for step in steps for pattern in step.stage.changes(step.parameters)]

    def is_explained(name: str) -> bool:
        return any(re.search(pattern, name) for pattern in patterns)

    return changed_weights(base, weights, leave_out=is_explained)


def unexplained_files(variant: Variant) -> list[str]:
    """Files of tokenizer, chat template and generation that differ from a recipe's base, though no stage changes them.

    A template without its system turn, or a tokenizer without its merges, shows in no tensor. A pruned vocabulary
    renumbers all files but templates (`prune_vocab` checks what it writes).

    Raises:
        RecipeError: the recipe cannot be used.
    """
    base = base_folder(read_recipe(variant).base, variant.root)
    before, after = side_files(base), side_files(variant.weights)
    fixed = () if VOCAB_MAP in after else _TEXT_FILES
    return sorted(
        name
        for name in before.keys() | after.keys()
        if name.endswith(".jinja") or name in fixed
        if name not in before or name not in after or before[name].read_bytes() != after[name].read_bytes()
    )


_TEXT_FILES = ("tokenizer.json", "tokenizer_config.json", "chat_template.json", "generation_config.json")

_SETTINGS_OF_STAGES = {
    "architectures", "dtype", "torch_dtype", "tie_word_embeddings", "transformers_version", "vocab_size",
    "quantization_config", draft_head.SIZE_KEY, "mtp_num_hidden_layers",
}  # fmt: skip
"""Keys of config.json that stages may write, or that state how the file was written; token ids may change, too."""


def unexplained_settings(variant: Variant) -> list[str]:
    """Keys of a checkpoint's text config that differ from its recipe's base, though no stage changes such a key.

    A wrong RoPE base or norm epsilon does not show in the tensors.

    Raises:
        RecipeError: the recipe cannot be used.
        CorruptCheckpointError: a config.json cannot be read.
    """
    base = base_folder(read_recipe(variant).base, variant.root)
    before, after = (
        checkpoint.text_config(checkpoint.read_config(folder)) for folder in (base, variant.weights)
    )
    return sorted(
        key
        for key in before.keys() | after.keys()
        if key not in _SETTINGS_OF_STAGES
        and not key.endswith(("_token_id", "_token_ids"))
        and before.get(key) != after.get(key)
    )
