"""Weights of a checkpoint in any format of `slimqwen.formats`: which tensors store each, and its dequantised values."""

import re
from collections import defaultdict
from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

from slimqwen.checkpoint.config import quantisation, read_config, text_config
from slimqwen.checkpoint.errors import CorruptCheckpointError
from slimqwen.checkpoint.tensors import TensorInfo, list_tensors
from slimqwen.formats import CARRIERS, PART, find_format
from slimqwen.formats.format import Layout, UnsupportedFormatError

if TYPE_CHECKING:
    from torch import Tensor

TEXT_PART = "model.language_model."
"""Prefix of the names of the decoder's tensors in a multimodal checkpoint; in a text-only one it is `model.`."""

BLOCK_ROWS = 4096
"""Rows that are read at a time: a multiple of 32, for zero points of successive rows share words."""

_WHOLE = ("BF16", "F16", "F32", "F64")

_EXPERTS = re.compile(r"^(.+\.experts)\..+")
"""Experts are stored one by one, or all of a layer in one tensor."""


@dataclass(frozen=True)
class Weight:
    """A module's weight as stored in one or more tensors (parts); or any other tensor of a checkpoint.

    Attributes:
        name: `<module>.weight`, the name that the weight has if it is not quantised; for another tensor its name.
        parts: its tensors by the last part of their names; another tensor has the key "".
        layout: how the weight is quantised; None if it is not, or in an unknown way.
    """

    name: str
    parts: Mapping[str, TensorInfo]
    layout: Layout | None = None

    @property
    def carrier(self) -> TensorInfo:
        """The tensor that holds the numbers."""
        return next(self.parts[part] for part in ("", *CARRIERS) if part in self.parts)

    @property
    def tensor_names(self) -> list[str]:
        """Names of its tensors in the checkpoint."""
        module = self.name.removesuffix(".weight")
        return [f"{module}.{part}" if part else self.name for part in self.parts]

    @property
    def is_quantised(self) -> bool:
        """Whether the weight is stored in fewer bits than it is computed with."""
        return self.layout is not None or ("" not in self.parts and self.carrier.dtype not in _WHOLE)

    @cached_property
    def shape(self) -> tuple[int, ...]:
        """Dimensions of the weight if it were not quantised.

        Raises:
            CorruptCheckpointError: a part is missing.
        """
        if self.layout is None:
            return self.carrier.shape
        if missing := [part for part in self.layout.required if part not in self.parts]:
            raise CorruptCheckpointError(f"{self.carrier.file}: {self.name} is stored without {missing[0]}")
        return self.layout.shape(self.parts)

    def has_bytes_of(self, other: "Weight") -> bool:
        """Whether the two weights have the same parts with the same dtypes, shapes and bytes."""
        return self.parts.keys() == other.parts.keys() and all(
            (info.dtype, info.shape) == (other.parts[part].dtype, other.parts[part].shape)
            and all(a == b for a, b in zip(info.chunks(), other.parts[part].chunks(), strict=True))
            for part, info in self.parts.items()
        )

    def blocks(self) -> Iterator["Tensor"]:
        """Yield the dequantised weight as an engine computes with it, in blocks of float32 [at most 4096, columns].

        Raises:
            CorruptCheckpointError: a part is missing.
            UnsupportedFormatError: the weight is in a layout that is not known or not read here.
        """
        rows = self.shape[0] if self.shape else 1
        fault = f"stored as {self.carrier.dtype} in a way that is not known" if self.is_quantised else None
        if self.layout:
            fault = self.layout.unreadable(self.parts)
        if fault:
            raise UnsupportedFormatError(
                f"{self.carrier.file}: {self.name} is {fault}, which cannot be read here; use a checkpoint in another "
                "format, or the 16-bit one"
            )
        if self.layout:
            yield from self.layout.blocks(self.parts, BLOCK_ROWS)
            return
        for first in range(0, rows, BLOCK_ROWS):
            yield self.carrier.rows(first, min(first + BLOCK_ROWS, rows)).read().float()


def read_weights(folder: Path) -> dict[str, Weight]:
    """Every weight and other tensor of a checkpoint by its unquantised name; only the headers are read.

    Raises:
        CorruptCheckpointError: config.json, the index or a header is missing or damaged.
    """
    return group_parts(list_tensors(folder), quantisation(read_config(folder)))


