"""Files of hub repositories at one commit: checkpoints for weights/, data sets for suites.

Files arrive in .download-<name>/<commit>/ beside their destination, where an interrupted download continues, even in
the middle of a file. They are compared with the hub's hashes and become visible by one rename.

Why not `snapshot_download` and `verify_repo_checksums`: the former writes each file under a name of its own and deletes
it on every failure (huggingface_hub#4228, in 1.33), so that a shard of 10 GB begins anew after Ctrl-C.
"""

import contextlib
import importlib.metadata
import importlib.util
import os
import resource
import shutil
import time
from collections.abc import Callable, Iterator, Sequence
from fnmatch import fnmatch
from functools import partial
from pathlib import Path
from typing import Any, Literal, NamedTuple

from slimqwen import checkpoint, redaction
from slimqwen.checkpoint import Manifest
from slimqwen.checkpoint.files import (
    CARD,
    COMPILE_CACHE,
    MANIFEST,
    TEMPLATES,
    FileRecord,
    flush,
    keep_records,
    tree_records,
)
from slimqwen.errors import SlimqwenError
from slimqwen.file_lock import describe_holders, take_lock
from slimqwen.progress import Progress, silent
from slimqwen.variant import Variant, making_command

_PATTERNS = ("*.safetensors", "*.json", "*.jinja", "*.txt", "*.model", "*.tiktoken")
"""Files that are downloaded for a checkpoint; a server never opens pickles, other engines' formats or pictures."""

GGUF = ".gguf"
"""Ending of llama.cpp's files."""

_COMMIT = "[0-9a-f]" * 40

_PROXIES = ("http", "https", "socks5", "socks5h")
"""Kinds of proxies that httpx can use."""


class HubError(SlimqwenError):
    """A download that the hub or local files prevent, or whose files differ from the hub's listing."""


class UnavailableError(HubError):
    """The hub cannot be asked, or does not have the repository for this user."""


class Repository(NamedTuple):
    """A repository of the hub, with texts for error messages.

    Attributes:
        name: owner/name, or owner/name/file.gguf for a checkpoint made of one file (`slimqwen.models.gguf_file`).
        revision: commit of 40 hexadecimal digits; None: the commit of an interrupted download, else the newest of main.
        command: command that starts the download again, or continues it.
        place: where the user wrote name and revision.
    """

    name: str
    kind: Literal["model", "dataset"]
    revision: str | None
    command: str
    place: str


def download_checkpoint(variant: Variant, progress: Progress = silent) -> Manifest:
    """Download the checkpoint that SOURCE names in the config.env of a variant, or of the variant that it inherits.

    A copy that is already here is checked in milliseconds, without asking the hub. HF_TOKEN in the environment gives
    access to repositories that are not public.

    Returns:
        Manifest of the copy; its `facts` include `repository` and `revision` (the commit).

    Raises:
        HubError: there is no SOURCE, weights/<name> is not a copy of it, the hub cannot be reached or has no such
            repository or commit, the disk is too small, another process is downloading the same, or a file differs
            from the hub's listing.
        CorruptCheckpointError: the files are as listed, but are not a checkpoint.
    """
    source, revision = variant.settings.get("SOURCE"), variant.settings.get("REVISION")
    if source is None:
        raise HubError(
            f"{variant.name} is not a copy of a hub repository (its config.env sets or inherits no SOURCE); "
            f"{making_command(variant.weights, variant.root)}"
        )
    name = source.file.parent.name
    target, command = variant.root / "weights" / name, f"`slimqwen download {name}`"
    place = f"SOURCE and REVISION at {source.location}"
    repository = Repository(source.value, "model", revision.value if revision else None, command, place)
    return download_copy(repository, target, progress)


