"""The model hub: get the checkpoint that a variant is a copy of, at one commit, resumable and verified.

What was fetched so far waits in weights/.download-<name>/<commit>/, where the next run goes on; it becomes
weights/<name> by one rename, after every file was found to be the one that the hub lists.
"""

import contextlib
import fcntl
import fnmatch
import hashlib
import importlib.metadata
import io
import os
import re
import resource
import shutil
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from slimqwen import checkpoint, progress
from slimqwen.checkpoint import FileRecord, Manifest
from slimqwen.errors import SlimqwenError
from slimqwen.variant import Setting, Variant, making_command

# Pickles, other engines' formats and pictures are what a server never opens.
_WANTED = ("*.safetensors", "*.json", "*.jinja", "*.txt", "*.model", "*.tiktoken")
_STAGE = "download"


class NotACopyError(SlimqwenError):
    """The variant's weights are not a copy of a hub repository."""


class HubError(SlimqwenError):
    """The hub cannot be reached, refuses, or lists no checkpoint."""


class DownloadError(SlimqwenError):
    """What lies or would have to lie under weights/ forbids the download, or is not what the hub lists."""


@dataclass(frozen=True)
class Copy:
    """A hub repository's checkpoint under weights/.

    Attributes:
        source: the SOURCE line it follows.
        revision: the commit, 40 hexadecimal digits.
        pinned: whether the config.env of that line names the commit.
        folder: weights/<variant that says SOURCE>.
        manifest: of that folder.
        fetched: False where it was there already.
    """

    source: Setting
    revision: str
    pinned: bool
    folder: Path
    manifest: Manifest
    fetched: bool


@dataclass(frozen=True)
class _Listed:
    """A file as the hub lists it: sha256 where it is stored with LFS, git's blob SHA-1 otherwise."""

    name: str
    bytes: int
    sha256: str | None
    blob: str | None

    def is_stored(self, file: Path, record: FileRecord) -> bool:
        if self.sha256 is None:
            return git_blob(file.read_bytes()) == self.blob
        return record == FileRecord(sha256=self.sha256, bytes=self.bytes)


@dataclass(frozen=True)
class _Order:
    """What to get, whence and whither."""

    source: Setting
    revision: Setting | None
    target: Path
    endpoint: str

    @property
    def repository(self) -> str:
        return self.source.value

    @property
    def command(self) -> str:
        return f"`make download VARIANT={self.target.name}`"

    @property
    def staging(self) -> Path:
        return self.target.parent / f".download-{self.target.name}"

    @property
    def shown(self) -> str:
        return f"weights/{self.target.name}"


def download(one: Variant, report: progress.Progress = progress.silent, endpoint: str | None = None) -> Copy:
    """Get the checkpoint that a variant, or the one it inherits SOURCE from, is a copy of.

    A copy that is there already is looked at in milliseconds, without asking the hub. The environment's HF_TOKEN
    opens repositories that are not public.

    Args:
        one: the variant; REVISION beside its SOURCE says which commit, else it is the newest one of main, or the
            one that an interrupted download had begun with.
        report: hears the bytes that are here, and those that are hashed.
        endpoint: the hub's address; HF_ENDPOINT or huggingface.co by default.

    Raises:
        NotACopyError: no SOURCE.
        HubError: offline mode, no network, no such repository or commit, no right to read it, no checkpoint in it.
        DownloadError: the target is taken or was changed, the disk is too small, another process is at it, or
            files are not as listed (those are deleted).
        CorruptCheckpointError: the files are as listed and yet no checkpoint.
    """
    # Imported late: it takes longer than the rest of a run that finds everything in place.
    from huggingface_hub import constants

    source = one.settings.get("SOURCE")
    if source is None:
        raise NotACopyError(
            f"{one.name} is no copy of a hub repository (its config.env has no SOURCE, nor has one it inherits); "
            f"{making_command(one.weights, one.root)}"
        )
    order = _Order(
        source=source,
        revision=one.settings.get("REVISION"),
        target=one.root / "weights" / source.file.parent.name,
        endpoint=(endpoint or constants.ENDPOINT).rstrip("/"),
    )
    if os.path.lexists(order.target):
        return _present(order)
    started = time.monotonic()
    revision, files = _listing(order)
    with _staging(order, revision) as folder:
        _fetch(order, revision, files, folder, report)
        records = checkpoint.file_records(folder, report)
        _hold_against_listing(order, revision, files, folder, records)
        checkpoint.check(
            folder,
            f"its files are as {order.repository} has them at {revision}, so name another in {source.place}",
        )
        manifest = Manifest(
            stage=_STAGE,
            files=records,
            wall_seconds=time.monotonic() - started,
            peak_memory_bytes=resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024,
            versions={"huggingface_hub": importlib.metadata.version("huggingface_hub")},
            facts={"repository": order.repository, "revision": revision},
        )
        manifest.write(folder)
        checkpoint.flush(folder / checkpoint.MANIFEST)
        checkpoint.flush(folder)
        folder.rename(order.target)
        checkpoint.flush(order.target.parent)
    return Copy(source, revision, order.revision is not None, order.target, manifest, fetched=True)


