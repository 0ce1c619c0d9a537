"""The files of a checkpoint folder: manifest, hashes, checks, copies, and publishing by one rename."""

import contextlib
import errno
import hashlib
import json
import os
import re
import secrets
import shutil
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Literal

import numpy as np
import numpy.typing as npt
from pydantic import BaseModel, ConfigDict, ValidationError

from slimqwen.checkpoint.config import read_json_object
from slimqwen.checkpoint.errors import CorruptCheckpointError, MissingCheckpointError
from slimqwen.checkpoint.hashes import FileRecord as FileRecord
from slimqwen.checkpoint.hashes import hash_anew, keep_hashes, known_hashes, read_hashes
from slimqwen.checkpoint.hashes import sha256 as sha256
from slimqwen.checkpoint.promise import check_form, check_tensors
from slimqwen.checkpoint.stored_file import refuse_cut, refuse_pointer
from slimqwen.checkpoint.tensors import INDEX, weight_files
from slimqwen.errors import SlimqwenError
from slimqwen.file_lock import hold_lock, take_lock
from slimqwen.progress import Progress, silent

MANIFEST = "manifest.json"

CARD = "README.md"
"""The model card: not part of the manifest or the digest, and not copied by a stage to its output."""

CHECKSUMS = "SHA256SUMS"
"""Checksums of a published folder; not part of the manifest or the digest."""

VOCAB_MAP = "vocab_map.json"
"""The token ids that a pruned vocabulary kept; `slimqwen.recipe.stages.prune_vocab` describes the file."""

COMPILE_CACHE = ("compile_cache.tar.gz", "compile_cache.json")
"""A compile cache and its description: code for one kind of machine, never downloaded from a hub."""

_OWN_RESULTS = (
    *COMPILE_CACHE,
    "sampled_outputs.jsonl",
    "trim_draft_vocab.json",
    "redistill_mtp.json",
    "training.json",
)
"""Files that a stage or a training writes about its own output; later stages do not copy them to theirs."""

_WEIGHT_ENDINGS = (".safetensors", ".index.json")
"""Ends of the names of files with weights, and of their index."""

TEMPLATES = "additional_chat_templates"
"""The one folder of a checkpoint that a server reads: chat templates besides the default."""

_ADAPTER = "adapter_config.json"

_FOREIGN = re.compile(
    r"\.(bin|pt|pth|ckpt|pkl|npz|distcp|gguf|onnx|h5|msgpack)(\.index\.json)?$"  # optimizers, other formats
    r"|^(trainer_state|training_args|\w+_results)\.json$|^trainer_log\.jsonl$|^events\.out\.tfevents\.|\.log$"
    r"|^(latest|latest_checkpointed_iteration\.txt|zero_to_fp32\.py|nohup\.out)$|\.(bak|orig|tmp|swp)$|~$"
    r"|\.(png|jpe?g|gif|webp|svg|pdf|mp4)$"
)
"""Names of files that trainers and hubs leave beside a checkpoint, and that no server opens: logs, optimizer states,
other formats, copies of an editor, pictures of a model card. They are neither counted, hashed nor carried."""

_REQUIRED = ("tokenizer.json", "tokenizer_config.json")


