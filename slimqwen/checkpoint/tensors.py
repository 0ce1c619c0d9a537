"""The tensors of a checkpoint, streamed: headers are read alone, bytes pass through in chunks of at most 16 MiB.

The file format is safetensors: 8 bytes of header length, a JSON header, then the tensors without gaps.
"""

import json
import math
import struct
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from slimqwen.checkpoint.config import read_json_object
from slimqwen.checkpoint.errors import CorruptCheckpointError
from slimqwen.progress import Progress, silent

_INDEX = "model.safetensors.index.json"
_CHUNK_BYTES = 16 * 2**20
_ROWS_BLOCK_BYTES = 2**20
"""Bytes read at a time to pick rows: new buffers of many MiB cost more in page faults than the reading itself."""
_BITS = {
    **dict.fromkeys(("F64", "I64", "U64"), 64),
    **dict.fromkeys(("F32", "I32", "U32"), 32),
    **dict.fromkeys(("F16", "BF16", "I16", "U16"), 16),
    **dict.fromkeys(("F8_E4M3", "F8_E5M2", "F8_E8M0", "I8", "U8", "BOOL"), 8),
}
_TORCH_DTYPES = {"F32": "float32", "F16": "float16", "BF16": "bfloat16", "I32": "int32", "I64": "int64"}


def tensor_bytes(dtype: str, shape: tuple[int, ...]) -> int:
    """Bytes of a tensor; its dtype as safetensors spells it."""
    return math.prod(shape) * _BITS[dtype] // 8


@dataclass(frozen=True)
class NewTensor:
    """A tensor to be written.

    Attributes:
        dtype: safetensors name, such as BF16.
        shape: dimensions.
        chunks: yields the little-endian bytes in order; called once, when the tensor is written.
    """

    dtype: str
    shape: tuple[int, ...]
    chunks: Callable[[], Iterable[bytes | memoryview]]

    @property
    def bytes(self) -> int:
        """Size in bytes."""
        return tensor_bytes(self.dtype, self.shape)

    def read(self) -> Any:
        """The whole tensor in memory, as torch's."""
        import torch

        content = bytearray().join(self.chunks())
        return torch.frombuffer(content, dtype=torch_dtype(self.dtype)).reshape(self.shape)


@dataclass(frozen=True)
class TensorInfo:
    """A stored tensor; file[start:end] holds its bytes."""

    dtype: str
    shape: tuple[int, ...]
    file: Path
    start: int
    end: int

    @property
    def elements(self) -> int:
        """Number of elements."""
        return math.prod(self.shape)

    def chunks(self, start: int = 0, end: int | None = None) -> Iterator[bytes]:
        """Yield bytes start to end of the tensor (all of them by default), at most 16 MiB at a time."""
        position, stop = self.start + start, self.end if end is None else self.start + end
        with self.file.open("rb") as stream:
            stream.seek(position)
            while position < stop:
                chunk = stream.read(min(_CHUNK_BYTES, stop - position))
                if not chunk:
                    raise CorruptCheckpointError(f"{self.file} ends in the middle of a tensor")
                position += len(chunk)
                yield chunk

    def unchanged(self) -> NewTensor:
        """The same tensor, to be written byte for byte."""
        return NewTensor(self.dtype, self.shape, self.chunks)

    def rows(self, first: int, last: int) -> NewTensor:
        """Consecutive rows, to be written; a scalar is one row."""
        length = (self.end - self.start) // (self.shape[0] if self.shape else 1)
        shape = (last - first, *self.shape[1:])
        return NewTensor(self.dtype, shape, lambda: self.chunks(first * length, last * length))


