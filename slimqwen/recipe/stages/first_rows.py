"""The stage `first_rows`: smaller vocabularies of a checkpoint with random weights, the ids being the first.

On random weights no token is better than another, so there is nothing to count: `prune_vocab` and `trim_draft_vocab`
choose rows by use, this one takes the first. Speed and memory are the same. A trained checkpoint is refused.
"""

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated

import numpy as np
from pydantic import Field

from slimqwen import checkpoint
from slimqwen.checkpoint import draft_head
from slimqwen.checkpoint.config import read_json_object, write_config
from slimqwen.checkpoint.files import bytes_on_disk, carry_side_files
from slimqwen.checkpoint.shape import Shape
from slimqwen.checkpoint.tensors import (
    NewTensor,
    TensorInfo,
    from_ids,
    list_tensors,
    output_head,
    rewrite,
    selected_rows,
)
from slimqwen.progress import Progress
from slimqwen.recipe.stage import Facts, Needs, Parameters, Stage, StageError
from slimqwen.recipe.stages.prune_vocab import ROW_MULTIPLE

_CARRIER = "mtp.fc.weight"
"""The tensor whose shard takes the draft head."""

_IMPORTS_BYTES = 300 * 2**20

Rows = Annotated[int, Field(ge=ROW_MULTIPLE, multiple_of=ROW_MULTIPLE)]


class FirstRowsParameters(Parameters):
    """Parameters of the stage.

    Attributes:
        vocab_size: rows of embedding and output head to keep; None keeps all.
        draft_vocab_size: rows of a draft head; None adds none.
    """

    vocab_size: Rows | None = None
    draft_vocab_size: Rows | None = None


def run(source: Path, destination: Path, parameters: FirstRowsParameters, progress: Progress) -> Facts:
    """Write source to destination with fewer rows, with a draft head, or both.

    Raises:
        StageError: the weights are trained or the head is packed, a size is impossible, there is nothing to do, or
            there is no MTP head to draft.
    """
    config = checkpoint.read_config(source)
    rows = _checked_rows(source, parameters)
    head, head_info = output_head(source)
    drafted = parameters.draft_vocab_size

    def change(name: str, info: TensorInfo) -> Mapping[str, NewTensor] | None:
        if name == head or (name.endswith("embed_tokens.weight") and not name.startswith("mtp.")):
            return {name: selected_rows(info, np.arange(rows))}
        if name == _CARRIER and drafted is not None:
            ids = np.arange(drafted)
            return {
                name: info.unchanged(),
                draft_head.WEIGHT: selected_rows(head_info, ids),
                draft_head.TOKEN_IDS: from_ids(ids),
            }
        return None

    rewrite(source, destination, change, progress)
    carry_side_files(source, destination)
    text = config.get("text_config", config)
    text["vocab_size"] = rows
    write_config(destination, config if drafted is None else draft_head.announced(config, drafted))
    return {"vocab_size": rows, "draft_vocab_size": drafted or rows}


def needs(source: Path, parameters: FirstRowsParameters) -> Needs:
    """Disk: source and the draft head. Memory: libraries, as rows pass through in blocks."""
    _checked_rows(source, parameters)
    _, info = output_head(source)
    draft_bytes = (parameters.draft_vocab_size or 0) * 2 * info.shape[1]
    return Needs(disk_bytes=bytes_on_disk(source) + draft_bytes, memory_bytes=_IMPORTS_BYTES)


def _checked_rows(source: Path, parameters: FirstRowsParameters) -> int:
    """Rows of the embedding that stay."""
    if not checkpoint.has_random_weights(source):
        raise StageError(
            f"{source} is trained, and its first ids are not its best; choose by use with prune_vocab and "
            "trim_draft_vocab"
        )
    stored = list_tensors(source)
    present: int = checkpoint.text_config(checkpoint.read_config(source))["vocab_size"]
    rows = parameters.vocab_size or present
    if any(name.startswith("lm_head.weight_") for name in stored) or draft_head.WEIGHT in stored:
        raise StageError(f"{source} has a packed output head or a draft head; put first_rows first")
    tokenizer = read_json_object(source / "tokenizer.json")
    tokens = len(tokenizer["model"]["vocab"])
    if not tokens <= rows <= present or (parameters.draft_vocab_size or 0) > rows:
        raise StageError(
            f"{source}: {rows} rows and a draft head of {parameters.draft_vocab_size or 0} do not fit a tokenizer of "
            f"{tokens} tokens and {present} rows; choose other sizes"
        )
    if parameters.draft_vocab_size is not None and _CARRIER not in stored:
        raise StageError(f"{source} has no {_CARRIER}: nothing drafts; take draft_vocab_size out")
    if rows == present and parameters.draft_vocab_size is None:
        raise StageError(
            f"{source} has {present} rows and would keep all; give vocab_size or draft_vocab_size"
        )
    return rows


def reshape(shape: Shape, parameters: FirstRowsParameters) -> Shape:
    """Fewer rows, a draft head, or both."""
    if parameters.vocab_size is not None:
        shape = shape.with_vocabulary(parameters.vocab_size)
    drafted = parameters.draft_vocab_size
    return shape if drafted is None else shape.with_draft_vocabulary(drafted)


STAGE = Stage(
    name="first_rows",
    parameters=FirstRowsParameters,
    run=run,
    needs=needs,
    reshape=reshape,
    changes=lambda _: (r"(?:^|\.)(?:embed_tokens|lm_head)\.", re.escape(draft_head.PREFIX)),
    code=("slimqwen.checkpoint.draft_head", "slimqwen.checkpoint.tensors"),
    packages=("numpy",),
)
