"""The draft head of a checkpoint: the rows of the output head for those token ids that the MTP head may draft.

The stage `trim_draft_vocab` writes the draft head into draft_head.safetensors, a file that the index does not list
(`slimqwen.checkpoint.tensors.UNLISTED`); `slimqwen.vllm_plugin.draft_vocabulary` makes vLLM load it. vLLM without that
plugin does not open the file and drafts from the full vocabulary. config.json announces the draft head, so that an
engine can allocate the tensors before it reads them; other readers ignore the key. No tensor's name ends in
`lm_head.weight`: vLLM would take it for an output head of the target model and untie tied embeddings.

    mtp.draft_head.weight      [rows, hidden], BF16 or F16; or packed as a group of quantization_config says
    mtp.draft_head.token_ids   [rows], I64, ascending: the id that each row stands for
    mtp_draft_vocab_size       rows, in config.json beside `mtp_num_hidden_layers`
"""

from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from slimqwen.checkpoint.config import text_config
from slimqwen.checkpoint.errors import CorruptCheckpointError
from slimqwen.checkpoint.tensors import UNLISTED, UNLISTED_PREFIX, TensorInfo
from slimqwen.formats import CARRIERS

FILE, PREFIX = UNLISTED, UNLISTED_PREFIX
MODULE = PREFIX.removesuffix(".")
WEIGHT = f"{PREFIX}weight"
"""Name of the weight if it is not packed."""
TOKEN_IDS = f"{PREFIX}token_ids"
SIZE_KEY = "mtp_draft_vocab_size"
"""Key of config.json, in the language model's part: rows of the draft head."""


def read_token_ids(tensors: Mapping[str, TensorInfo], vocab_size: int) -> npt.NDArray[np.int64] | None:
    """The token ids of the draft head's rows, int64 [rows], ascending; None where the checkpoint has no draft head.

    Args:
        tensors: tensors of the checkpoint by name.
        vocab_size: rows of the full output head; every id is below it.

    Raises:
        CorruptCheckpointError: weight or ids are missing, or the ids do not fit the rows or `vocab_size`.
    """
    carriers = (f"{PREFIX}{carrier}" for carrier in CARRIERS)
    weight = next((tensors[name] for name in carriers if name in tensors), None)
    ids = tensors.get(TOKEN_IDS)
    if weight is None and ids is None:
        return None
    cure = "make the checkpoint anew with the stage trim_draft_vocab"
    if weight is None or ids is None:
        present, absent = (WEIGHT, TOKEN_IDS) if ids is None else (TOKEN_IDS, WEIGHT)
        raise CorruptCheckpointError(
            f"the checkpoint has {present} but not {absent}, its draft head's other tensor", cure
        )
    if ids.dtype != "I64" or ids.shape != weight.shape[:1]:
        raise CorruptCheckpointError(
            f"{TOKEN_IDS} is {ids.dtype} {list(ids.shape)}, {WEIGHT} has {weight.shape[0]} rows", cure
        )
    numbers = np.frombuffer(b"".join(ids.chunks()), "<i8").astype(np.int64)
    if len(numbers) and (numbers[0] < 0 or numbers[-1] >= vocab_size or (np.diff(numbers) <= 0).any()):
        raise CorruptCheckpointError(
            f"{TOKEN_IDS} is not one ascending id per row, each below the vocabulary's {vocab_size}", cure
        )
    return numbers


def refuse_lost(folder: Path, config: Mapping[str, Any], names: Collection[str]) -> None:
    """Refuse a checkpoint whose config.json announces a draft head that its files lack.

    The usual reason is a copy of the folder by its index, which does not list the file of the draft head.

    Args:
        folder: folder of the checkpoint, for the message.
        config: content of its config.json.
        names: names of the checkpoint's tensors.

    Raises:
        CorruptCheckpointError: the draft head is missing. A checkpoint without an MTP head needs none and passes.
    """
    drafts = any(name.startswith("mtp.") for name in names)
    has_head = any(name.startswith(PREFIX) for name in names)
    if drafts and text_config(config).get(SIZE_KEY) and not has_head:
        raise CorruptCheckpointError(
            f"{folder / FILE} is missing, although config.json announces it ({SIZE_KEY})",
            "copy it from where the folder came from, or remove that key to draft from the full vocabulary",
        )


def announced(config: Mapping[str, Any], rows: int) -> dict[str, Any]:
    """A copy of the config that announces a draft head: its number of rows, in the language model's part."""
    if "text_config" in config:
        return {**config, "text_config": {**config["text_config"], SIZE_KEY: rows}}
    return {**config, SIZE_KEY: rows}
