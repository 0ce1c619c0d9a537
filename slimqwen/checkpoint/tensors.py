"""The tensors of a checkpoint as streams: headers are read without tensors, and bytes in chunks of at most 16 MiB.

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

from slimqwen.checkpoint.config import read_config, read_json_object, text_config
from slimqwen.checkpoint.errors import CorruptCheckpointError
from slimqwen.checkpoint.stored_file import refuse_pointer
from slimqwen.progress import Progress, silent

INDEX = "model.safetensors.index.json"

UNLISTED = "draft_head.safetensors"
"""File of tensors that `INDEX` does not list. An engine reads only what the index lists, and ends at a tensor for which
its model has no parameter."""

UNLISTED_PREFIX = "mtp.draft_head."
"""Beginning of the names of the tensors that are written to `UNLISTED`; earlier versions put them into a shard."""

_CHUNK_BYTES = 16 * 2**20
_ROWS_BLOCK_BYTES = 2**20
"""Bytes read at a time to select rows; larger new buffers cost more in page faults than the reading itself."""
_BITS = {
    **dict.fromkeys(("F64", "I64", "U64"), 64),
    **dict.fromkeys(("F32", "I32", "U32"), 32),
    **dict.fromkeys(("F16", "BF16", "I16", "U16"), 16),
    **dict.fromkeys(("F8_E4M3", "F8_E5M2", "F8_E8M0", "I8", "U8", "BOOL"), 8),
}
_TORCH_DTYPES = {
    **{"F32": "float32", "F16": "float16", "BF16": "bfloat16", "F8_E4M3": "float8_e4m3fn"},
    **{"F8_E5M2": "float8_e5m2", "I8": "int8", "U8": "uint8", "I32": "int32", "I64": "int64"},
}


def tensor_bytes(dtype: str, shape: tuple[int, ...]) -> int:
    """Size of a tensor in bytes; `dtype` as safetensors spells it."""
    return math.prod(shape) * _BITS[dtype] // 8


@dataclass(frozen=True)
class NewTensor:
    """A tensor to be written.

    Attributes:
        dtype: dtype as safetensors spells it, such as BF16.
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
        """The whole tensor in memory, as a torch tensor."""
        import torch

        content = bytearray().join(self.chunks())
        return torch.frombuffer(content, dtype=torch_dtype(self.dtype)).reshape(self.shape)


@dataclass(frozen=True)
class TensorInfo:
    """A stored tensor, of which only the header was read.

    Attributes:
        dtype: dtype as safetensors spells it, such as BF16.
        shape: dimensions.
        file: file of the tensor.
        start, end: its bytes are file[start:end].
    """

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
        """Yield the tensor's bytes from `start` to `end` (all by default), at most 16 MiB at a time.

        Raises:
            CorruptCheckpointError: the file ends in the middle of the tensor.
        """
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
        """A `NewTensor` that copies this tensor byte for byte."""
        return NewTensor(self.dtype, self.shape, self.chunks)

    def rows(self, first: int, last: int) -> NewTensor:
        """A `NewTensor` of the rows from `first` to before `last`; a scalar counts as one row."""
        length = (self.end - self.start) // (self.shape[0] if self.shape else 1)
        shape = (last - first, *self.shape[1:])
        return NewTensor(self.dtype, shape, lambda: self.chunks(first * length, last * length))


@dataclass(frozen=True)
class SelectedRows:
    """Some rows of a stored tensor, read in blocks as if they were a stored tensor themselves.

    Attributes:
        info: the stored tensor.
        ids: numbers of the rows, ascending.
    """

    info: TensorInfo
    ids: npt.NDArray[np.int64]

    @property
    def shape(self) -> tuple[int, ...]:
        """Dimensions of the selection."""
        return (len(self.ids), *self.info.shape[1:])

    @property
    def file(self) -> Path:
        """File of the stored tensor."""
        return self.info.file

    def rows(self, first: int, last: int) -> NewTensor:
        """A `NewTensor` of rows `first` to before `last` of the selection."""
        return selected_rows(self.info, self.ids[first:last])


