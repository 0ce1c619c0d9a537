"""Weights in every form in which they are published: the tensors that store a weight, and its numbers.

| form | tensors of a module with a weight of [rows, columns] |
|---|---|
| plain | weight |
| compressed-tensors | weight_packed [rows, words], weight_scale [rows, groups], weight_shape, weight_zero_point |
| FP8 and INT8 | weight, with weight_scale of a tensor, row, group or block, or weight_scale_inv of a block |
| GPTQ, AutoRound | qweight [words, rows], qzeros [groups, words], scales [groups, rows], g_idx [columns] |
| AWQ | qweight [columns, words], qzeros [groups, words], scales [groups, rows]; words interleaved |
"""

import re
from collections import defaultdict
from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from slimqwen.checkpoint.config import quantisation, read_config, text_config
from slimqwen.checkpoint.errors import CorruptCheckpointError, UnsupportedFormatError
from slimqwen.checkpoint.tensors import TensorInfo, list_tensors

if TYPE_CHECKING:
    from torch import Tensor

TEXT_PART = "model.language_model."
"""Prefix of the names of the decoder's tensors in a multimodal checkpoint; in a text-only one it is `model.`."""

BLOCK_ROWS = 4096
"""Rows that are read at a time: a multiple of the number of zero points in a word, which belong to successive rows."""

_PART = re.compile(
    r"(?P<module>.+)\.(?P<part>weight_(?:packed|scale_inv|scale_2|scale|shape|zero_point|g_idx|global_scale)"
    r"|input_(?:scale|zero_point|global_scale)|activation_scale|qweight|qzeros|scales|g_idx|weight)"
)
_EXPERTS = re.compile(r"^(.+\.experts)\..+")
"""Experts are stored one by one, or all of a layer in one tensor."""

_CARRIERS = ("weight", "weight_packed", "qweight")
"""The parts that may hold the numbers of a weight; a module has one of them."""

_EIGHT_BITS = ("F8_E4M3", "F8_E5M2", "I8", "U8")

_AWQ_ORDER = (0, 4, 1, 5, 2, 6, 3, 7)
"""Position in a word of each of eight outputs, in the order of AutoAWQ's kernels."""


