"""The outline of a checkpoint: settings, tensor shapes and sizes. Recipes are checked on it before they run."""

import json
import re
from collections import defaultdict
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from slimqwen import checkpoint
from slimqwen.checkpoint import draft_head, packing
from slimqwen.checkpoint.config import quantisation, quantised, read_json_object, untied
from slimqwen.checkpoint.files import bytes_on_disk
from slimqwen.checkpoint.tensors import INDEX, TensorInfo, find_output_head, list_tensors, tensor_bytes
from slimqwen.formats import BY_ROW
from slimqwen.formats.compressed_tensors import config_group, with_group
from slimqwen.models.published import published_tensors
from slimqwen.models.shape import MTP_LAYERS, Packing, Shape, parts_of

_TABLES = tuple(f"{table}.{part}" for table in packing.TABLES for part in BY_ROW)
"""Ends of the names of tensors with a row for each token."""

_LAYER = re.compile(r"(?!mtp\.)(?:.*\.)?layers\.\d+\.")


@dataclass(frozen=True)
class SampledTexts:
    """Numbers and lengths of the outputs that the stage `sample_outputs` writes beside a checkpoint, at most.

    Attributes:
        sampled: number of outputs to train on.
        held_out: number of outputs to measure on.
        prompt: longest prompt, tokens.
        continuation: longest continuation, tokens.
    """

    sampled: int
    held_out: int
    prompt: int
    continuation: int