def selected_rows(info: TensorInfo, rows: npt.NDArray[np.int64]) -> NewTensor:
    """A `NewTensor` of some rows (ascending) of a stored tensor; blocks of the file without such rows are not read."""
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
    """The torch dtype of a safetensors dtype name; only for dtypes in which weights are stored."""
    import torch

    return getattr(torch, _TORCH_DTYPES[dtype])


def from_torch(tensor: Any, floating_dtype: str) -> NewTensor:
    """A `NewTensor` of a torch tensor; floating-point values are converted to `floating_dtype` when it is written."""
    import torch

    dtype = floating_dtype
    if not tensor.is_floating_point():
        dtype = next(name for name in _TORCH_DTYPES if torch_dtype(name) == tensor.dtype)

    def chunks() -> Iterator[memoryview]:
        stored = tensor.detach().to("cpu", torch_dtype(dtype)).contiguous()
        yield memoryview(stored.view(torch.uint8).numpy()).cast("B")

    return NewTensor(dtype, tuple(tensor.shape), chunks)


def from_ids(ids: npt.NDArray[np.int64]) -> NewTensor:
    """A `NewTensor` of token ids, in I64."""
    return NewTensor("I64", ids.shape, lambda: [ids.astype("<i8").tobytes()])


def weight_files(folder: Path) -> list[Path]:
    """The files of weights: those that the index names, and `UNLISTED`; without an index, the only file.

    Raises:
        CorruptCheckpointError: there is no such file, a file that the index names is missing, or there are several
            files and no index.
    """
    index = folder / INDEX
    if index.is_file():
        names = sorted({str(name) for name in _weight_map(index).values()})
        for name in names:
            if not (folder / name).is_file():
                raise CorruptCheckpointError(f"{index} lists {name}, which is missing")
        if (folder / UNLISTED).is_file() and UNLISTED not in names:
            names.append(UNLISTED)
        return [folder / name for name in names]
    files = sorted(folder.glob("*.safetensors"))
    if not files:
        raise CorruptCheckpointError(f"{folder} has no .safetensors file")
    if len(files) > 1:
        found = ", ".join(file.name for file in files[:3])
        raise CorruptCheckpointError(
            f"{index} is missing, but there are {len(files)} files of weights ({found})",
            f"download {INDEX} too, or move the files away that do not belong to this checkpoint",
        )
    return files


def list_tensors(folder: Path) -> dict[str, TensorInfo]:
    """Every tensor of a checkpoint by name, from the headers alone, in the order of files and then of bytes.

    Raises:
        CorruptCheckpointError: a file is missing, a header contradicts its file, or the index contradicts the files.
    """
    tensors: dict[str, TensorInfo] = {}
    for file in weight_files(folder):
        for name, info in _read_header(file).items():
            if name in tensors:
                raise CorruptCheckpointError(
                    f"{name} is stored twice, in {tensors[name].file.name} and {file}"
                )
            tensors[name] = info
    if (folder / INDEX).is_file():
        _check_index(folder / INDEX, tensors)
    return tensors


def computed_dtype(folder: Path) -> str | None:
    """The dtype in which vLLM computes with a checkpoint unless a flag sets another, as torch spells it.

    It is that of config.json; without one, that of the tensors if all floating-point ones agree, else None.
    """
    if dtype := text_config(read_config(folder)).get("dtype"):
        return str(dtype).removeprefix("torch.")
    floating = {info.dtype for info in list_tensors(folder).values()} & {"F16", "BF16", "F32"}
    return _TORCH_DTYPES[floating.pop()] if len(floating) == 1 else None


def find_output_head(names: Iterable[str]) -> list[str]:
    """Select the names of the output head's tensors: those of lm_head or, if it is tied, of the input embedding.

    A packed head has several tensors; a checkpoint that is no language model has none.
    """
    names = list(names)
    return [name for name in names if name.startswith("lm_head.")] or [
        name for name in names if name.endswith("embed_tokens.weight") and not name.startswith("mtp.")
    ]


