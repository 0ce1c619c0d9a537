"""Writes a recipe of llm-compressor for what the stage `calibrate` did, as its users publish one beside the weights.

A published folder has it in a subfolder: in the checkpoint's own folder it would change the checkpoint's digest.
"""

import yaml

from slimqwen import checkpoint
from slimqwen.formats.compressed_tensors import ADDED
from slimqwen.recipe.recipe_file import parse_recipe
from slimqwen.recipe.schemes import CalibrateParameters
from slimqwen.variant import Variant

NAME = "llm_compressor_recipe.yaml"

_HEAD = """\
# The modifiers of llm-compressor for the linears of the layers. Slimqwen ran them layer by layer; its own recipe, with
# text, output head, MTP head and drafts, is recipe.yaml beside this file.
"""


def render_compressor_recipe(variant: Variant) -> str | None:
    """Render llm-compressor's recipe as text; None if no stage of the variant's recipe runs llm-compressor.

    Raises:
        RecipeError: the recipe cannot be read.
        CorruptCheckpointError: the checkpoint cannot be read.
    """
    assert variant.recipe is not None
    steps = [step.parameters for step in parse_recipe(variant.recipe).steps]
    run = [each for each in steps if isinstance(each, CalibrateParameters) and each.targets.calibrated]
    form = checkpoint.quantisation(checkpoint.read_config(variant.weights))
    groups = {name: group for name, group in form.get("config_groups", {}).items() if name not in ADDED}
    if not run or not groups:
        return None
    (parameters,) = run  # a second one would be refused: the checkpoint is quantised by then
    rounding = "GPTQModifier" if parameters.rounding == "gptq" else "QuantizationModifier"
    modifiers = {
        **({"AWQModifier": {}} if parameters.scaling == "awq" else {}),
        rounding: {"config_groups": groups, "ignore": form.get("ignore", [])},
    }
    content = {"default_stage": {"default_modifiers": modifiers}}
    return _HEAD + yaml.safe_dump(content, sort_keys=False, allow_unicode=True)