def selected_rows(info: TensorInfo, rows: npt.NDArray[np.int64]) -> NewTensor:
    """Some rows of a stored tensor, in ascending order, to be written; blocks without any of them are not read."""
    length = (info.end - info.start) // info.shape[0]
    block = max(1, _ROWS_BLOCK_BYTES // length)

    def chunks() -> Iterator[memoryview]:
        for first in range(0, info.shape[0], block):
            last = min(first + block, info.shape[0])
            wanted = rows[np.searchsorted(rows, first) : np.searchsorted(rows, last)] - first
            if len(wanted):
                read = b"".join(info.chunks(first * length, last * length))
                yield np.frombuffer(read, np.uint8).reshape(-1, length)[wanted].data

    return NewTensor(info.dtype, (len(rows), *info.shape[1:]), chunks)


def torch_dtype(dtype: str) -> Any:
    """The torch dtype of a safetensors dtype name (F32, F16, BF16, I32, I64)."""
    import torch

    return getattr(torch, _TORCH_DTYPES[dtype])


def from_torch(tensor: Any, floating_dtype: str) -> NewTensor:
    """A torch tensor (floating, int32 or int64) to be written, converted to the dtype only when it is written."""
    import torch

    dtype = floating_dtype
    if not tensor.is_floating_point():
        dtype = next(name for name in _TORCH_DTYPES if torch_dtype(name) == tensor.dtype)

    def chunks() -> Iterator[memoryview]:
        stored = tensor.detach().to("cpu", torch_dtype(dtype)).contiguous()
        yield memoryview(stored.view(torch.uint8).numpy()).cast("B")

    return NewTensor(dtype, tuple(tensor.shape), chunks)


def from_ids(ids: npt.NDArray[np.int64]) -> NewTensor:
    """Token ids, to be written as I64."""
    return NewTensor("I64", ids.shape, lambda: [ids.astype("<i8").tobytes()])


def list_tensors(folder: Path) -> dict[str, TensorInfo]:
    """Every tensor of a checkpoint by name, from the headers alone, in the order of files and then of bytes.

    Raises:
        CorruptCheckpointError: a header contradicts its file, or the index contradicts the shards.
    """
    index = folder / _INDEX
    shards = sorted(folder.glob("*.safetensors"))
    if not shards:
        raise CorruptCheckpointError(f"{folder} has no .safetensors file")
    tensors: dict[str, TensorInfo] = {}
    for shard in shards:
        for name, info in _read_header(shard).items():
            if name in tensors:
                raise CorruptCheckpointError(
                    f"{name} is stored twice, in {tensors[name].file.name} and {shard}"
                )
            tensors[name] = info
    if index.is_file():
        _check_index(index, tensors)
    elif len(shards) > 1:
        raise CorruptCheckpointError(f"{index} is missing, yet there are {len(shards)} shards")
    return tensors


def output_head(folder: Path) -> tuple[str, TensorInfo]:
    """The output head, name and location: lm_head.weight or, with tied embeddings, the input embedding.

    Raises:
        CorruptCheckpointError: the checkpoint has neither.
    """
    tensors = list_tensors(folder)
    embeddings = [
        name for name in tensors if name.endswith("embed_tokens.weight") and not name.startswith("mtp.")
    ]
    names = ["lm_head.weight"] if "lm_head.weight" in tensors else embeddings
    if len(names) != 1:
        raise CorruptCheckpointError(
            f"{folder} has neither lm_head nor embed_tokens; choose a language model"
        )
    return names[0], tensors[names[0]]


def rewrite(
    source: Path,
    destination: Path,
    change: Callable[[str, TensorInfo], Mapping[str, NewTensor] | None],
    progress: Progress = silent,
) -> None:
    """Copy source's shards into destination with some tensors changed; shard names and the index are kept.

    Args:
        change: (name, stored tensor) -> the tensors to write in its stead (an empty mapping drops it), or None to
            copy it byte for byte.
        progress: receives (activity, done, total) in bytes of source.
    """
    stored = list_tensors(source)
    total = sum(info.end - info.start for info in stored.values())
    done, length = 0, 0
    weight_map: dict[str, str] = {}
    for shard in sorted({info.file for info in stored.values()}):
        contents: dict[str, NewTensor] = {}
        for name, info in stored.items():
            if info.file == shard:
                changed = change(name, info)
                contents |= {name: info.unchanged()} if changed is None else changed
                done += info.end - info.start
        if contents:
            write_tensors(destination / shard.name, contents)
        weight_map |= dict.fromkeys(contents, shard.name)
        length += sum(tensor.bytes for tensor in contents.values())
        progress("writing tensors", done, total)
    if (source / _INDEX).is_file():
        index = {"metadata": {"total_size": length}, "weight_map": dict(sorted(weight_map.items()))}
        (destination / _INDEX).write_text(json.dumps(index, indent=2) + "\n", encoding="utf-8")


def write_tensors(file: Path, contents: Mapping[str, NewTensor]) -> None:
    """Write one safetensors file, one tensor after the other."""
    # Wide dtypes first, as the format's own writer does: readers want each tensor aligned to its dtype.
    ordered = sorted(contents.items(), key=lambda item: (-_BITS[item[1].dtype], item[0]))
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    end = 0
    for name, tensor in ordered:
        start, end = end, end + tensor.bytes
        header[name] = {"dtype": tensor.dtype, "shape": tensor.shape, "data_offsets": [start, end]}
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    with file.open("wb") as stream:
        stream.write(struct.pack("<Q", len(text)) + text)
        for name, tensor in ordered:
            begin = stream.tell()
            for chunk in tensor.chunks():
                stream.write(chunk)
            if stream.tell() - begin != tensor.bytes:
                raise ValueError(f"{name} gave {stream.tell() - begin} bytes, its shape has {tensor.bytes}")


def _read_header(file: Path) -> dict[str, TensorInfo]:
    length = file.stat().st_size
    with file.open("rb") as stream:
        prefix = stream.read(8)
        header_length = struct.unpack("<Q", prefix)[0] if len(prefix) == 8 else length
        if 8 + header_length > length:
            raise CorruptCheckpointError(f"{file} is cut short: {length} bytes do not hold its header")
        header = stream.read(header_length)
    try:
        entries = json.loads(header)
        entries.pop("__metadata__", None)
        tensors = {
            name: TensorInfo(
                entry["dtype"],
                tuple(int(dimension) for dimension in entry["shape"]),
                file,
                *(8 + header_length + int(offset) for offset in entry["data_offsets"]),
            )
            for name, entry in entries.items()
        }
        ordered = dict(sorted(tensors.items(), key=lambda item: (item[1].start, item[1].end)))
        position = 8 + header_length
        for name, info in ordered.items():
            bits = math.prod(info.shape) * _BITS[info.dtype]
            if info.start != position or (info.end - info.start) * 8 != bits:
                raise ValueError(f"{name} does not have the position or the length that its shape needs")
            position = info.end
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise CorruptCheckpointError(f"{file} has a broken header ({error})") from None
    if position != length:
        what = "is cut short" if length < position else "has bytes too many"
        raise CorruptCheckpointError(f"{file} {what}: {length} bytes, its header needs {position}")
    return ordered


def _check_index(index: Path, tensors: Mapping[str, TensorInfo]) -> None:
    weight_map = read_json_object(index).get("weight_map")
    if not isinstance(weight_map, dict):
        raise CorruptCheckpointError(f"{index} has no weight_map")
    stored = {name: info.file.name for name, info in tensors.items()}
    for name in sorted(weight_map.keys() | stored.keys(), key=str):
        if weight_map.get(name) != stored.get(name):
            listed, actual = weight_map.get(name, "no file"), stored.get(name, "no file")
            raise CorruptCheckpointError(f"{index} says that {name} is in {listed}, but {actual} holds it")