def rewrite(
    source: Path,
    destination: Path,
    change: Callable[[str, TensorInfo], Mapping[str, NewTensor] | None],
    progress: Progress = silent,
) -> None:
    """Copy the shards of a checkpoint with some tensors changed; the shards keep their names.

    Tensors whose names begin with `UNLISTED_PREFIX` (the draft head) go to the file `UNLISTED`, wherever they were. The
    new index lists only the others.

    Args:
        source: folder of the checkpoint.
        destination: folder that gets the new shards and index.
        change: (name, stored tensor) -> the tensors to write instead (none to drop the tensor), or None to copy the
            tensor byte for byte.
        progress: receives (activity, done, total) in bytes of `source`.
    """
    stored = list_tensors(source)
    total = sum(info.end - info.start for info in stored.values())
    done, length = 0, 0
    weight_map: dict[str, str] = {}
    unlisted: dict[str, NewTensor] = {}
    for shard in sorted({info.file for info in stored.values()}):
        contents: dict[str, NewTensor] = {}
        for name, info in stored.items():
            if info.file == shard:
                changed = change(name, info)
                contents |= {name: info.unchanged()} if changed is None else changed
                done += info.end - info.start
        unlisted |= {name: contents.pop(name) for name in list(contents) if name.startswith(UNLISTED_PREFIX)}
        if contents:
            write_tensors(destination / shard.name, contents)
        weight_map |= dict.fromkeys(contents, shard.name)
        length += sum(tensor.bytes for tensor in contents.values())
        progress("writing tensors", done, total)
    if unlisted:
        write_tensors(destination / UNLISTED, unlisted)
    # Without an index, an engine reads every file of weights in the folder.
    if unlisted or (source / INDEX).is_file():
        index = {"metadata": {"total_size": length}, "weight_map": dict(sorted(weight_map.items()))}
        (destination / INDEX).write_text(json.dumps(index, indent=2) + "\n", encoding="utf-8")


def write_tensors(file: Path, contents: Mapping[str, NewTensor]) -> None:
    """Write one safetensors file, one tensor after the other, from the tensors by name.

    Raises:
        ValueError: a tensor yields another number of bytes than its shape needs.
    """
    # Wide dtypes first, as in safetensors' own writer: readers need each tensor aligned to its dtype.
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
                raise ValueError(f"{name} gave {stream.tell() - begin} bytes, its shape needs {tensor.bytes}")


def _read_header(file: Path) -> dict[str, TensorInfo]:
    length = file.stat().st_size
    refuse_pointer(file)
    if not length:
        raise CorruptCheckpointError(f"{file} is empty")
    with file.open("rb") as stream:
        prefix = stream.read(8)
        header_length = struct.unpack("<Q", prefix)[0] if len(prefix) == 8 else length
        if 8 + header_length > length:
            raise CorruptCheckpointError(
                f"{file} is cut short: its {length} bytes end before the end of its header"
            )
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
                raise ValueError(f"{name} has another position or length than its shape needs")
            position = info.end
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise CorruptCheckpointError(f"{file} has a broken header ({error})") from None
    if position != length:
        what = "is cut short" if length < position else "is too long"
        raise CorruptCheckpointError(f"{file} {what}: it has {length} bytes, its header needs {position}")
    return ordered


def _weight_map(index: Path) -> dict[str, Any]:
    weight_map = read_json_object(index).get("weight_map")
    if not isinstance(weight_map, dict) or not weight_map:
        raise CorruptCheckpointError(f"{index} has no weight_map")
    return weight_map


def _check_index(index: Path, tensors: Mapping[str, TensorInfo]) -> None:
    weight_map = _weight_map(index)
    stored = {
        name: info.file.name
        for name, info in tensors.items()
        if info.file.name != UNLISTED or not name.startswith(UNLISTED_PREFIX) or name in weight_map
    }
    for name in sorted(weight_map.keys() | stored.keys(), key=str):
        if weight_map.get(name) != stored.get(name):
            listed, actual = weight_map.get(name, "no file"), stored.get(name, "no file")
            raise CorruptCheckpointError(f"{index} says that {name} is in {listed}, but {actual} holds it")
