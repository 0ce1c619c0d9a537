"""Hashes of files, stored so that a file is read again only when it may have changed.

A hash is kept with the size, the times of change and the inode of its file. The time of modification alone hides a
replacement by `cp -p`, `rsync -a` or `tar`, which restore it; nothing restores st_ctime. After chmod, a copy or a move
to another file system the key differs, and the file is read once more. Hashes are kept in the folder that they are
about; if it is read-only, in the user's cache; if that is too, in this process.
"""

import contextlib
import hashlib
import json
import os
import secrets
import time
from collections.abc import Mapping
from pathlib import Path
from typing import NamedTuple

from pydantic import BaseModel, ConfigDict

from slimqwen.progress import Progress
from slimqwen.workspace import installation_root, is_checkout

_FILE = ".hashes.json"
_CHUNK_BYTES = 16 * 2**20
_TICK_SECONDS = 0.02
"""Two changes of a file within this time may get the same st_ctime: kernels stamp files at most every 10 ms."""


class FileRecord(BaseModel):
    """Hash and size of one file of a checkpoint: SHA-256 in hexadecimal, and bytes."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    sha256: str
    bytes: int


class _Key(NamedTuple):
    """What changes with the content of a file: size in bytes, st_mtime_ns, st_ctime_ns and st_ino."""

    size: int
    modified: int
    changed: int
    inode: int

    @classmethod
    def of(cls, file: Path) -> "_Key":
        stat = file.stat()
        return cls(stat.st_size, stat.st_mtime_ns, stat.st_ctime_ns, stat.st_ino)


_of_this_process: dict[_Key, str] = {}


def sha256(file: Path) -> str:
    """SHA-256 of one file, hexadecimal."""
    with file.open("rb") as stream:
        return hashlib.file_digest(stream, "sha256").hexdigest()


def read_hashes(files: Mapping[str, Path], progress: Progress) -> dict[str, FileRecord]:
    """Hash files, each read whole.

    Args:
        files: name -> path.
        progress: receives (activity, done, total) in bytes, at least every 16 MiB.

    Returns:
        Name -> hash and size.
    """
    records: dict[str, FileRecord] = {}
    total, done = sum(path.stat().st_size for path in files.values()), 0
    for name, path in files.items():
        hashed, length = hashlib.sha256(), 0
        with path.open("rb") as stream:
            while chunk := stream.read(_CHUNK_BYTES):
                hashed.update(chunk)
                length += len(chunk)
                progress("hashing", done + length, total)
        done += length
        records[name] = FileRecord(sha256=hashed.hexdigest(), bytes=length)
    return records


def hash_anew(folder: Path, files: Mapping[str, Path], progress: Progress) -> dict[str, FileRecord]:
    """Hash the files of a folder without using stored hashes, and store the new ones.

    Args:
        folder: folder of the files, which may be read-only.
        files: name -> path.
        progress: receives (activity, done, total) in bytes.

    Returns:
        Name -> hash and size.
    """
    keys = _settled_keys(files)
    records = read_hashes(files, progress)
    _keep(folder, files, keys, records)
    return records


def known_hashes(folder: Path, files: Mapping[str, Path], progress: Progress) -> dict[str, FileRecord]:
    """The hashes of the files of a folder; a file is read only if no stored hash fits it.

    Args:
        folder: folder of the files, which may be read-only.
        files: name -> path.
        progress: receives (activity, done, total) in bytes where files are read.

    Returns:
        Name -> hash and size.
    """
    keys, kept = _settled_keys(files), _read_kept(folder)
    records = {
        name: FileRecord(sha256=digest, bytes=key.size)
        for name, key in keys.items()
        if (digest := kept.get(key) or _of_this_process.get(key))
    }
    missing = {name: path for name, path in files.items() if name not in records}
    if missing:
        records |= read_hashes(missing, progress)
        _keep(folder, files, keys, records)
    return records


def keep_hashes(folder: Path, files: Mapping[str, Path], records: Mapping[str, FileRecord]) -> None:
    """Store hashes that were just computed, so that `known_hashes` does not read the files again.

    Args:
        folder: folder of the files.
        files: name -> path.
        records: name -> hash and size.
    """
    _keep(folder, files, _settled_keys(files), records)


def _settled_keys(files: Mapping[str, Path]) -> dict[str, _Key]:
    """The keys of files by name, so late after the last change that a later one shows in st_ctime."""
    keys = {name: _Key.of(path) for name, path in files.items()}
    if 0 <= time.time() - max((key.changed for key in keys.values()), default=0) / 1e9 < _TICK_SECONDS:
        time.sleep(_TICK_SECONDS)
        keys = {name: _Key.of(path) for name, path in files.items()}
    return keys


def _keep(
    folder: Path, files: Mapping[str, Path], keys: Mapping[str, _Key], records: Mapping[str, FileRecord]
) -> None:
    # A file that was written while it was read has no hash to keep.
    kept = {name: [*key, records[name].sha256] for name, key in keys.items() if _Key.of(files[name]) == key}
    _of_this_process.update({keys[name]: records[name].sha256 for name in kept})
    content = json.dumps(kept, indent=1)
    is_installed = not is_checkout() and folder.resolve().is_relative_to(installation_root())
    for place in (*(() if is_installed else (folder / _FILE,)), _in_users_cache(folder)):
        staged = place.with_name(f"{place.name}.{secrets.token_hex(4)}")
        try:
            if place.parent != folder:
                place.parent.mkdir(parents=True, exist_ok=True)
            staged.write_text(content, encoding="utf-8")
            staged.replace(place)
            return
        except OSError:  # read-only or full
            with contextlib.suppress(OSError):
                staged.unlink(missing_ok=True)


def _in_users_cache(folder: Path) -> Path:
    caches = Path(os.environ.get("XDG_CACHE_HOME") or f"{os.environ.get('HOME') or '/nonexistent'}/.cache")
    name = hashlib.sha256(str(folder.resolve()).encode()).hexdigest()[:32]
    return caches / "slimqwen" / "hashes" / f"{name}.json"


def _read_kept(folder: Path) -> dict[_Key, str]:
    kept: dict[_Key, str] = {}
    for place in (folder / _FILE, _in_users_cache(folder)):
        with contextlib.suppress(OSError, ValueError, TypeError, AttributeError):
            kept |= {
                _Key(*map(int, key)): str(digest) for *key, digest in json.loads(place.read_bytes()).values()
            }
    return kept