def download_copy(
    repository: Repository,
    target: Path,
    progress: Progress = silent,
    check: Callable[[Path, str], None] = checkpoint.check_folder,
) -> Manifest:
    """Download a checkpoint to a folder; if the folder exists, only check that it is a copy of the repository.

    Args:
        target: path of the folder.
        check: function of the folder and the end of an error message, which raises if the files are no checkpoint.

    Returns:
        Manifest of the copy; its `facts` include `repository` and `revision` (the commit).

    Raises:
        HubError: `target` is something else, the hub cannot be reached or has no such repository or commit, the disk is
            too small, or a file differs from the hub's listing.
        CorruptCheckpointError: by the default `check`: the files are not a checkpoint.
        GgufError: the repository is a GGUF file, which cannot be converted.
    """
    if os.path.lexists(target):
        return _check_copy(target, repository, f"move {target} away and run {repository.command}", check)
    if repository.name.endswith(GGUF):
        return _download_gguf(repository, target, progress)
    started = time.monotonic()
    with download_files(repository, target, _select_checkpoint, progress) as (folder, commit, fetched):
        files = {name: record for name, record in fetched.items() if name != CARD}
        cure = f"{repository.name} has this fault at commit {commit}; correct {repository.place}"
        check(folder, cure)
        manifest = Manifest(
            stage="download",
            files=files,
            wall_seconds=time.monotonic() - started,
            peak_memory_bytes=resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024,
            versions={"huggingface_hub": importlib.metadata.version("huggingface_hub")},
            facts={"repository": repository.name, "revision": commit},
        )
        manifest.write(folder)
        keep_records(folder, files)
    return manifest


def count_bytes(repository: Repository) -> int:
    """Count the bytes of the files that `download_copy` fetches, by the hub's listing.

    Raises:
        HubError: the hub cannot be reached, or has no such repository or commit.
    """
    owner, name, *file = repository.name.split("/", 2)
    _, listed = _list_files(repository._replace(name=f"{owner}/{name}"), repository.revision)
    chosen = [each for each in file if each in listed] if file else _select_checkpoint(list(listed))
    return sum(listed[each].size for each in chosen)


def _download_gguf(repository: Repository, target: Path, progress: Progress) -> Manifest:
    """Download a GGUF file, and make a checkpoint of it in its place."""
    # Imports numpy and tokenizers, and most downloads need neither.
    from slimqwen.models.gguf_file import GgufFile, convert_gguf, write_manifest

    started = time.monotonic()
    owner, name, file = repository.name.split("/", 2)

    def select(names: Sequence[str]) -> list[str]:
        if file not in names:
            found = ", ".join(each for each in names if each.endswith(GGUF)) or "none"
            raise HubError(
                f"{owner}/{name} has no {file}; correct {repository.place}; its GGUF files: {found}"
            )
        return [file]

    asked = repository._replace(name=f"{owner}/{name}")
    with download_files(asked, target, select, progress) as (folder, commit, _):
        facts = convert_gguf(GgufFile(folder / file), folder, progress)
        downloaded = folder / Path(file).parts[0]
        shutil.rmtree(downloaded) if downloaded.is_dir() else downloaded.unlink()
        facts |= {"repository": repository.name, "revision": commit}
        return write_manifest(folder, "download", facts, time.monotonic() - started)


def _check_copy(
    folder: Path, repository: Repository, cure: str, check: Callable[[Path, str], None]
) -> Manifest:
    manifest = Manifest.read(folder) if (folder / MANIFEST).is_file() else None
    if manifest is None or manifest.stage != "download":
        raise HubError(f"{folder} was not downloaded by this command; {cure}")
    name, revision = manifest.facts["repository"], manifest.facts["revision"]
    if (name, revision) != (repository.name, repository.revision or revision):
        raise HubError(
            f"{folder} is a copy of {name} at {revision}, which contradicts {repository.place}; {cure}"
        )
    check(folder, cure)
    return manifest


def _select_checkpoint(names: Sequence[str]) -> list[str]:
    # Other folders of a repository hold other formats.
    return [
        name
        for name in names
        if fnmatch(name, f"{TEMPLATES}/[!.]*.jinja")
        or (
            any(fnmatch(name, pattern) for pattern in _PATTERNS)
            and not (name.startswith(".") or "/" in name or name in (MANIFEST, *COMPILE_CACHE))
        )
        or name == CARD  # states the licence
    ]