def _present(order: _Order) -> Copy:
    """The copy that is there already, if it is the one that is asked for and nothing changed it since."""
    anew = f"delete {order.shown} and run {order.command}"
    if not (order.target / checkpoint.MANIFEST).is_file():
        raise DownloadError(
            f"{order.shown} is there and was not downloaded by this command (it has no {checkpoint.MANIFEST}); "
            f"move it away and run {order.command}"
        )
    manifest = Manifest.read(order.target)
    repository, revision = (str(manifest.facts.get(fact, "")) for fact in ("repository", "revision"))
    if manifest.stage != _STAGE or repository != order.repository:
        what = f"of {repository}" if manifest.stage == _STAGE else f"made by the stage {manifest.stage}"
        raise DownloadError(
            f"{order.shown} is {what}, {order.source.place} says SOURCE={order.repository}; "
            f"move it away and run {order.command}"
        )
    if order.revision is not None and order.revision.value != revision:
        raise DownloadError(
            f"{order.shown} is {repository} at {revision}, {order.revision.place} says "
            f"REVISION={order.revision.value}; {anew}"
        )
    made = (order.target / checkpoint.MANIFEST).stat().st_mtime_ns
    for name, record in manifest.files.items():
        file = order.target / name
        stat = file.stat() if file.is_file() else None
        # Only a file younger than the manifest can have changed without its length.
        if (
            stat is None
            or stat.st_size != record.bytes
            or (stat.st_mtime_ns >= made and checkpoint.sha256(file) != record.sha256)
        ):
            raise DownloadError(f"{order.shown}/{name} is no longer the file that was downloaded; {anew}")
    checkpoint.check(order.target, anew)
    return Copy(order.source, revision, order.revision is not None, order.target, manifest, fetched=False)


def _listing(order: _Order) -> tuple[str, list[_Listed]]:
    """The commit and its files, from one answer of the hub, so that they belong together."""
    import httpx
    from huggingface_hub import HfApi, is_offline_mode

    if is_offline_mode():
        names = ("HF_HUB_OFFLINE", "TRANSFORMERS_OFFLINE")
        name = next((name for name in names if os.environ.get(name)), names[0])
        raise HubError(
            f"{name} is set in the environment, which forbids asking the hub; "
            f"`unset {name}` and run {order.command}"
        )
    wish = order.revision.value if order.revision else _begun(order)
    try:
        with _told_in_one_line(order, wish):
            info = HfApi(endpoint=order.endpoint).model_info(
                order.repository,
                revision=wish,
                files_metadata=True,
                # Every address of a name is tried in turn: a network that swallows packets costs a multiple.
                timeout=httpx.Timeout(15, connect=4),
            )
        revision = str(info.sha)
        if not re.fullmatch("[0-9a-f]{40}", revision) or (wish and revision != wish):
            raise ValueError(f"it lists commit {revision}, asked for {wish or 'main'}")
        files = [
            _Listed(
                name=file.rfilename,
                bytes=int(file.size),
                sha256=file.lfs.sha256 if file.lfs else None,
                blob=file.blob_id,
            )
            for file in info.siblings
            if _is_wanted(file.rfilename)
        ]
    except (ValueError, KeyError, TypeError) as error:
        raise HubError(
            f"{order.endpoint} does not answer as a model hub does ({one_line(error)}); "
            "check HF_ENDPOINT and HTTPS_PROXY"
        ) from error
    if not any(file.name.endswith(".safetensors") for file in files):
        raise HubError(
            f"{order.repository} has no .safetensors file at {revision}; correct SOURCE in {order.source.place}"
        )
    return revision, sorted(files, key=lambda file: (file.bytes, file.name))


