"""The recipe.yaml of a new variant: its stages in order, with the parameters that need a value."""

import tempfile
import textwrap
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import yaml

from slimqwen import checkpoint
from slimqwen.recipe import recipe_file
from slimqwen.recipe.registry import STAGES
from slimqwen.text.corpus import TextSource
from slimqwen.variant import Variant, making_command

_EMBEDDED = "tiny"


def render(base: Variant, stages: Sequence[str]) -> str:
    """The text of a recipe.yaml that takes the checkpoint of a variant through stages.

    Raises:
        slimqwen.recipe.recipe_file.RecipeError: an unknown stage, or an impossible order.
        SlimqwenError: a stage needs the checkpoint of the base, which is missing.
    """
    lines = [
        f"description: The checkpoint of {base.name} through {', '.join(stages)}.",
        f"base: {base.name}",
        "stages:",
    ]
    for stage in stages:
        parameters = _parameters(stage, base)
        entry = yaml.safe_dump({stage: parameters}, sort_keys=False) if parameters else f"{stage}:\n"
        lines.append(f"  - {textwrap.indent(entry, '    ').strip()}")
    text = "\n".join(lines) + "\n"
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "recipe.yaml"
        file.write_text(text, encoding="utf-8")
        try:
            recipe_file.read_recipe(file)
        except recipe_file.RecipeError as error:
            # The temporary file's path would mislead: only the fault is reported.
            raise recipe_file.RecipeError(f"stages: {str(error).partition(': ')[2]}") from None
    return text


def _parameters(stage: str, base: Variant) -> dict[str, Any]:
    """Parameters that need a value: the text that the stage reads, and the size of a vocabulary."""
    if stage not in STAGES:
        return {}  # recipe_file.read_recipe names the nearest stage
    fields = STAGES[stage].parameters.model_fields
    parameters: dict[str, Any] = {}
    if "size" in fields:
        checkpoint.check_folder(base.weights, making_command(base.weights, base.root))
        # A size to begin with: what other sizes cost depends on the texts.
        parameters["size"] = checkpoint.text_config(checkpoint.read_config(base.weights))["vocab_size"] // 2
    for name, field in fields.items():
        if isinstance(field.annotation, type) and issubclass(field.annotation, TextSource):
            parameters[name] = _text(base, field.annotation)
    return parameters


def _text(base: Variant, source: type[TextSource]) -> dict[str, str]:
    """The text of the embedded model for its variants; for others a file of the family, mixed by its owner."""
    if _EMBEDDED in base.lineage:
        return {"path": str(source.model_fields["path"].default)}
    return {"path": f"../../corpora/{base.lineage[-1]}.jsonl"}
