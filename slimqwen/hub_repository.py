"""A repository of the model hub: its files at one commit, downloaded resumably and checked against the hub's hashes.

Files are downloaded into <staging>/<commit>/, where an interrupted download resumes, also within a file. The caller
publishes that folder by one rename.
"""

import contextlib
import fcntl
import io
import os
import re
import shutil
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from slimqwen.checkpoint.files import FileRecord, file_records
from slimqwen.errors import SlimqwenError
from slimqwen.progress import Progress


class HubError(SlimqwenError):
    """A download that the hub or local files prevent, or whose files differ from the hub's listing."""


Selection = Callable[[Sequence[str], str], Sequence[str]]
"""(paths in the repository, commit) -> the paths to download; a HubError if a necessary file is missing."""


@dataclass(frozen=True)
class Repository:
    """A repository, and texts for messages about it.

    Attributes:
        name: owner/name.
        revision: commit of 40 hexadecimal digits; None for the newest of main, or that of an interrupted download.
        endpoint: address of the hub; None for HF_ENDPOINT or huggingface.co.
        target: folder that the files are published as.
        shown: the target in messages.
        command: command that starts the download again, or continues it.
        name_cure: how to correct the name.
        revision_cure: how to correct the commit.
        name_at: location of the name, as the beginning of a message.
        revision_at: location of the commit, likewise.
    """

    name: str
    kind: Literal["model", "dataset"]
    revision: str | None
    endpoint: str | None
    target: Path
    shown: str
    command: str
    name_cure: str
    revision_cure: str
    name_at: str = ""
    revision_at: str = ""

    @property
    def staging(self) -> Path:
        """Folder of an unfinished download."""
        return self.target.with_name(f".download-{self.target.name}")

    @property
    def address(self) -> str:
        """Address of the hub, without a trailing slash."""
        from huggingface_hub import constants

        return (self.endpoint or constants.ENDPOINT).rstrip("/")


@dataclass(frozen=True)
class Download:
    """Downloaded files of a commit by their path in a folder, not published yet."""

    revision: str
    folder: Path
    files: dict[str, FileRecord]


@dataclass(frozen=True)
class _ListedFile:
    """A file as the hub lists it: its SHA-256 if it is stored with LFS, else git's blob SHA-1."""

    name: str
    bytes: int
    sha256: str | None
    blob: str | None

    def is_stored(self, file: Path, record: FileRecord) -> bool:
        if self.sha256 is None:
            from huggingface_hub.utils.sha import git_hash

            blob: str = git_hash(file.read_bytes())
            return blob == self.blob
        return record == FileRecord(sha256=self.sha256, bytes=self.bytes)


@contextlib.contextmanager
def downloaded(
    repository: Repository, select: Selection, activity: str, progress: Progress
) -> Iterator[Download]:
    """Download files of a repository, for a block that publishes them.

    HF_TOKEN in the environment gives access to repositories that are not public.

    Args:
        repository: the repository; its target does not exist.
        progress: receives (activity, done, total) in bytes.

    Raises:
        HubError: offline mode, no network, no such repository or commit, no permission; the target appeared meanwhile,
            the disk is too small, another process is downloading, or files are not as listed (those are deleted).
    """
    revision, files = _listing(repository, select)
    with _staging(repository, revision) as folder:
        _fetch(repository, revision, files, folder, activity, progress)
        records = file_records(folder, progress)
        _check_listing(repository, revision, files, folder, records)
        yield Download(revision, folder, records)


