"""A variant as a folder that a model hub takes: weights, model card, licence, recipe, gate and checksums."""

import shutil
from pathlib import Path

from slimqwen.checkpoint.files import CARD, CHECKSUMS, COMPILE_CACHE, carry_all, publish, tree_records
from slimqwen.errors import SlimqwenError
from slimqwen.evals import EvalError, compressor_recipe
from slimqwen.evals.licences import list_parts
from slimqwen.evals.model_card import render_card
from slimqwen.evals.promotion import find_passing_gate
from slimqwen.progress import Progress, silent
from slimqwen.variant import Variant

EXTRAS = "slimqwen"
"""Subfolder of a published folder with how it was made and judged; not a part of the checkpoint."""


def publish_variant(
    variant: Variant, target: Path, licence: str | None = None, progress: Progress = silent
) -> list[Path]:
    """Write a variant's checkpoint as a folder for a model hub, which appears whole or not at all.

    The compile cache is left out, because it is code for one kind of machine. The checkpoint's digest stays the same.

    Args:
        target: the folder, which must not exist.
        licence: identifier of the licence to state. It is required if base, drafter or a text states none, or one that
            forbids commercial use.

    Returns:
        Its files, in order.

    Raises:
        EvalError: the variant did not pass its gate in its present state, no recipe made its checkpoint, or the licence
            has to be stated.
        SlimqwenError: `target` exists.
    """
    if variant.recipe is None:
        raise EvalError(
            f"no recipe made {variant.weights.name}; publish a variant whose checkpoint a recipe makes"
        )
    if target.exists():
        raise SlimqwenError(f"{target} exists already; name a folder that does not")
    variant.require_weights()
    gate, record = find_passing_gate(variant, progress)
    faults = [part.fault for part in list_parts(variant) if part.fault]
    if licence is None and faults:
        raise EvalError(
            f"{', '.join(faults)}; where {'its owner lets' if len(faults) == 1 else 'their owners let'} you publish "
            f"{variant.name}, name the licence, as in --licence apache-2.0"
        )
    recipe = variant.recipe.read_text(encoding="utf-8")
    target.parent.mkdir(parents=True, exist_ok=True)
    with publish(target) as folder:
        carry_all(variant.weights, folder, leave_out=COMPILE_CACHE)
        (folder / EXTRAS).mkdir()
        (folder / EXTRAS / "recipe.yaml").write_text(recipe, encoding="utf-8")
        if modifiers := compressor_recipe.render_compressor_recipe(variant):
            (folder / EXTRAS / compressor_recipe.NAME).write_text(modifiers, encoding="utf-8")
        for path in (gate, *record.evidence(variant.root / "experiments")):
            shutil.copyfile(path, folder / EXTRAS / f"{path.parent.name}_{path.name}")
        (folder / CARD).write_text(render_card(variant, gate, record, licence), encoding="utf-8")
        sums = (f"{file.sha256}  {name}\n" for name, file in sorted(tree_records(folder, progress).items()))
        (folder / CHECKSUMS).write_text("".join(sums), encoding="utf-8")
    return sorted(path for path in target.rglob("*") if path.is_file())


def served_elsewhere(variant: Variant, target: Path) -> str:
    """The command line of vLLM without Slimqwen that serves a published folder, with the variant's context length."""
    text = variant.settings.get("VLLM_MAX_MODEL_LEN")
    return f"vllm serve {target}{f' --max-model-len {text.value}' if text else ''}"