def _is_wanted(name: str) -> bool:
    # What lies in folders of a repository is its other formats; a name with a slash could also lead elsewhere.
    return (
        not name.startswith(".")
        and "/" not in name
        and name not in (checkpoint.MANIFEST, *checkpoint.COMPILE_CACHE)
        and any(fnmatch.fnmatch(name, pattern) for pattern in _WANTED)
    )


def _begun(order: _Order) -> str | None:
    """The commit that an interrupted download was at: main may have moved since."""
    begun = [path.name for path in order.staging.glob("*") if re.fullmatch("[0-9a-f]{40}", path.name)]
    return begun[0] if len(begun) == 1 else None


@contextlib.contextmanager
def _staging(order: _Order, revision: str) -> Iterator[Path]:
    """The folder of what is fetched already; nobody else's while this lasts, kept unless it became the target."""
    order.staging.mkdir(parents=True, exist_ok=True)
    lock = os.open(order.staging, os.O_RDONLY)
    try:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            # Another process may have published between the open and the lock.
            alone = order.staging.exists() and not os.path.lexists(order.target)
        except BlockingIOError:
            alone = False
        if not alone:
            raise DownloadError(f"another process is downloading {order.shown}; wait for its end")
        folder = order.staging / revision
        for other in order.staging.iterdir():
            if other != folder:
                shutil.rmtree(other, ignore_errors=True)
        folder.mkdir(exist_ok=True)
        yield folder
        shutil.rmtree(order.staging, ignore_errors=True)
    finally:
        os.close(lock)


def _fetch(
    order: _Order, revision: str, files: list[_Listed], folder: Path, report: progress.Progress
) -> None:
    """Bring every file to its listed length, each from where the last run left it."""
    from huggingface_hub import hf_hub_url
    from huggingface_hub.file_download import http_get
    from huggingface_hub.utils import build_hf_headers
    from huggingface_hub.utils.tqdm import silent_tqdm

    total = sum(file.bytes for file in files)
    here = {file.name: _length(folder / file.name) for file in files}
    for file in files:
        if here[file.name] > file.bytes:
            (folder / file.name).unlink()
            here[file.name] = 0
    missing, free = total - sum(here.values()), shutil.disk_usage(folder).free
    if missing > free:
        raise DownloadError(
            f"{order.repository} needs {missing / 1e9:.2f} GB more under weights/, {free / 1e9:.2f} GB are free; "
            f"free {(missing - free) / 1e9:.2f} GB and run {order.command}"
        )
    activity = f"downloading {order.repository}"
    report(activity, sum(here.values()), total)
    for file in files:
        if here[file.name] == file.bytes > 0:
            continue
        others = sum(length for name, length in here.items() if name != file.name)

        def tell(position: int, others: int = others) -> None:
            report(activity, others + position, total)

        # Not hf_hub_download: it throws a half file away when its process ends.
        with (
            _told_in_one_line(order, revision),
            _ToldFile(folder / file.name, tell) as stream,
        ):
            http_get(
                hf_hub_url(order.repository, file.name, revision=revision, endpoint=order.endpoint),
                stream,
                resume_size=here[file.name],
                headers=build_hf_headers(headers={"Accept-Encoding": "identity"}),
                expected_size=file.bytes,
                displayed_filename=file.name,
                tqdm_class=silent_tqdm,
            )
            stream.flush()
            os.fsync(stream.fileno())
        here[file.name] = file.bytes