@contextlib.contextmanager
def download_files(
    repository: Repository, target: Path, select: Callable[[Sequence[str]], Sequence[str]], progress: Progress
) -> Iterator[tuple[Path, str, dict[str, FileRecord]]]:
    """Download files of a repository; the `with` block may add other files before the folder becomes `target`.

    Args:
        target: path that the folder gets at the end of the block; nothing may be there yet.
        select: paths in the repository -> the paths to download.
        progress: receives (activity, done, total) in bytes.

    Yields:
        The folder, the commit, and the downloaded files by their paths in the folder.

    Raises:
        HubError: the hub cannot be reached or has no such repository or commit, the disk is too small, another process
            is downloading to `target`, or a file differs from the hub's listing (the file is deleted).
    """
    from huggingface_hub.utils.sha import git_hash

    staging = target.with_name(f".download-{target.name}")
    interrupted = next((path.name for path in staging.glob(_COMMIT)), None)
    commit, listed = _list_files(repository, repository.revision or interrupted)
    files = sorted((listed[name] for name in select(list(listed))), key=lambda file: file.size)
    folder = staging / commit
    folder.mkdir(parents=True, exist_ok=True)
    with (staging / "lock").open("a+b") as lock:
        if not take_lock(lock, staging / "lock") or os.path.lexists(target):
            raise HubError(
                f"another process{describe_holders(staging / 'lock')} is downloading {target}; wait until it ends, "
                f"then run {repository.command} again"
            )
        for other in staging.glob(_COMMIT):
            if other != folder:
                shutil.rmtree(other)
        _fetch_files(repository, commit, files, folder, progress)
        records = tree_records(folder, progress)
        for file in files:
            path, is_lfs = folder / file.rfilename, file.lfs is not None
            found = records[file.rfilename].sha256 if is_lfs else git_hash(path.read_bytes())
            if found != (file.lfs.sha256 if is_lfs else file.blob_id):
                path.unlink()
                raise HubError(
                    f"{path} differed from the hub's file and was deleted; run {repository.command} again"
                )
        yield folder, commit, records
        for path in (*folder.rglob("*"), folder):
            flush(path)
        folder.rename(target)
        flush(target.parent)
        shutil.rmtree(staging)


def _list_files(repository: Repository, revision: str | None) -> tuple[str, dict[str, Any]]:
    """The commit and the hub's entries of its files by path, from a single response so that both agree."""
    from huggingface_hub import HfApi

    with explained_errors(repository):
        info = HfApi().repo_info(
            repository.name, repo_type=repository.kind, revision=revision, files_metadata=True, timeout=10
        )
    return str(info.sha), {file.rfilename: file for file in info.siblings}


def _fetch_files(
    repository: Repository, commit: str, files: Sequence[Any], folder: Path, progress: Progress
) -> None:
    """Download every file; a partial one continues at its present length."""
    from huggingface_hub import hf_hub_url
    from huggingface_hub.file_download import http_get
    from huggingface_hub.utils import build_hf_headers

    total = sum(file.size for file in files)
    done = sum(path.stat().st_size for path in folder.rglob("*") if path.is_file())
    missing, free = total - done, shutil.disk_usage(folder).free
    if missing > free:
        raise HubError(
            f"{repository.name} needs {missing / 1e9:.2f} GB more, {free / 1e9:.2f} GB of disk are free; "
            f"free {(missing - free) / 1e9:.2f} GB and run {repository.command}"
        )

    def report(received: int) -> None:
        nonlocal done
        done += received
        progress(f"downloading {repository.name}", done, total)

    report(0)
    for file in files:
        (folder / file.rfilename).parent.mkdir(parents=True, exist_ok=True)
        with explained_errors(repository), (folder / file.rfilename).open("ab") as stream:
            http_get(
                hf_hub_url(repository.name, file.rfilename, repo_type=repository.kind, revision=commit),
                stream,
                resume_size=stream.tell(),
                headers=build_hf_headers(headers={"Accept-Encoding": "identity"}),
                expected_size=file.size,
                tqdm_class=partial(_Bar, report),
            )