def _listing(repository: Repository, select: Selection) -> tuple[str, list[_ListedFile]]:
    """The commit and its files, from a single answer of the hub, so that they agree; the smallest first."""
    import httpx
    from huggingface_hub import HfApi, is_offline_mode

    if is_offline_mode():
        names = ("HF_HUB_OFFLINE", "TRANSFORMERS_OFFLINE")
        name = next((name for name in names if os.environ.get(name)), names[0])
        raise HubError(
            f"{name} is set in the environment, which forbids asking the hub; "
            f"`unset {name}` and run {repository.command}"
        )
    requested = repository.revision or _interrupted_revision(repository.staging)
    try:
        with _one_line_errors(repository, requested):
            info = HfApi(endpoint=repository.address).repo_info(
                repository.name,
                repo_type=repository.kind,
                revision=requested,
                files_metadata=True,
                # Per address of the host name: a network that drops packets takes a multiple of it.
                timeout=httpx.Timeout(15, connect=4),
            )
        revision = str(info.sha)
        if not re.fullmatch("[0-9a-f]{40}", revision) or (requested and revision != requested):
            raise ValueError(f"it lists commit {revision}, asked for {requested or 'main'}")
        listed = {
            file.rfilename: _ListedFile(
                name=file.rfilename,
                bytes=int(file.size),
                sha256=file.lfs.sha256 if file.lfs else None,
                blob=file.blob_id,
            )
            for file in info.siblings
        }
    except (ValueError, KeyError, TypeError) as error:
        raise HubError(
            f"{repository.address} does not answer as a model hub does ({one_line(error)}); "
            "check HF_ENDPOINT and HTTPS_PROXY"
        ) from error
    files = [listed[name] for name in select(list(listed), revision)]
    return revision, sorted(files, key=lambda file: (file.bytes, file.name))


def _interrupted_revision(staging: Path) -> str | None:
    """The commit of an interrupted download: main may have moved since."""
    revisions = [path.name for path in staging.glob("*") if re.fullmatch("[0-9a-f]{40}", path.name)]
    return revisions[0] if len(revisions) == 1 else None


@contextlib.contextmanager
def _staging(repository: Repository, revision: str) -> Iterator[Path]:
    """The locked folder of downloaded files; it is kept if the download fails."""
    staging = repository.staging
    staging.mkdir(parents=True, exist_ok=True)
    lock = os.open(staging, os.O_RDONLY)
    try:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            # Another process may have finished between the open and the lock.
            is_exclusive = staging.exists() and not os.path.lexists(repository.target)
        except BlockingIOError:
            is_exclusive = False
        if not is_exclusive:
            raise HubError(f"another process is downloading {repository.shown}; wait for its end")
        folder = staging / revision
        for other in staging.iterdir():
            if other != folder:
                shutil.rmtree(other, ignore_errors=True)
        folder.mkdir(exist_ok=True)
        yield folder
        shutil.rmtree(staging, ignore_errors=True)
    finally:
        os.close(lock)


def _fetch(
    repository: Repository,
    revision: str,
    files: Sequence[_ListedFile],
    folder: Path,
    activity: str,
    progress: Progress,
) -> None:
    """Download every file, continuing at its present length."""
    from huggingface_hub import hf_hub_url
    from huggingface_hub.file_download import http_get
    from huggingface_hub.utils import build_hf_headers
    from huggingface_hub.utils.tqdm import silent_tqdm

    total = sum(file.bytes for file in files)
    lengths = {file.name: _length(folder / file.name) for file in files}
    for file in files:
        if lengths[file.name] > file.bytes:
            (folder / file.name).unlink()
            lengths[file.name] = 0
    missing, free = total - sum(lengths.values()), shutil.disk_usage(folder).free
    if missing > free:
        raise HubError(
            f"{repository.name} needs {missing / 1e9:.2f} GB more under {Path(repository.shown).parent}/, "
            f"{free / 1e9:.2f} GB are free; free {(missing - free) / 1e9:.2f} GB and run {repository.command}"
        )
    progress(activity, sum(lengths.values()), total)
    for file in files:
        if lengths[file.name] == file.bytes > 0:
            continue
        other_bytes = sum(length for name, length in lengths.items() if name != file.name)

        def count(position: int, other_bytes: int = other_bytes) -> None:
            progress(activity, other_bytes + position, total)

        (folder / file.name).parent.mkdir(parents=True, exist_ok=True)
        # Not snapshot_download: it deletes a partial file when its process ends.
        with (
            _one_line_errors(repository, revision),
            _CountedFile(folder / file.name, count) as stream,
        ):
            http_get(
                hf_hub_url(
                    repository.name,
                    file.name,
                    repo_type=repository.kind,
                    revision=revision,
                    endpoint=repository.address,
                ),
                stream,
                resume_size=lengths[file.name],
                headers=build_hf_headers(headers={"Accept-Encoding": "identity"}),
                expected_size=file.bytes,
                displayed_filename=file.name,
                tqdm_class=silent_tqdm,
            )
            stream.flush()
            os.fsync(stream.fileno())
        lengths[file.name] = file.bytes