def refuse_without_cpu_kernel(folder: Path) -> None:
    """Check that vLLM's CPU build can compute with every weight of a checkpoint.

    Raises:
        UnsupportedFormatError: it has no kernel for one of the weights as they are quantised.
        CorruptCheckpointError: the checkpoint cannot be read.
    """
    form = find_format(quantisation(read_config(folder)))
    weights = group_parts(list_tensors(folder), form.settings) if form.layouts else {}
    for name, weight in weights.items():
        if weight.is_quantised and form.needs_gpu(name.removesuffix(".weight")):
            raise UnsupportedFormatError(
                f"{folder}: vLLM's CPU build has no kernel for {name} in {form.describe()}; serve it on a GPU, or "
                "here as the same values in 16 bits, made by the stage unpack"
            )


def text_name(name: str) -> str:
    """The name of a tensor in the model's text-only class: model.language_model.norm.weight is model.norm.weight."""
    return f"model.{name.removeprefix(TEXT_PART)}" if name.startswith(TEXT_PART) else name


def changed_weights(first: Path, second: Path, leave_out: Callable[[str], bool]) -> list[str]:
    """Names of weights that differ between two checkpoints or are in only one of them, as a text-only model has them.

    Args:
        first, second: folders of the checkpoints.
        leave_out: name -> whether that weight is neither compared nor returned.

    Raises:
        CorruptCheckpointError: a checkpoint cannot be read.
    """
    before, after = (
        {text_name(name): weight for name, weight in read_weights(folder).items()}
        for folder in (first, second)
    )
    names = [name for name in dict.fromkeys([*before, *after]) if not leave_out(name)]
    return [
        name
        for name in names
        if name not in before or name not in after or not after[name].has_bytes_of(before[name])
    ]


def has_mtp_head(folder: Path) -> bool:
    """Whether a checkpoint has a whole MTP head, so that it can draft.

    Raises:
        CorruptCheckpointError: there is only a part of the head, or the checkpoint cannot be read.
    """
    return holds_mtp_head(read_config(folder), list_tensors(folder))


def holds_mtp_head(config: Mapping[str, Any], names: Collection[str]) -> bool:
    """Whether a checkpoint can draft: its config.json announces an MTP head, and the tensors `names` have it.

    Trainers that do not know the head save the model without mtp.* and its config.json as it was: it has no head then.

    Raises:
        CorruptCheckpointError: there is only a part of the head.
    """
    count = text_config(config).get("mtp_num_hidden_layers") or 0
    if not count or not any(name.startswith("mtp.") for name in names):
        return False
    modules = dict.fromkeys(
        _EXPERTS.sub(r"\1", match["module"] if match else name)
        for name in names
        if (match := PART.fullmatch(name)) or ".experts." in name
    )
    # An MTP layer is made as the backbone's full-attention layers.
    attention = [module.partition(".self_attn.")[0] for module in modules if ".self_attn." in module]
    layer = next((f"{name}." for name in attention if not name.startswith("mtp.")), None)
    parts = [module.removeprefix(layer) for module in modules if layer and module.startswith(layer)]
    required = [f"mtp.{name}" for name in ("fc", "norm", "pre_fc_norm_hidden", "pre_fc_norm_embedding")]
    required += [f"mtp.layers.{number}.{part}" for number in range(count) for part in parts]
    if missing := [module for module in required if module not in modules]:
        more = f" and {len(missing) - 1} others" if missing[1:] else ""
        raise CorruptCheckpointError(
            f"the checkpoint lacks {missing[0]}{more} of the MTP head that config.json announces",
            "copy every mtp.* tensor of its base into it, or none",
        )
    return True


def group_parts(stored: Mapping[str, TensorInfo], settings: Mapping[str, Any]) -> dict[str, Weight]:
    """Group stored tensors to weights, by the name `<module>.weight`; any other tensor keeps its own name.

    Args:
        stored: tensors by name, whose order is kept.
        settings: quantization_config of the checkpoint; empty for unquantised weights.
    """
    parts: dict[str, dict[str, TensorInfo]] = defaultdict(dict)
    for name, info in stored.items():
        match = PART.fullmatch(name)
        if match and any(f"{match['module']}.{carrier}" in stored for carrier in CARRIERS):
            parts[f"{match['module']}.weight"][match["part"]] = info
        else:
            parts[name][""] = info
    form = find_format(settings)

    def layout_of(name: str) -> Layout | None:
        layouts = form.layouts_of(name.removesuffix(".weight"))
        return next((layout for layout in layouts if layout.is_stored(parts[name])), None)

    return {name: Weight(name, stored, layout_of(name)) for name, stored in parts.items()}
