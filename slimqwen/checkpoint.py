"""A checkpoint folder: check it, stream its tensors, describe it by a manifest, publish it by one rename.

Nothing here holds a checkpoint in memory: headers are read alone, and tensors pass through in chunks. The file
format is safetensors (8 bytes of header length, a JSON header, then the tensors without a gap between them).
"""

import contextlib
import fcntl
import hashlib
import json
import math
import os
import secrets
import shutil
import struct
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, ValidationError

from slimqwen import progress
from slimqwen.errors import SlimqwenError

MANIFEST = "manifest.json"
SIDE_FILES = (
    "tokenizer.json",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "added_tokens.json",
    "vocab.json",
    "merges.txt",
    "chat_template.jinja",
    "generation_config.json",
    "preprocessor_config.json",
    "video_preprocessor_config.json",
    "processor_config.json",
    "vocab_map.json",
)
"""What lies beside config and tensors and goes on unchanged with a stage that alters neither tokens nor prompts."""

_NEEDED = ("tokenizer.json", "tokenizer_config.json")
_INDEX = "model.safetensors.index.json"
_CHUNK = 16 * 2**20
_BITS = {
    **dict.fromkeys(("F64", "I64", "U64"), 64),
    **dict.fromkeys(("F32", "I32", "U32"), 32),
    **dict.fromkeys(("F16", "BF16", "I16", "U16"), 16),
    **dict.fromkeys(("F8_E4M3", "F8_E5M2", "F8_E8M0", "I8", "U8", "BOOL"), 8),
}


CARD = "README.md"
"""What people read about a checkpoint: no part of it to its manifest, its digest, or a stage that goes on from it."""

COMPILE_CACHE = ("compile_cache.tar.gz", "compile_cache.json")
"""A compile cache beside a checkpoint and its manifest: code for one kind of machine, never to come from a hub."""


class MissingCheckpointError(SlimqwenError):
    """There is no checkpoint where one is needed."""


class CorruptCheckpointError(SlimqwenError):
    """A checkpoint whose files do not fit together, or are not what its manifest says."""


class AlreadyPublishedError(SlimqwenError):
    """The name to publish under is taken."""


@dataclass(frozen=True)
class NewTensor:
    """A tensor about to be written.

    Attributes:
        dtype: its safetensors name, such as BF16.
        shape: its dimensions.
        chunks: yields the little-endian bytes in order; called once, when the tensor's turn to be written comes.
    """

    dtype: str
    shape: tuple[int, ...]
    chunks: Callable[[], Iterable[bytes | memoryview]]

    @property
    def bytes(self) -> int:
        """Its size."""
        return math.prod(self.shape) * _BITS[self.dtype] // 8


@dataclass(frozen=True)
class TensorInfo:
    """Where a stored tensor lies: file[start:end] holds its bytes."""

    dtype: str
    shape: tuple[int, ...]
    file: Path
    start: int
    end: int

    @property
    def elements(self) -> int:
        """How many numbers it holds."""
        return math.prod(self.shape)

    def chunks(self, start: int = 0, end: int | None = None) -> Iterator[bytes]:
        """Yield bytes start to end of the tensor (all of them by default), at most 16 MiB at a time."""
        position, stop = self.start + start, self.end if end is None else self.start + end
        with self.file.open("rb") as stream:
            stream.seek(position)
            while position < stop:
                chunk = stream.read(min(_CHUNK, stop - position))
                if not chunk:
                    raise CorruptCheckpointError(f"{self.file} ends in the middle of a tensor")
                position += len(chunk)
                yield chunk

    def kept(self) -> NewTensor:
        """The same tensor, to be written byte for byte."""
        return NewTensor(self.dtype, self.shape, self.chunks)