class Manifest(BaseModel):
    """manifest.json: the files of a checkpoint and how they were made.

    Attributes:
        files: every file except the manifest and the model card, by its path in the folder.
        stage: name of the stage that made the checkpoint, or `download`.
        key: content key: SHA-256 over the ingredients, which names the checkpoint in the store; empty outside a store.
        recipe_key: SHA-256 over the base's digest, and stage, parameters and data of every stage up to this one; empty
            outside a store. Unlike `key`, it does not depend on the bytes that a stage made on this kind of CPU.
        ingredients: everything that decides the content, by dotted name.
        wall_seconds: duration of the stage.
        peak_memory_bytes: largest resident size of the stage's process.
        versions: versions of the tools, and properties of the machine.
        facts: results that the stage reported.
    """

    model_config = ConfigDict(extra="forbid", frozen=True)

    schema_version: Literal[1] = 1
    stage: str
    key: str = ""
    recipe_key: str = ""
    ingredients: dict[str, str] = {}
    files: dict[str, FileRecord]
    wall_seconds: float
    peak_memory_bytes: int
    versions: dict[str, str]
    facts: dict[str, str | int | float | bool | list[int] | list[float]] = {}

    @classmethod
    def read(cls, folder: Path) -> "Manifest":
        """Read the manifest of a folder.

        Raises:
            CorruptCheckpointError: the manifest is missing or does not follow the schema.
        """
        file = folder / MANIFEST
        try:
            return cls.model_validate_json(file.read_bytes())
        except FileNotFoundError:
            raise CorruptCheckpointError(
                f"{file} is missing, which lists the checkpoint's files with their SHA-256"
            ) from None
        except ValidationError as error:
            raise CorruptCheckpointError(
                f"{file} cannot be read as a checkpoint's manifest ({error.errors()[0]['msg']})"
            ) from None

    def write(self, folder: Path) -> None:
        """Write manifest.json into a folder."""
        text = json.dumps(self.model_dump(mode="json"), indent=2, sort_keys=True)
        (folder / MANIFEST).write_text(text + "\n", encoding="utf-8")


def check_folder(folder: Path, cure: str) -> None:
    """Check in milliseconds the files that a loader needs: config, headers, sizes, index and tokenizer files.

    Args:
        folder: folder of the checkpoint.
        cure: end of the error messages, such as "`slimqwen recipe run tiny-awq` makes it".

    Raises:
        MissingCheckpointError: the folder does not exist or is empty.
        CorruptCheckpointError: a file is missing, unreadable, too short, too long or not in the index; or only a part
            of the MTP head or draft head is there.
        UnsupportedFormatError: vLLM would not load the weights as they are stored.
    """
    if not folder.is_dir() or not any(folder.iterdir()):
        raise MissingCheckpointError(f"no checkpoint in {folder}; {cure}")
    if (folder / _ADAPTER).is_file() and not (folder / "config.json").is_file():
        raise CorruptCheckpointError(
            f"{folder} holds a LoRA adapter, not a checkpoint",
            "merge it into its base (merge_and_unload of peft, then save_pretrained with the tokenizer) and give that "
            "folder",
        )
    files = list_files(folder).values()
    for file in files:
        refuse_pointer(file)
    with _cure(cure):
        for file in files:
            refuse_cut(file)
        check_form(folder)
        for name in _REQUIRED:
            if not (folder / name).is_file():
                raise CorruptCheckpointError(f"{folder / name} is missing")


def verify(folder: Path, cure: str, progress: Progress = silent) -> Manifest:
    """Compare the hash of every file with the manifest, and every tensor with those that config.json promises.

    Reads the whole checkpoint.

    Args:
        folder: folder of the checkpoint.
        cure: end of the error messages, such as "`slimqwen recipe run tiny-awq` makes it".
        progress: receives (activity, done, total) in bytes.

    Returns:
        The manifest, which every file fits.

    Raises:
        MissingCheckpointError: the folder does not exist or is empty.
        CorruptCheckpointError: a file or tensor is missing, unexpected or different, or the manifest is missing.
        UnsupportedFormatError: vLLM would not load the weights as they are stored, or transformers has no such model
            class.
    """
    check_folder(folder, cure)
    with _cure(cure):
        manifest = Manifest.read(folder)
        # A stage of an earlier version may have carried what is no file of a checkpoint now.
        listed = {name: folder / name for name in manifest.files if (folder / name).is_file()}
        actual = hash_anew(folder, {**list_files(folder), **listed}, progress)
        for name in sorted(manifest.files.keys() | actual.keys()):
            if name not in actual:
                raise CorruptCheckpointError(f"{folder / name} is missing, but {MANIFEST} lists it")
            if name not in manifest.files:
                raise CorruptCheckpointError(
                    f"{folder / name} is not listed in {MANIFEST}",
                    "move that file away, or make the checkpoint anew",
                )
            if actual[name] != manifest.files[name]:
                raise CorruptCheckpointError(f"{folder / name} differs from {MANIFEST} in size or SHA-256")
        check_tensors(folder)
    return manifest