@dataclass(frozen=True)
class Weight:
    """A weight of a module as stored, in one or more tensors; or any other tensor of a checkpoint.

    Attributes:
        name: `<module>.weight`, the name that the weight has if it is not quantised; for another tensor its name.
        parts: end of the name -> tensor; another tensor is the part "".
        method: quant_method of the checkpoint; "" for an unquantised checkpoint.
        block: rows and columns of a block of weights that share a scale, if the checkpoint has such blocks.
    """

    name: str
    parts: Mapping[str, TensorInfo]
    method: str = ""
    block: tuple[int, int] | None = None

    @property
    def carrier(self) -> TensorInfo:
        """The tensor that holds the numbers."""
        return next(self.parts[part] for part in ("", *_CARRIERS) if part in self.parts)

    @property
    def is_quantised(self) -> bool:
        """Whether the weight is stored in fewer bits than it is computed with."""
        return bool(self.parts.keys() & {"weight_packed", "qweight"}) or self.carrier.dtype in _EIGHT_BITS

    @cached_property
    def shape(self) -> tuple[int, ...]:
        """Dimensions of the weight if it were not quantised."""
        if "weight_shape" in self.parts:
            stored = self.parts["weight_shape"]
            numbers = np.frombuffer(b"".join(stored.chunks()), "<i8" if stored.dtype == "I64" else "<i4")
            return tuple(numbers.tolist())
        if "qweight" in self.parts:
            self._require("qzeros", "scales")
            first, rows = self.carrier.shape[0], self.parts["scales"].shape[1]
            return rows, first if self._is_awq else first * 32 // self._gptq_bits
        return self.carrier.shape

    def has_bytes_of(self, other: "Weight") -> bool:
        """Whether the two weights have the same parts with the same dtypes, shapes and bytes."""
        return self.parts.keys() == other.parts.keys() and all(
            (info.dtype, info.shape) == (other.parts[part].dtype, other.parts[part].shape)
            and all(a == b for a, b in zip(info.chunks(), other.parts[part].chunks(), strict=True))
            for part, info in self.parts.items()
        )

    def blocks(self) -> Iterator["Tensor"]:
        """The weight as an engine computes with it: float32 [at most 4096, columns] at a time.

        Raises:
            UnsupportedFormatError: the weight is in a form that this module does not list.
        """
        if "qweight" in self.parts:
            yield from self._transposed().split(BLOCK_ROWS)
            return
        count = self.shape[0] if self.shape else 1
        for first in range(0, count, BLOCK_ROWS):
            yield self._rows(first, min(first + BLOCK_ROWS, count))

    def _rows(self, first: int, last: int) -> "Tensor":
        scale = self.parts.get("weight_scale") or self.parts.get("weight_scale_inv")
        if "weight_packed" in self.parts:
            return self._unpacked_rows(first, last)
        if self.carrier.dtype == "U8":
            raise self._unreadable("packed in bytes")
        numbers = self.carrier.rows(first, last).read().float()
        if scale is None or not self.is_quantised:
            return numbers
        if len(scale.shape) < 2 or scale.elements == 1:
            return numbers * scale.unchanged().read().float()
        return numbers * self._spread(scale, first, last)

    def _spread(self, scale: TensorInfo, first: int, last: int) -> "Tensor":
        """Scales of rows, groups or blocks, one for each number: float32 [rows, columns]."""
        rows, columns = self.shape
        height, width = self.block or (-(-rows // scale.shape[0]), -(-columns // scale.shape[1]))
        if scale.shape != (-(-rows // height), -(-columns // width)):
            raise self._unreadable(f"scaled by {list(scale.shape)} numbers")
        part = scale.rows(first // height, -(-last // height)).read().float()
        spread = part.repeat_interleave(height, 0)[first % height :][: last - first]
        return spread.repeat_interleave(width, 1)[:, :columns]

    def _require(self, *parts: str) -> None:
        if missing := [part for part in parts if part not in self.parts]:
            raise CorruptCheckpointError(f"{self.carrier.file}: {self.name} is stored without {missing[0]}")

    def _unpacked_rows(self, first: int, last: int) -> "Tensor":
        if self.carrier.dtype != "I32" or "weight_g_idx" in self.parts:
            raise self._unreadable("packed otherwise than as integers in consecutive groups")
        self._require("weight_scale", "weight_shape")
        words, scales = (
            self.parts[f"weight_{part}"].rows(first, last).read() for part in ("packed", "scale")
        )
        columns, points = self.shape[1], None
        if "weight_zero_point" in self.parts:
            per_word = 32 // (32 * words.shape[1] // columns)
            points = self.parts["weight_zero_point"].rows(first // per_word, -(-last // per_word)).read()
        return _dequantised(words, scales, columns, points)

    @property
    def _is_awq(self) -> bool:
        return self.method == "awq"

    @property
    def _gptq_bits(self) -> int:
        """Bits of a GPTQ weight, from the words of its zero points, which are one per row and group."""
        return 32 * self.parts["qzeros"].shape[1] // self.parts["scales"].shape[1]

    def _transposed(self) -> "Tensor":
        """The numbers of a GPTQ or AWQ weight, float32 [rows, columns]; both formats store columns first."""
        import torch

        bits = self._gptq_bits
        if bits not in (2, 4, 8) or (self._is_awq and bits != 4):
            raise self._unreadable(f"packed by {self.method} in {bits} bits")
        words, zeros, scales = (
            self.parts[part].unchanged().read() for part in ("qweight", "qzeros", "scales")
        )
        points, columns = _unpacked(zeros, bits), self.shape[1]
        if self._is_awq:
            levels = _unpacked(words, bits).unflatten(1, (-1, 8))[..., _AWQ_ORDER].flatten(1)
            points = points.unflatten(1, (-1, 8))[..., _AWQ_ORDER].flatten(1)
        else:
            levels = _unpacked(words.T.contiguous(), bits).T
            points = points + (self.method != "gptq_v2")  # GPTQ's first version stores the zero point minus 1
        groups = torch.arange(columns) // (columns // len(scales))
        if "g_idx" in self.parts:
            groups = self.parts["g_idx"].unchanged().read().long()
        return ((levels - points[groups]) * scales.float()[groups]).T.contiguous()

    def _unreadable(self, fault: str) -> UnsupportedFormatError:
        return UnsupportedFormatError(
            f"{self.carrier.file}: {self.name} is {fault}, which cannot be read here; use a checkpoint in another "
            "format, or the 16-bit one"
        )


def read_weights(folder: Path) -> dict[str, Weight]:
    """Every weight and other tensor of a checkpoint by its unquantised name; only the headers are read.

    Raises:
        CorruptCheckpointError: as `list_tensors`.
    """
    return group_parts(list_tensors(folder), quantisation(read_config(folder)))


def text_name(name: str) -> str:
    """The name that a tensor of a checkpoint has in the text-only class of the model."""
    return f"model.{name.removeprefix(TEXT_PART)}" if name.startswith(TEXT_PART) else name


def changed_weights(first: Path, second: Path, leave_out: Callable[[str], bool]) -> list[str]:
    """Names, as in the text-only class, of the weights that differ between checkpoints or are in only one of them.

    Args:
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
    """Whether a checkpoint can draft, as `holds_mtp_head`."""
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
        if (match := _PART.fullmatch(name)) or ".experts." in name
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
            f"of the MTP head that config.json announces the checkpoint lacks {missing[0]}{more}",
            "take along every mtp.* tensor of its base, or none",
        )
    return True


def group_parts(stored: Mapping[str, TensorInfo], settings: Mapping[str, Any]) -> dict[str, Weight]:
    """Group stored tensors to weights by name, in their order; `settings` is the quantization_config, or empty."""
    parts: dict[str, dict[str, TensorInfo]] = defaultdict(dict)
    for name, info in stored.items():
        match = _PART.fullmatch(name)
        if match and any(f"{match['module']}.{carrier}" in stored for carrier in _CARRIERS):
            parts[f"{match['module']}.weight"][match["part"]] = info
        else:
            parts[name][""] = info
    method = str(settings.get("quant_method", ""))
    if "auto_awq" in str(settings.get("packing_format")):
        method = "awq"
    elif settings.get("checkpoint_format") == "gptq_v2":
        method = "gptq_v2"
    groups = settings.get("config_groups", {}).values()
    sizes = (group.get("weights", {}).get("block_structure") for group in groups)
    size = settings.get("weight_block_size") or next(filter(None, sizes), None)
    block = (int(size[0]), int(size[1])) if size else None
    return {name: Weight(name, part, method, block) for name, part in parts.items()}


def _unpacked(words: "Tensor", bits: int) -> "Tensor":
    """Unpack words, int32 [rows, words], to unsigned numbers, int64 [rows, numbers]; the lowest bits come first."""
    import torch

    return ((words.long()[..., None] >> torch.arange(0, 32, bits)) & (2**bits - 1)).flatten(1)


def _dequantised(words: "Tensor", scales: "Tensor", columns: int, zero_points: "Tensor | None") -> "Tensor":
    """Dequantise rows of a packed weight to float32 [rows, columns].

    Args:
        words: int32 [rows, words of a row].
        scales: floating [rows, groups].
        zero_points: int32 [words of a column, groups]; None for a symmetric weight.
    """
    import torch
    from compressed_tensors.compressors import unpack_from_int32

    bits, shape = 32 * words.shape[1] // columns, torch.Size((len(words), columns))
    groups = unpack_from_int32(words, bits, shape).float().reshape(*scales.shape, -1)
    if zero_points is not None:
        points = unpack_from_int32(zero_points, bits, scales.shape, packed_dim=0)
        groups = groups - points.float().unsqueeze(2)
    return (groups * scales.float().unsqueeze(2)).reshape(shape)