class _ToldFile(io.BufferedWriter):
    """A file that is appended to and tells its length, also when the writer starts it over."""

    def __init__(self, path: Path, tell: Callable[[int], None]) -> None:
        super().__init__(io.FileIO(path, "ab"))
        self._tell = tell

    def write(self, data: Any, /) -> int:
        written = super().write(data)
        self._tell(self.tell())
        return written


def _hold_against_listing(
    order: _Order, revision: str, files: list[_Listed], folder: Path, records: Mapping[str, FileRecord]
) -> None:
    """Delete what is not as listed, so that the next run fetches it anew."""
    listed = {file.name: file for file in files}
    bad = [
        name
        for name, record in records.items()
        if name not in listed or not listed[name].is_stored(folder / name, record)
    ]
    for name in bad:
        (folder / name).unlink()
    if bad:
        raise DownloadError(
            f"not what {order.repository} lists at {revision}, so deleted: {', '.join(bad)}; "
            f"run {order.command} again, it fetches only that"
        )


@contextlib.contextmanager
def _told_in_one_line(order: _Order, revision: str | None) -> Iterator[None]:
    """Turn what the hub's client raises into one line with the cure."""
    import httpx
    from huggingface_hub import errors

    again = f"run {order.command} again, it goes on where it stopped"
    name, place = order.repository, order.source.place
    try:
        yield
    except errors.RevisionNotFoundError as error:
        where = order.revision.place if order.revision else place
        raise HubError(
            f"{where}: {name} has no commit {revision or 'main'} at {order.endpoint}; "
            + (
                "correct REVISION"
                if order.revision
                else f"correct SOURCE, or delete weights/{order.staging.name}"
            )
        ) from error
    except errors.GatedRepoError as error:
        raise HubError(
            f"{name} is gated: accept its terms at {order.endpoint}/{name}, then put a token of that account "
            f"into the environment's HF_TOKEN and run {order.command}"
        ) from error
    except errors.RepositoryNotFoundError as error:
        raise HubError(
            f"{place}: {order.endpoint} has no repository {name}, or hides it; correct SOURCE, or put a token that "
            f"may read it into the environment's HF_TOKEN"
        ) from error
    except errors.HFValidationError as error:
        raise HubError(f"{place}: SOURCE={name} is no owner/name of a repository; correct it") from error
    except errors.HfHubHTTPError as error:
        status = error.response.status_code
        cure = f"later {again}"
        if status in (401, 403):
            cure = f"put a token that may read it into the environment's HF_TOKEN and run {order.command}"
        raise HubError(f"{order.endpoint} answers {status} for {name}; {cure}") from error
    except (httpx.HTTPError, httpx.InvalidURL) as error:
        raise HubError(
            f"{order.endpoint} cannot be reached ({one_line(error)}); check network, HTTPS_PROXY and HF_ENDPOINT, "
            f"then {again}"
        ) from error
    except OSError as error:
        cause = error.strerror or one_line(error)
        raise DownloadError(f"weights/{order.staging.name}: {cause}; set that right and {again}") from error


def one_line(error: Exception) -> str:
    """An exception's name and message without line breaks."""
    return " ".join(f"{type(error).__name__}: {error}".split())


def _length(file: Path) -> int:
    return file.stat().st_size if file.is_file() else 0


def git_blob(content: bytes) -> str:
    """The SHA-1 by which git, and so the hub, knows a file that is not stored with LFS."""
    return hashlib.sha1(b"blob %d\0" % len(content) + content, usedforsecurity=False).hexdigest()