@dataclass(frozen=True)
class Outline:
    """Settings, tensor shapes and sizes of a checkpoint that exists, or that a recipe's stages will make.

    Attributes:
        name: name of the checkpoint in error messages.
        folder: folder with tokenizer and chat templates: the checkpoint itself, or the base of the recipe.
        config: content of config.json.
        tensors: tensors by name; if the checkpoint does not exist yet, only their dtype and shape are valid.
        other_bytes: size of all else in the checkpoint, bytes.
        num_tokens: number of tokens of the tokenizer; None if the tokenizer is not on this machine.
        outputs: the model's own outputs that an earlier stage samples; None if none does.
    """

    name: str
    folder: Path
    config: Mapping[str, Any]
    tensors: Mapping[str, TensorInfo] = field(repr=False)
    other_bytes: int = 0
    num_tokens: int | None = None
    outputs: SampledTexts | None = None

    @classmethod
    def read(cls, folder: Path) -> "Outline":
        """The outline of a checkpoint folder, which may lack the weights if it has config.json and an index of tensors.

        Raises:
            CorruptCheckpointError: config.json, the index or a header cannot be read.
        """
        config = checkpoint.read_config(folder)
        index = folder / INDEX
        if index.is_file() and not any(folder.glob("*.safetensors")):
            content = read_json_object(index)
            promised = published_tensors(config, content["weight_map"].keys())
            predicted = {name: _predicted(*each) for name, each in promised.items()}
            total = int(content.get("metadata", {}).get("total_size", 0))
            listed = [info for name, info in predicted.items() if name in content["weight_map"]]
            more = max(0, total - sum(map(_stored_bytes, listed)))
            return cls(str(folder), folder, config, predicted, more, _count_tokens(folder))
        tensors = list_tensors(folder)
        others = bytes_on_disk(folder) - sum(map(_stored_bytes, tensors.values()))
        return cls(str(folder), folder, config, tensors, others, _count_tokens(folder))

    @classmethod
    def of_shape(cls, shape: Shape, folder: Path) -> "Outline":
        """The outline of a checkpoint from its tensor dimensions; neither checkpoint nor `folder` need exist."""
        tensors = {name: _predicted(dtype, size) for name, (dtype, size) in shape.tensors.items()}
        return cls(str(folder), folder, shape.config_json, tensors)

    @property
    def text(self) -> Mapping[str, Any]:
        """The language model's part of the config."""
        return checkpoint.text_config(self.config)

    @property
    def disk_bytes(self) -> int:
        """Size of the checkpoint on disk, bytes."""
        return self.other_bytes + sum(map(_stored_bytes, self.tensors.values()))

    @property
    def num_weights(self) -> int:
        """Number of weights in all tensors."""
        return sum(map(_num_weights, self.tensors.values()))

    @property
    def num_layer_weights(self) -> int:
        """Number of weights in the largest decoder layer."""
        layers: dict[str, int] = defaultdict(int)
        for name, info in self.tensors.items():
            if match := _LAYER.match(name):
                layers[match[0]] += _num_weights(info)
        return max(layers.values(), default=0)

    @property
    def num_table_weights(self) -> int:
        """Number of weights in embedding and output head; tied ones count once."""
        return sum(_num_weights(info) for name, info in self.tensors.items() if name.endswith(_TABLES))

    def num_weights_of(self, *kinds: str) -> int:
        """Number of weights in the unpacked linears of these kinds (`packing.LINEARS`)."""
        return sum(info.elements for kind in kinds for info in packing.linears(self.tensors, kind).values())

    def with_vocabulary(self, rows: int) -> "Outline":
        """The outline with `rows` rows in embedding and output head, and at most as many tokens."""
        tensors = {
            name: _predicted(info.dtype, (rows, *info.shape[1:])) if name.endswith(_TABLES) else info
            for name, info in self.tensors.items()
        }
        config = self._with_text({"vocab_size": rows})
        return replace(self, config=config, tensors=tensors, num_tokens=min(rows, self.num_tokens or rows))

    def with_draft_vocabulary(self, rows: int) -> "Outline":
        """The outline with a draft head of `rows` rows."""
        head = {
            draft_head.WEIGHT: _predicted("BF16", (rows, self.text["hidden_size"])),
            draft_head.TOKEN_IDS: _predicted("I64", (rows,)),
        }
        config = draft_head.announced(self.config, rows)
        return replace(self, config=config, tensors={**self.tensors, **head})

    def with_mtp_head(self) -> "Outline":
        """The outline with an MTP head in 16 bits."""
        shape = Shape.of_config(self.config).with_mtp_head()
        head = {name: each for name, each in shape.tensors.items() if name.startswith("mtp.")}
        config = self._with_text({MTP_LAYERS: shape.text[MTP_LAYERS]})
        predicted = {name: _predicted(*each) for name, each in head.items()}
        return replace(self, config=config, tensors={**self.tensors, **predicted})

    def with_packing(self, kinds: Mapping[str, Packing]) -> "Outline":
        """The outline with these kinds (`packing.LINEARS`) packed; a packed embedding or lm_head is untied."""
        tensors, config = dict(self.tensors), dict(self.config)
        for kind, packed in kinds.items():
            if kind in packing.TABLES:
                config = untied(config)
                [table, *_] = find_output_head(tensors)
                if not table.startswith("lm_head."):
                    tensors["lm_head.weight"] = tensors[table]
            linears = packing.linears(tensors, kind)
            group = config_group(packing.LINEARS[kind], packed.bits, packed.group_size)
            modules = [name.removesuffix(".weight") for name in linears]
            config = quantised(config, with_group(quantisation(config), kind, group, modules))
            for name, info in linears.items():
                tensors.pop(name, None)
                parts = parts_of(name, info.shape, packed.layout)
                tensors |= {part: _predicted(dtype, size) for part, (dtype, size) in parts.items()}
        return replace(self, config=config, tensors=tensors)

    def with_outputs(self, outputs: SampledTexts) -> "Outline":
        """The outline with sampled outputs beside the checkpoint."""
        return replace(self, outputs=outputs)

    def _with_text(self, changes: Mapping[str, Any]) -> dict[str, Any]:
        if "text_config" in self.config:
            return {**self.config, "text_config": {**self.config["text_config"], **changes}}
        return {**self.config, **changes}


def _predicted(dtype: str, shape: tuple[int, ...]) -> TensorInfo:
    return TensorInfo(dtype, shape, Path(), 0, tensor_bytes(dtype, shape))


def _num_weights(info: TensorInfo) -> int:
    """Number of weights in a tensor; an upper bound for a packed one, whose integers hold eight weights at most."""
    return info.elements * (8 if info.dtype == "I32" else 1)


def _stored_bytes(info: TensorInfo) -> int:
    return info.end - info.start


def _count_tokens(folder: Path) -> int | None:
    """Number of tokens in tokenizer.json of a byte-level BPE; None if the file is missing or of another kind."""
    try:
        content = json.loads((folder / "tokenizer.json").read_bytes())
        added = {token["content"] for token in content.get("added_tokens", [])}
        return len(content["model"]["vocab"].keys() | added)
    except (OSError, ValueError, LookupError, TypeError, AttributeError):
        return None