def digest(folder: Path, progress: Progress = silent) -> str:
    """The checkpoint digest: SHA-256 over the names and hashes of the files that decide what the checkpoint computes.

    The manifest, the model card and the compile cache (which differs from one bake to the next) are left out. Hashes
    are kept (`slimqwen.checkpoint.hashes`), so a file is read again only if it has changed.

    Args:
        folder: folder of the checkpoint.
        progress: receives (activity, done, total) in bytes where files are read.
    """
    files = {name: path for name, path in list_files(folder).items() if name not in COMPILE_CACHE}
    return _digest_of(known_hashes(folder, files, progress))


def recipe_key(folder: Path, present: str | None = None) -> str | None:
    """The recipe key (see `Manifest`) of a checkpoint that a recipe made; None for any other or a changed checkpoint.

    Args:
        folder: folder of the checkpoint.
        present: the checkpoint's digest if known; None to compute it.

    Raises:
        CorruptCheckpointError: the manifest cannot be read.
    """
    if not (folder / MANIFEST).is_file():
        return None
    manifest = Manifest.read(folder)
    if not manifest.recipe_key or (present or digest(folder)) != _digest_of(manifest.files):
        return None
    return manifest.recipe_key


def _digest_of(records: Mapping[str, FileRecord]) -> str:
    """The digest of a checkpoint with these files."""
    lines = (
        f"{record.sha256}  {name}\n" for name, record in sorted(records.items()) if name not in COMPILE_CACHE
    )
    return hashlib.sha256("".join(lines).encode()).hexdigest()


def file_records(folder: Path, progress: Progress = silent) -> dict[str, FileRecord]:
    """Hash every file of a checkpoint, each read whole: path in the folder -> hash and size."""
    return hash_anew(folder, list_files(folder), progress)


def keep_records(folder: Path, records: Mapping[str, FileRecord]) -> None:
    """Store the hashes of a checkpoint that was just downloaded and verified, so that it is not read again.

    Args:
        folder: folder of the checkpoint.
        records: path in the folder -> hash and size.
    """
    keep_hashes(folder, {name: folder / name for name in records}, records)


def tree_records(folder: Path, progress: Progress = silent) -> dict[str, FileRecord]:
    """Hash every file of any folder, such as a data set, except dot files: path in the folder -> hash and size."""
    files = {
        path.relative_to(folder).as_posix(): path for path in sorted(folder.rglob("*")) if path.is_file()
    }
    return read_hashes(
        {
            name: path
            for name, path in files.items()
            if not any(part.startswith(".") for part in Path(name).parts)
        },
        progress,
    )


def list_files(folder: Path) -> dict[str, Path]:
    """The files that decide what a checkpoint computes, by path in the folder: top-level files and chat templates.

    Subfolders are left out otherwise: earlier states of a training, its logs, other formats, caches of hub clients.
    """
    # Dot files belong to tools (a hub client keeps time stamps there), not to the checkpoint.
    shards: set[str] = set()
    with contextlib.suppress(CorruptCheckpointError):
        shards = {file.name for file in weight_files(folder)} if (folder / INDEX).is_file() else set()
    top = {
        path.name: path
        for path in (sorted(folder.iterdir()) if folder.is_dir() else ())
        if path.is_file()
        and path.name not in (MANIFEST, CARD, CHECKSUMS)
        and not path.name.startswith(".")
        and not _FOREIGN.search(path.name)
        and not (shards and path.suffix == ".safetensors" and path.name not in shards)
    }
    templates = sorted((folder / TEMPLATES).glob("[!.]*.jinja"))
    return {**top, **{f"{TEMPLATES}/{path.name}": path for path in templates if path.is_file()}}


def bytes_on_disk(folder: Path) -> int:
    """Total size of the checkpoint's files in bytes, without manifest and model card."""
    return sum(file.stat().st_size for file in list_files(folder).values())


