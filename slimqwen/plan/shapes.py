"""Checkpoints without weights: config.json and a sparse safetensors file from which vLLM can build a model.

The dimensions come from a published config (eval/shapes/<name>.json) or a checkpoint on this machine, changed by the
stages of the variant's recipe.
"""

import json
import shutil
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

from pydantic import BaseModel, ConfigDict, ValidationError

from slimqwen import checkpoint
from slimqwen import variant as variants
from slimqwen.checkpoint import Manifest
from slimqwen.checkpoint.config import write_config
from slimqwen.checkpoint.files import file_records, publish, withdraw
from slimqwen.checkpoint.tensors import tensor_bytes
from slimqwen.models.shape import IMAGE_PROCESSOR, Packing, Shape, ShapeError
from slimqwen.progress import Progress, silent
from slimqwen.recipe import recipe_file
from slimqwen.variant import Variant
from slimqwen.workspace import locate

FOLDER = Path("eval") / "shapes"
"""Relative to the repository."""

TOKENIZER_FILES = (
    "tokenizer.json",
    "tokenizer_config.json",
    "chat_template.jinja",
    "generation_config.json",
)


class _PublishedShape(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)

    source: str
    config: dict[str, Any] | None = None
    base: str | None = None
    quantised: dict[str, Packing] = {}


def published_shape(root: Path, name: str) -> Shape | None:
    """Read the tensor dimensions in eval/shapes/<name>.json; None if there is no such file.

    Raises:
        ShapeError: the file does not follow its schema.
    """
    file = locate(FOLDER / f"{name}.json", root)
    if not file.is_file():
        return None
    try:
        content = _PublishedShape.model_validate_json(file.read_bytes())
    except ValidationError as error:
        first = error.errors()[0]
        reason = f"{'.'.join(map(str, first['loc'])) or 'the file'}: {first['msg']}"
        raise ShapeError(
            f"{FOLDER / file.name}: {reason}; `git checkout {FOLDER}` restores the file"
        ) from None
    if content.config is not None:
        return replace(Shape.of_config(content.config), quantised=content.quantised, source=content.source)
    base = published_shape(root, content.base) if content.base else None
    if base is None:
        raise ShapeError(
            f"{FOLDER / file.name} has no config, and no base that is in {FOLDER}; `git checkout {FOLDER}` restores it"
        )
    return Shape(base.config, {**base.quantised, **content.quantised}, content.source)


def variant_shape(variant: Variant) -> Shape:
    """Tensor dimensions of the checkpoint that a variant serves, from those of its base and its recipe's stages.

    Raises:
        ShapeError: the dimensions are unknown: the checkpoint is neither published nor on this machine, and no recipe
            makes it from one that is.
    """
    return shape_by_stage(variant)[-1][1]


def shape_by_stage(variant: Variant) -> list[tuple[str, Shape]]:
    """List the tensor dimensions along a recipe: name and dimensions of the base, then of the output of each stage.

    Raises:
        ShapeError: the checkpoint is neither published nor on this machine, and no recipe makes it from one that is.
    """
    name = variant.weights.name
    shape = published_shape(variant.root, name)
    if shape is not None:
        return [(name, shape)]
    maker = _maker(variant, name)
    if maker is None:
        return [(name, _local_shape(variant.weights))]
    assert maker.recipe is not None
    recipe = recipe_file.read_recipe(maker.recipe)
    base = recipe_file.find_base_variant(recipe.base, variant.root)
    by_stage = shape_by_stage(variants.load(base, variant.root))
    shape = by_stage[-1][1]
    for step in recipe.steps:
        shape = step.stage.reshape(shape, step.parameters)
        by_stage.append((step.stage.name, shape))
    by_stage[-1] = (by_stage[-1][0], replace(shape, source=f"{shape.source}; {maker.name}/recipe.yaml"))
    return by_stage


def _maker(variant: Variant, name: str) -> Variant | None:
    """The variant whose recipe makes a checkpoint; None without one."""
    if variant.recipe and variant.name == name:
        return variant
    maker = variants.load(name, variant.root) if name in variants.names(variant.root) else None
    return maker if maker and maker.recipe else None


def _local_shape(weights: Path) -> Shape:
    """The dimensions of an unquantised checkpoint on this machine.

    Raises:
        ShapeError: the checkpoint is not on this machine, or is quantised.
    """
    if (weights / "config.json").is_file():
        config = checkpoint.read_config(weights)
        if not checkpoint.quantisation(config):
            dimensions = {**config, "text_config": checkpoint.text_config(config)}
            return Shape(dimensions, {}, f"weights/{weights.name}/config.json")
    raise ShapeError(
        f"the dimensions of weights/{weights.name} are not known: no unquantised checkpoint is there, and no recipe "
        f'makes it; write {FOLDER}/{weights.name}.json with {{"source": "owner/name", "config": its config.json}}'
    )


def write_variant_shape(variant: Variant, progress: Progress = silent) -> Path:
    """Write weights/shape-<variant>: the checkpoint of a variant without weights, which VLLM_LOAD_FORMAT=dummy serves.

    An old one is replaced. Checks refuse its responses by the key `checkpoint.RANDOM_WEIGHTS` of its config.json.

    Returns:
        The folder.

    Raises:
        ShapeError: the checkpoint is neither published nor on this machine, and no recipe makes it from one that is.
    """
    started = time.monotonic()
    shape = variant_shape(variant)
    folder = variant.root / "weights" / f"{variants.SHAPE_PREFIX}{variant.name}"
    if folder.exists():
        withdraw(folder)
    with publish(folder) as staging:
        write_shape(shape, staging, locate("weights/tiny", variant.root))
        write_config(staging, {**shape.config_json, checkpoint.RANDOM_WEIGHTS: True})
        Manifest(
            stage="shape",
            files=file_records(staging, progress),
            wall_seconds=round(time.monotonic() - started, 3),
            peak_memory_bytes=0,
            versions={},
            facts={"dimensions": shape.source},
        ).write(staging)
    return folder


def write_shape(shape: Shape, folder: Path, tokenizer: Path) -> None:
    """Write a checkpoint of these dimensions; its weights are zeros in a sparse file of a few hundred KB on disk.

    Args:
        folder: folder to write, empty or missing.
        tokenizer: folder whose tokenizer files are copied; the tokenizer may have fewer tokens than the model.
    """
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(shape.config_json, indent=1) + "\n")
    (folder / "preprocessor_config.json").write_text(json.dumps(IMAGE_PROCESSOR) + "\n")
    for name in TOKENIZER_FILES:
        shutil.copyfile(tokenizer / name, folder / name)
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    position = 0
    for name, (dtype, dimensions) in shape.tensors.items():
        end = position + tensor_bytes(dtype, dimensions)
        header[name] = {"dtype": dtype, "shape": list(dimensions), "data_offsets": [position, end]}
        position = end
    header_bytes = json.dumps(header).encode()
    header_bytes += b" " * (-len(header_bytes) % 8)
    with (folder / "model.safetensors").open("wb") as file:
        file.write(len(header_bytes).to_bytes(8, "little") + header_bytes)
        file.truncate(8 + len(header_bytes) + position)