class FileRecord(BaseModel):
    """One file of a checkpoint."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    sha256: str
    bytes: int


class Manifest(BaseModel):
    """manifest.json: which files a checkpoint has, and what made them.

    Attributes:
        files: every other file by its path in the folder, the card left out.
        stage: the name of what made the checkpoint.
        key: SHA-256 over the ingredients; names the checkpoint's place in a store. Empty outside a store.
        ingredients: all that decides the content, by dotted name.
        wall_seconds: how long the making took.
        peak_memory_bytes: the largest resident size of the process that made it.
        versions: of the tools, and what the machine was.
        facts: what the stage found out on its way.
    """

    model_config = ConfigDict(extra="forbid", frozen=True)

    schema_version: Literal[1] = 1
    stage: str
    key: str = ""
    ingredients: dict[str, str] = {}
    files: dict[str, FileRecord]
    wall_seconds: float
    peak_memory_bytes: int
    versions: dict[str, str]
    facts: dict[str, str | int | float | bool] = {}

    @classmethod
    def read(cls, folder: Path) -> "Manifest":
        """Read folder's manifest.

        Raises:
            CorruptCheckpointError: there is none, or it does not follow the schema.
        """
        file = folder / MANIFEST
        try:
            return cls.model_validate_json(file.read_bytes())
        except FileNotFoundError:
            raise CorruptCheckpointError(f"{file} is missing, so nothing says what {folder} holds") from None
        except ValidationError as error:
            raise CorruptCheckpointError(f"{file} is no manifest: {error.errors()[0]['msg']}") from None

    def write(self, folder: Path) -> None:
        """Write it into folder, last of all files there: `digest` trusts files older than their manifest."""
        text = json.dumps(self.model_dump(mode="json"), indent=2, sort_keys=True)
        (folder / MANIFEST).write_text(text + "\n", encoding="utf-8")


def check(folder: Path, cure: str) -> None:
    """Find in milliseconds what would make a loader fail: config, headers, sizes, index, tokenizer files.

    Args:
        folder: the checkpoint.
        cure: ends the error's line, e.g. "`make recipe VARIANT=tiny-awq` makes it".

    Raises:
        MissingCheckpointError: no such folder, or an empty one.
        CorruptCheckpointError: a file is missing, unreadable, cut short, too long or not in the index.
    """
    if not folder.is_dir() or not any(folder.iterdir()):
        raise MissingCheckpointError(f"no checkpoint in {folder}; {cure}")
    try:
        read_config(folder)
        tensors(folder)
        for name in _NEEDED:
            if not (folder / name).is_file():
                raise CorruptCheckpointError(f"{folder / name} is missing")
    except CorruptCheckpointError as error:
        raise CorruptCheckpointError(f"{error}; {cure}") from error


def read_config(folder: Path) -> dict[str, Any]:
    """config.json as it stands.

    Raises:
        CorruptCheckpointError: it is missing, no JSON object, or names no architecture.
    """
    config = _json_object(folder / "config.json")
    if not isinstance(config.get("architectures"), list) or not config["architectures"]:
        raise CorruptCheckpointError(f"{folder / 'config.json'} names no architecture")
    return config


def text_config(config: Mapping[str, Any]) -> Mapping[str, Any]:
    """The part of a config that describes the language model: all of it, unless the model sees images too."""
    part: Mapping[str, Any] = config.get("text_config", config)
    return part


def tensors(folder: Path) -> dict[str, TensorInfo]:
    """Every tensor of a checkpoint, from the headers alone, in the order of files and then of bytes.

    Raises:
        CorruptCheckpointError: a header does not fit its file, or the index does not fit the shards.
    """
    index = folder / _INDEX
    shards = sorted(folder.glob("*.safetensors"))
    if not shards:
        raise CorruptCheckpointError(f"{folder} has no .safetensors file")
    found: dict[str, TensorInfo] = {}
    for shard in shards:
        for name, info in _header(shard).items():
            if name in found:
                raise CorruptCheckpointError(f"{shard} holds {name} again, {found[name].file.name} has it")
            found[name] = info
    if index.is_file():
        listed = _json_object(index).get("weight_map")
        if not isinstance(listed, dict):
            raise CorruptCheckpointError(f"{index} has no weight_map")
        stored = {name: info.file.name for name, info in found.items()}
        for name in sorted(listed.keys() | stored.keys(), key=str):
            if listed.get(name) != stored.get(name):
                said, has = listed.get(name, "no file"), stored.get(name, "no file")
                raise CorruptCheckpointError(f"{index} says that {name} is in {said}, but {has} holds it")
    elif len(shards) > 1:
        raise CorruptCheckpointError(f"{index} is missing, yet there are {len(shards)} shards")
    return found


def rewrite(
    source: Path,
    destination: Path,
    change: Callable[[str, TensorInfo], Mapping[str, NewTensor] | None],
    report: progress.Progress = progress.silent,
) -> None:
    """Write source's shards anew into destination, keeping their names and, where there is one, the index.

    Args:
        source: a checkpoint folder.
        destination: an existing folder.
        change: given a tensor's name and place, says what is written instead of it (an empty mapping drops it),
            or None to keep it byte for byte.
        report: hears the bytes of source that are done.
    """
    stored = tensors(source)
    total = sum(info.end - info.start for info in stored.values())
    done, length = 0, 0
    written: dict[str, str] = {}
    for shard in sorted({info.file for info in stored.values()}):
        contents: dict[str, NewTensor] = {}
        for name, info in stored.items():
            if info.file == shard:
                changed = change(name, info)
                contents |= {name: info.kept()} if changed is None else changed
                done += info.end - info.start
        if contents:
            write_tensors(destination / shard.name, contents)
        written |= dict.fromkeys(contents, shard.name)
        length += sum(tensor.bytes for tensor in contents.values())
        report("writing tensors", done, total)
    if (source / _INDEX).is_file():
        index = {"metadata": {"total_size": length}, "weight_map": dict(sorted(written.items()))}
        (destination / _INDEX).write_text(json.dumps(index, indent=2) + "\n", encoding="utf-8")


def write_tensors(file: Path, contents: Mapping[str, NewTensor]) -> None:
    """Write one safetensors file, streaming each tensor in its turn."""
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


def carry_side_files(source: Path, destination: Path) -> None:
    """Copy tokenizer, chat template, generation and image settings, those of SIDE_FILES that source has."""
    for name in SIDE_FILES:
        if (source / name).is_file():
            shutil.copyfile(source / name, destination / name)


def carry_all(source: Path, destination: Path, leave_out: Sequence[str] = ()) -> None:
    """Copy every file but the manifest, the card, those of the names left out, and those of tools (dot files)."""
    for file in source.iterdir():
        if file.is_file() and file.name not in (MANIFEST, CARD, *leave_out) and not file.name.startswith("."):
            shutil.copyfile(file, destination / file.name)


def write_config(folder: Path, config: Mapping[str, Any]) -> None:
    """Write config.json, its keys in the order given."""
    (folder / "config.json").write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")


def bytes_on_disk(folder: Path) -> int:
    """Bytes of all files of a checkpoint."""
    return sum(file.stat().st_size for file in _files(folder).values())


def sha256(file: Path) -> str:
    """SHA-256 of one file, hexadecimal."""
    with file.open("rb") as stream:
        return hashlib.file_digest(stream, "sha256").hexdigest()


def file_records(folder: Path, report: progress.Progress = progress.silent) -> dict[str, FileRecord]:
    """Hash every file but the manifest; the result is what a Manifest lists."""
    return _hashed(_files(folder), {}, report)


def digest(folder: Path, report: progress.Progress = progress.silent) -> str:
    """One SHA-256 that identifies what a checkpoint computes: over the names and hashes of its files.

    Left out are the manifest, the card, and the compile cache, which differs from one baking of the same weights to
    the next. A hash is taken from the manifest where the file is older than it and as long as it says; any other file
    is hashed anew, so the answer is the same with a manifest and without, and a file changed since is noticed.
    """
    files = {name: path for name, path in _files(folder).items() if name not in COMPILE_CACHE}
    known = {}
    if (folder / MANIFEST).is_file():
        # The clock of file times has coarse ticks: a file of the manifest's own tick may be the younger one.
        made = (folder / MANIFEST).stat().st_mtime_ns
        for name, record in Manifest.read(folder).files.items():
            stat = files[name].stat() if name in files else None
            if stat and stat.st_mtime_ns < made and stat.st_size == record.bytes:
                known[name] = record
    records = _hashed(files, known, report)
    lines = (f"{record.sha256}  {name}\n" for name, record in sorted(records.items()))
    return hashlib.sha256("".join(lines).encode()).hexdigest()


def verify(folder: Path, cure: str, report: progress.Progress = progress.silent) -> Manifest:
    """Hash every file against the manifest, and hold every tensor against what the config promises.

    Returns:
        the manifest.

    Raises:
        MissingCheckpointError: as `check`.
        CorruptCheckpointError: as `check`; a file differs from the manifest, is missing from it or from the
            folder; a tensor is missing, unknown to the config, or has another shape or dtype.
    """
    check(folder, cure)
    try:
        manifest = Manifest.read(folder)
        actual = file_records(folder, report)
        for name in sorted(manifest.files.keys() | actual.keys()):
            if name not in actual:
                raise CorruptCheckpointError(f"{folder / name} is missing, {MANIFEST} lists it")
            if name not in manifest.files:
                raise CorruptCheckpointError(f"{folder / name} is not listed in {MANIFEST}")
            if actual[name] != manifest.files[name]:
                raise CorruptCheckpointError(f"{folder / name} is not the file that {MANIFEST} describes")
        _check_against_config(folder)
    except CorruptCheckpointError as error:
        raise CorruptCheckpointError(f"{error}; {cure}") from error
    return manifest


@contextlib.contextmanager
def publish(destination: Path) -> Iterator[Path]:
    """Build a folder out of sight and make it visible as a whole.

    Yields an empty folder under `.staging` beside destination. When the block ends, its files are flushed to disk
    and it becomes destination by one rename; when the block raises, it is deleted. What processes that died left
    under `.staging` is deleted first.

    Raises:
        AlreadyPublishedError: destination is there already.
    """
    root = destination.parent / ".staging"
    root.mkdir(parents=True, exist_ok=True)
    _delete_stale(root)
    staging, lock = _locked_folder(root, destination.name)
    try:
        yield staging
        for path in (*staging.rglob("*"), staging):
            flush(path)
        if os.path.lexists(destination):
            raise AlreadyPublishedError(f"{destination} is there already; delete it to make it anew")
        staging.rename(destination)
        flush(destination.parent)
    except BaseException:
        shutil.rmtree(staging, ignore_errors=True)
        raise
    finally:
        os.close(lock)


def withdraw(published: Path) -> None:
    """Delete what `publish` made, hidden by one rename first, so that no half of it is ever visible."""
    root = published.parent / ".staging"
    root.mkdir(exist_ok=True)
    hidden = root / f"{published.name}.{secrets.token_hex(4)}"
    published.rename(hidden)
    shutil.rmtree(hidden)


def flush(path: Path) -> None:
    """Have the system write a file or folder to disk, so that a rename after this never shows it empty."""
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def _locked_folder(root: Path, name: str) -> tuple[Path, int]:
    while True:
        folder = root / f"{name}.{secrets.token_hex(4)}"
        folder.mkdir()
        lock = os.open(folder, os.O_RDONLY)
        fcntl.flock(lock, fcntl.LOCK_EX)
        # Another process may have taken the folder for a dead one's before the lock was ours.
        if folder.exists():
            return folder, lock
        os.close(lock)


def _delete_stale(root: Path) -> None:
    for folder in root.iterdir():
        with contextlib.suppress(FileNotFoundError):
            lock = os.open(folder, os.O_RDONLY)
            try:
                # The kernel drops a lock with the last process that holds it, however that process ended.
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                shutil.rmtree(folder, ignore_errors=True)
            except BlockingIOError:
                pass
            finally:
                os.close(lock)


def _files(folder: Path) -> dict[str, Path]:
    # Dot files belong to tools (a hub client keeps time stamps there), not to the checkpoint.
    return {
        relative.as_posix(): path
        for path in sorted(folder.rglob("*"))
        if path.is_file()
        and (relative := path.relative_to(folder)) not in (Path(MANIFEST), Path(CARD))
        and not any(part.startswith(".") for part in relative.parts)
    }


def _hashed(
    files: Mapping[str, Path], known: Mapping[str, FileRecord], report: progress.Progress
) -> dict[str, FileRecord]:
    records = dict(known)
    todo = {name: path for name, path in files.items() if name not in known}
    total = sum(path.stat().st_size for path in todo.values())
    done = 0
    for name, path in todo.items():
        length = path.stat().st_size
        records[name] = FileRecord(sha256=sha256(path), bytes=length)
        done += length
        report("hashing", done, total)
    return records


def _json_object(file: Path) -> dict[str, Any]:
    try:
        content = json.loads(file.read_bytes())
    except FileNotFoundError:
        raise CorruptCheckpointError(f"{file} is missing") from None
    except ValueError as error:
        raise CorruptCheckpointError(f"{file} is not JSON ({error})") from None
    if not isinstance(content, dict):
        raise CorruptCheckpointError(f"{file} is not a JSON object")
    return content


def _header(file: Path) -> dict[str, TensorInfo]:
    length = file.stat().st_size
    with file.open("rb") as stream:
        prefix = stream.read(8)
        header_length = struct.unpack("<Q", prefix)[0] if len(prefix) == 8 else length
        if 8 + header_length > length:
            raise CorruptCheckpointError(f"{file} is cut short: {length} bytes do not hold its header")
        raw = stream.read(header_length)
    try:
        entries = json.loads(raw)
        entries.pop("__metadata__", None)
        placed = {
            name: TensorInfo(
                entry["dtype"],
                tuple(int(dimension) for dimension in entry["shape"]),
                file,
                *(8 + header_length + int(offset) for offset in entry["data_offsets"]),
            )
            for name, entry in entries.items()
        }
        ordered = dict(sorted(placed.items(), key=lambda item: (item[1].start, item[1].end)))
        position = 8 + header_length
        for name, info in ordered.items():
            bits = math.prod(info.shape) * _BITS[info.dtype]
            if info.start != position or (info.end - info.start) * 8 != bits:
                raise ValueError(f"{name} is not where or not as long as it should be")
            position = info.end
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise CorruptCheckpointError(f"{file} has a broken header ({error})") from None
    if position != length:
        what = "is cut short" if length < position else "has bytes too many"
        raise CorruptCheckpointError(f"{file} {what}: {length} bytes, its header needs {position}")
    return ordered


def _check_against_config(folder: Path) -> None:
    promised = _promised_tensors(folder)
    stored = tensors(folder)
    for name, (shape, dtypes) in promised.items():
        if name not in stored:
            raise CorruptCheckpointError(f"{folder} lacks the tensor {name}, its config.json promises it")
        if stored[name].shape != shape:
            is_shape = list(stored[name].shape)
            raise CorruptCheckpointError(f"{folder}: {name} has shape {is_shape}, config.json {list(shape)}")
        if stored[name].dtype not in dtypes:
            raise CorruptCheckpointError(
                f"{folder}: {name} is {stored[name].dtype}, config.json says {' or '.join(dtypes)}"
            )
    for name in stored:
        if name not in promised:
            raise CorruptCheckpointError(f"{folder} holds the tensor {name}, its config.json knows none such")


def _promised_tensors(folder: Path) -> dict[str, tuple[tuple[int, ...], tuple[str, ...]]]:
    """Name -> shape and allowed dtypes, from the model class that config.json names, built without memory."""
    # Heavy: only verification pays for these imports.
    import torch
    import transformers
    from compressed_tensors.utils import is_match

    raw = read_config(folder)
    architecture = raw["architectures"][0]
    if not hasattr(transformers, architecture):
        raise CorruptCheckpointError(f"{folder / 'config.json'}: transformers has no {architecture}")
    settings = transformers.AutoConfig.from_pretrained(folder)
    quantization = raw.get("quantization_config", {})
    # The class is built unquantised; what quantisation makes of its linears is worked out below.
    settings.__dict__.pop("quantization_config", None)
    with torch.device("meta"):
        model = getattr(transformers, architecture)(settings)
    text = text_config(raw)
    declared = text.get("dtype") or text.get("torch_dtype") or raw.get("dtype") or "float32"
    floating = tuple(dict.fromkeys(({"bfloat16": "BF16", "float16": "F16"}.get(declared, "F32"), "F32")))
    shapes = {name: tuple(tensor.shape) for name, tensor in model.state_dict().items()}
    if raw.get("tie_word_embeddings", text.get("tie_word_embeddings", False)):
        shapes.pop("lm_head.weight", None)
    shapes |= _promised_mtp(text, shapes)
    promised = {name: (shape, floating) for name, shape in shapes.items()}
    for group in quantization.get("config_groups", {}).values():
        weights = group["weights"]
        for name, module in model.named_modules():
            if f"{name}.weight" in promised and any(
                is_match(name, module, target, quantization.get("ignore", [])) for target in group["targets"]
            ):
                promised |= _promised_packed(name, promised.pop(f"{name}.weight")[0], weights, floating)
    return promised


def _promised_mtp(
    text: Mapping[str, Any], shapes: Mapping[str, tuple[int, ...]]
) -> dict[str, tuple[int, ...]]:
    count, hidden = text.get("mtp_num_hidden_layers", 0), text["hidden_size"]
    if not count:
        return {}
    # An MTP layer is a full-attention layer like those of the model: it has their shapes.
    like = f"layers.{text['layer_types'].index('full_attention')}."
    layer = {name.split(like)[1]: shape for name, shape in shapes.items() if like in name}
    norms = ("norm", "pre_fc_norm_hidden", "pre_fc_norm_embedding")
    return {
        "mtp.fc.weight": (hidden, 2 * hidden),
        **{f"mtp.{norm}.weight": (hidden,) for norm in norms},
        **{f"mtp.layers.{i}.{name}": shape for i in range(count) for name, shape in layer.items()},
    }


def _promised_packed(
    module: str, shape: tuple[int, ...], weights: Mapping[str, Any], floating: tuple[str, ...]
) -> dict[str, tuple[tuple[int, ...], tuple[str, ...]]]:
    rows, columns = shape
    groups = columns // weights["group_size"]
    per_word = 32 // weights["num_bits"]
    packed = {
        f"{module}.weight_packed": ((rows, columns // per_word), ("I32",)),
        f"{module}.weight_scale": ((rows, groups), floating),
        f"{module}.weight_shape": ((2,), ("I64",)),
    }
    if not weights["symmetric"]:
        packed[f"{module}.weight_zero_point"] = ((math.ceil(rows / per_word), groups), ("I32",))
    return packed