class _Bar(contextlib.AbstractContextManager["_Bar"]):
    """Replacement for the progress bar of the hub's client, which reports the number of bytes that arrive."""

    def __init__(self, report: Callable[[int], None], **_: object) -> None:
        self.update = report

    def __exit__(self, *_: object) -> None:
        pass


@contextlib.contextmanager
def explained_errors(repository: Repository) -> Iterator[None]:
    """Turn the exceptions of the hub's client in a `with` block into an UnavailableError of one line: cause and cure.

    Args:
        repository: what the client is asked for; the message has its texts.

    Raises:
        UnavailableError: offline mode, no network, an unusable proxy, no such repository or commit, no permission, or
            no hub at HF_ENDPOINT.
    """
    import httpx
    from huggingface_hub import constants, errors

    name, hub, command = repository.name, constants.ENDPOINT, repository.command
    _require_known_proxy(command)
    token = f"set HF_TOKEN in the environment to a token that may read it and run {command}"
    try:
        yield
    except errors.OfflineModeIsEnabled:
        offline = "HF_HUB_OFFLINE or TRANSFORMERS_OFFLINE"
        message = f"{offline} forbids asking the hub for {name}; unset it and run {command}"
    except errors.GatedRepoError:
        page = f"{hub}/{'datasets/' if repository.kind == 'dataset' else ''}{name}"
        message = f"{name} is gated: accept its terms at {page}, then {token}"
    except (errors.RepositoryNotFoundError, errors.RevisionNotFoundError, errors.HFValidationError):
        revision = repository.revision or "main"
        message = f"{hub} has no {name} at {revision}, or hides it; correct {repository.place}, or {token}"
    except errors.HfHubHTTPError as error:
        status = error.response.status_code
        cure = f"run {command} later, which continues the download"
        if 400 <= status < 500 and status not in (408, 429):
            cure = f"correct {repository.place} or HF_ENDPOINT, or {token}"
        message = f"{hub} answers {status} for {name}; {cure}"
    except (OSError, httpx.HTTPError, httpx.InvalidURL) as error:
        message = (
            f"{name}: {one_line(error)}; check network, HTTPS_PROXY, HF_ENDPOINT and disk, then run {command}"
        )
    except (KeyError, TypeError, ValueError) as error:
        message = (
            f"{hub} does not answer as a model hub ({one_line(error)}); check HF_ENDPOINT and HTTPS_PROXY"
        )
    except Exception as error:
        if type(error).__module__.partition(".")[0] != "socksio":  # httpx passes its errors on as they are
            raise
        message = (
            f"{name}: the address in ALL_PROXY or HTTPS_PROXY is no SOCKS proxy ({one_line(error)}); correct the "
            f"variable, or unset it, and run {command}"
        )
    else:
        return
    raise UnavailableError(message)


def _require_known_proxy(command: str) -> None:
    """Raise an UnavailableError for a proxy that httpx cannot use, such as the socks:// that GNOME sets."""
    for variable in ("ALL_PROXY", "HTTPS_PROXY", "HTTP_PROXY"):
        for name in (variable, variable.lower()):
            value = os.environ.get(name, "")
            scheme = value.partition("://")[0].lower() if "://" in value else "http"
            if scheme not in _PROXIES:
                raise UnavailableError(
                    f"{name}={redaction.text(value)}: proxies of the scheme {scheme}:// are not supported; write "
                    f"{' or '.join(f'{each}://' for each in _PROXIES)}, or unset it, and run {command}"
                )
            if scheme.startswith("socks") and not importlib.util.find_spec("socksio"):
                raise UnavailableError(
                    f"{name}={redaction.text(value)}: this .venv lacks socksio, which a SOCKS proxy needs; "
                    f"run `make install` and {command}, or set an http:// proxy"
                )


def one_line(error: Exception) -> str:
    """Name and message of an exception on one line."""
    return " ".join(f"{type(error).__name__}: {error}".split())
