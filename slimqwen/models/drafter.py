"""A separate drafting model (EAGLE, DFlash, a small language model): vLLM's method for it, and whether it fits a model.

Drafters of EAGLE and DFlash read hidden states of the model and, unless they have one of their own, its embedding
(`vllm/model_executor/models/llama_eagle3.py`, `qwen3_dflash.py`). A whole language model reads tokens alone. All need
the model's token ids, because ids are what is verified.
"""

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from slimqwen.checkpoint.config import read_config, text_config
from slimqwen.checkpoint.errors import CorruptCheckpointError
from slimqwen.checkpoint.tensors import list_tensors
from slimqwen.errors import SlimqwenError
from slimqwen.models.vocabulary import read_tokenizer

_METHODS = {
    "dflash": "dflash",
    "dspark": "dspark",
    "peagle": "eagle3",
    "eagle3": "eagle3",
    "eagle": "eagle",
    "forcausallm": "draft_model",
    "forconditionalgeneration": "draft_model",
}
"""A part of the architecture's name in lower case -> vLLM's method; the first that matches."""

_DEPTH = 4
"""Initial number of tokens drafted at a time; `slimqwen tune` finds the fastest."""


class DrafterError(SlimqwenError):
    """A drafting model that cannot draft for a model."""


def check_files(folder: Path, cure: str) -> None:
    """Check the files of a drafter, which need not have a tokenizer.

    Raises:
        CorruptCheckpointError: a file is missing or damaged; `cure` is the end of the message.
    """
    try:
        read_config(folder)
        list_tensors(folder)
    except CorruptCheckpointError as error:
        raise error.with_cure(cure) from None


def describe_drafter(folder: Path, target: Path, path: str) -> dict[str, Any]:
    """Make vLLM's speculative config for a drafter.

    Args:
        folder: folder of the drafter.
        target: folder of the model that verifies.
        path: path of the drafter to write into the config.

    Raises:
        DrafterError: vLLM has no method for it, or it does not fit the target.
        CorruptCheckpointError: a file of it is missing or damaged.
    """
    config = read_config(folder)
    [architecture, *_] = config["architectures"]
    method = next((name for part, name in _METHODS.items() if part in architecture.lower()), None)
    if method is None:
        raise DrafterError(
            f"{folder} is a {architecture}, with which vLLM cannot draft; name a drafter of EAGLE or DFlash, or "
            "a small language model"
        )
    check_files(folder, "copy or download it again")
    for fault in _find_misfits(folder, config, target, reads_states=method != "draft_model"):
        raise DrafterError(
            f"{folder} does not fit {target}: {fault}; name a drafter that was made for this model"
        )
    return {"method": method, "model": path, "num_speculative_tokens": _DEPTH}


def _find_misfits(
    folder: Path, config: Mapping[str, Any], target: Path, *, reads_states: bool
) -> Iterator[str]:
    # Drafters of the library speculators describe their layers in a part of their own.
    own = config.get("transformer_layer_config") or text_config(config)
    text = text_config(read_config(target))
    if own.get("vocab_size") != text["vocab_size"]:
        yield f"its vocabulary has {own.get('vocab_size')} ids, the model's {text['vocab_size']}"
    if reads_states:
        hidden = config.get("target_hidden_size") or own.get("hidden_size")
        has_embedding = any(name.endswith("embed_tokens.weight") for name in list_tensors(folder))
        for width in (hidden, *([] if has_embedding else [own.get("hidden_size")])):
            if width != text["hidden_size"]:
                yield f"it reads states of width {width}, the model's have {text['hidden_size']}"
    elif (folder / "tokenizer.json").is_file():
        theirs, ours = (read_tokenizer(each / "tokenizer.json").get_vocab() for each in (folder, target))
        if moved := [token for token, number in theirs.items() if ours.get(token, number) != number]:
            yield f"{len(moved)} tokens, as {min(moved)!r}, have another id"