class _CountedFile(io.BufferedWriter):
    """A file opened for appending that reports its length after each write."""

    def __init__(self, path: Path, count: Callable[[int], None]) -> None:
        super().__init__(io.FileIO(path, "ab"))
        self._count = count

    def write(self, data: Any, /) -> int:
        written = super().write(data)
        self._count(self.tell())
        return written


def _check_listing(
    repository: Repository,
    revision: str,
    files: Sequence[_ListedFile],
    folder: Path,
    records: Mapping[str, FileRecord],
) -> None:
    """Delete files that are not as listed, so that the next run downloads them again."""
    listed = {file.name: file for file in files}
    wrong = [
        name
        for name, record in records.items()
        if name not in listed or not listed[name].is_stored(folder / name, record)
    ]
    for name in wrong:
        (folder / name).unlink()
    if wrong:
        raise HubError(
            f"files that differ from those of {repository.name} at {revision} were deleted: {', '.join(wrong)}; "
            f"run {repository.command} again, it fetches only these"
        )


@contextlib.contextmanager
def _one_line_errors(repository: Repository, revision: str | None) -> Iterator[None]:
    """Turn the exceptions of the hub's client into a HubError of one line with the cure."""
    import httpx
    from huggingface_hub import errors

    name, endpoint, command = repository.name, repository.address, repository.command
    page = "datasets/" if repository.kind == "dataset" else ""
    token = f"put a token that may read it into the environment's HF_TOKEN and run {command}"
    try:
        yield
    except errors.RevisionNotFoundError as error:
        raise HubError(
            f"{repository.revision_at}{name} has no commit {revision or 'main'} at {endpoint}; "
            f"{repository.revision_cure}"
        ) from error
    except errors.GatedRepoError as error:
        raise HubError(
            f"{name} is gated: accept its terms at {endpoint}/{page}{name}, then {token}"
        ) from error
    except errors.RepositoryNotFoundError as error:
        raise HubError(
            f"{repository.name_at}{endpoint}/{page} has no repository {name}, or hides it; "
            f"{repository.name_cure}, or {token}"
        ) from error
    except errors.HFValidationError as error:
        raise HubError(
            f"{repository.name_at}{name} is not the owner/name of a repository; {repository.name_cure}"
        ) from error
    except errors.HfHubHTTPError as error:
        status = error.response.status_code
        cure = token if status in (401, 403) else f"run {command} later, it continues"
        raise HubError(f"{endpoint} answers {status} for {name}; {cure}") from error
    except (httpx.HTTPError, httpx.InvalidURL, errors.LocalEntryNotFoundError) as error:
        raise HubError(
            f"{endpoint} cannot be reached for {name} ({one_line(error)}); check network, HTTPS_PROXY and "
            f"HF_ENDPOINT, then run {command} again, it continues"
        ) from error
    except OSError as error:
        cause = error.strerror or one_line(error)
        raise HubError(f"{name}: {cause}; correct that and run {command} again, it continues") from error


def one_line(error: Exception) -> str:
    """Name and message of an exception on one line."""
    return " ".join(f"{type(error).__name__}: {error}".split())


def _length(file: Path) -> int:
    return file.stat().st_size if file.is_file() else 0