def kept_token_ids(folder: Path) -> npt.NDArray[np.int64] | None:
    """The original token id of each row of a pruned vocabulary, int64 [rows]; None if it was not pruned.

    Raises:
        CorruptCheckpointError: vocab_map.json cannot be read.
    """
    file = folder / VOCAB_MAP
    if not file.is_file():
        return None
    try:
        return np.array(read_json_object(file)["new_to_old"], dtype=np.int64)
    except (KeyError, TypeError, ValueError):
        raise CorruptCheckpointError(
            f'{file} has no list "new_to_old" of token ids',
            "make the checkpoint anew with the stage prune_vocab",
        ) from None


def side_files(folder: Path) -> dict[str, Path]:
    """The files that a stage copies to its output if it changes neither tokens nor prompts, by path in the folder.

    These are tokenizer, templates, settings of generation and images, licences and code: all files but weights,
    config.json, manifest, model card, dot files and those that a stage wrote about its own output.
    """
    return {
        name: path
        for name, path in list_files(folder).items()
        if name != "config.json" and name not in _OWN_RESULTS and not name.endswith(_WEIGHT_ENDINGS)
    }


def carry_side_files(source: Path, destination: Path) -> None:
    """Copy the files that no stage changes (`side_files`: tokenizer, templates, licences) to another folder."""
    _copy(side_files(source), destination)


def carry_all(source: Path, destination: Path, leave_out: Sequence[str] = ()) -> None:
    """Copy a checkpoint's files to another folder, but not manifest, model card, dot files and names in `leave_out`."""
    _copy({name: path for name, path in list_files(source).items() if name not in leave_out}, destination)


def _copy(files: Mapping[str, Path], destination: Path) -> None:
    for name, path in files.items():
        (destination / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(path, destination / name)


@contextlib.contextmanager
def publish(destination: Path) -> Iterator[Path]:
    """Build a folder out of sight and make it visible as a whole.

    Yields an empty folder under `.staging` beside `destination`. When the `with` block ends, the folder is flushed to
    disk and renamed to `destination`; when the block raises, the folder is deleted. Folders that dead processes left
    under `.staging` are deleted first.

    Raises:
        SlimqwenError: `destination` exists already; this is found at the end of the block, and the built folder is
            deleted.
    """
    root = destination.parent / ".staging"
    root.mkdir(parents=True, exist_ok=True)
    _delete_stale(root)
    staging = root / f"{destination.name}.{secrets.token_hex(4)}"
    lock = _lock_of(staging)
    with hold_lock(lock):
        try:
            staging.mkdir()
            yield staging
            for path in (*staging.rglob("*"), staging):
                flush(path)
            if os.path.lexists(destination):
                raise SlimqwenError(f"{destination} exists already; delete it to make it anew")
            staging.rename(destination)
            flush(destination.parent)
        except BaseException:
            shutil.rmtree(staging, ignore_errors=True)
            raise
        finally:
            lock.unlink()


def withdraw(published: Path) -> None:
    """Delete a published folder, after a rename that hides it, so that a half-deleted folder is never visible."""
    root = published.parent / ".staging"
    root.mkdir(exist_ok=True)
    hidden = root / f"{published.name}.{secrets.token_hex(4)}"
    published.rename(hidden)
    shutil.rmtree(hidden)


def flush(path: Path) -> None:
    """Flush a file or folder to disk, so that a later rename never shows it empty."""
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    except OSError as error:
        # Some network file systems cannot flush a folder, only its files.
        if error.errno not in (errno.EINVAL, errno.EOPNOTSUPP):
            raise
    finally:
        os.close(handle)


@contextlib.contextmanager
def _cure(cure: str) -> Iterator[None]:
    """Append a cure to the message of a CorruptCheckpointError that the `with` block raises."""
    try:
        yield
    except CorruptCheckpointError as error:
        raise error.with_cure(cure) from error


def _lock_of(staging: Path) -> Path:
    """The file that a process locks while it fills the folder `staging`; NFS cannot lock folders."""
    return staging.with_name(f"{staging.name}.lock")


def _delete_stale(root: Path) -> None:
    for folder in (path for path in root.iterdir() if path.suffix != ".lock"):
        lock_file = _lock_of(folder)
        with contextlib.suppress(FileNotFoundError), lock_file.open("a+b") as lock:
            if take_lock(lock, lock_file):
                shutil.rmtree(folder, ignore_errors=True)
                lock_file.unlink()
