"""Copies of hub checkpoints: weights/<name>, downloaded at one commit for the variant whose config.env has a SOURCE."""

import fnmatch
import importlib.metadata
import os
import resource
import time
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from slimqwen import checkpoint
from slimqwen.checkpoint import Manifest
from slimqwen.checkpoint.files import COMPILE_CACHE, MANIFEST, flush, sha256
from slimqwen.hub_repository import HubError, Repository, downloaded
from slimqwen.progress import Progress, silent
from slimqwen.variant import Setting, Variant, making_command

# A server never opens pickles, other engines' formats or pictures.
_CHECKPOINT_PATTERNS = ("*.safetensors", "*.json", "*.jinja", "*.txt", "*.model", "*.tiktoken")
_STAGE = "download"


@dataclass(frozen=True)
class Copy:
    """A hub repository's checkpoint under weights/.

    Attributes:
        source: SOURCE line of the config.env.
        revision: commit, 40 hexadecimal digits.
        pinned: whether that config.env sets REVISION.
        folder: weights/<variant that sets SOURCE>.
        fetched: whether this call downloaded it.
    """

    source: Setting
    revision: str
    pinned: bool
    folder: Path
    manifest: Manifest
    fetched: bool


def download(variant: Variant, progress: Progress = silent) -> Copy:
    """Download the checkpoint that a variant, or the variant from which it inherits SOURCE, is a copy of.

    An existing copy is checked in milliseconds, without asking the hub. HF_TOKEN in the environment gives access to
    repositories that are not public.

    Args:
        variant: variant; REVISION beside its SOURCE is the commit, by default the newest of main, or that of an
            interrupted download.
        progress: receives (activity, done, total) in bytes.

    Raises:
        HubError: no SOURCE; offline mode, no network, no such repository or commit, no permission, or no checkpoint in
            it; the target exists or was changed, the disk is too small, another process is downloading, or files are
            not as listed (those are deleted).
        CorruptCheckpointError: the files are as listed, but are not a checkpoint.
    """
    source = variant.settings.get("SOURCE")
    if source is None:
        raise HubError(
            f"{variant.name} is not a copy of a hub repository (its config.env sets or inherits no SOURCE); "
            f"{making_command(variant.weights, variant.root)}"
        )
    repository, pinned = _repository(variant, source)
    if os.path.lexists(repository.target):
        return _existing_copy(repository, source, pinned)
    started = time.monotonic()
    select = partial(_checkpoint_files, source)
    with downloaded(repository, select, f"downloading {repository.name}", progress) as download:
        checkpoint.check_folder(
            download.folder,
            f"its files are those of {repository.name} at {download.revision}; name another repository in "
            f"{source.location}",
        )
        manifest = Manifest(
            stage=_STAGE,
            files=download.files,
            wall_seconds=time.monotonic() - started,
            peak_memory_bytes=resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024,
            versions={"huggingface_hub": importlib.metadata.version("huggingface_hub")},
            facts={"repository": repository.name, "revision": download.revision},
        )
        manifest.write(download.folder)
        flush(download.folder / MANIFEST)
        flush(download.folder)
        download.folder.rename(repository.target)
        flush(repository.target.parent)
    return Copy(source, download.revision, pinned is not None, repository.target, manifest, fetched=True)


def _repository(variant: Variant, source: Setting) -> tuple[Repository, Setting | None]:
    """The repository that a SOURCE names, and the REVISION beside it if there is one."""
    name, pinned = source.file.parent.name, variant.settings.get("REVISION")
    target = variant.root / "weights" / name
    repository = Repository(
        name=source.value,
        kind="model",
        revision=pinned.value if pinned else None,
        endpoint=None,
        target=target,
        shown=f"weights/{name}",
        command=f"`make download VARIANT={name}`",
        name_cure="correct SOURCE",
        revision_cure="correct REVISION" if pinned else f"correct SOURCE, or delete weights/.download-{name}",
        name_at=f"{source.location}: SOURCE={source.value}: ",
        revision_at=f"{pinned.location if pinned else source.location}: ",
    )
    return repository, pinned


def _existing_copy(repository: Repository, source: Setting, pinned: Setting | None) -> Copy:
    """The existing copy, if it is the requested one and unchanged."""
    cure = f"delete {repository.shown} and run {repository.command}"
    if not (repository.target / MANIFEST).is_file():
        raise HubError(
            f"{repository.shown} exists and was not downloaded by this command (it has no {MANIFEST}); "
            f"move it away and run {repository.command}"
        )
    manifest = Manifest.read(repository.target)
    name, revision = (str(manifest.facts.get(fact, "")) for fact in ("repository", "revision"))
    if manifest.stage != _STAGE or name != repository.name:
        origin = f"of {name}" if manifest.stage == _STAGE else f"made by the stage {manifest.stage}"
        raise HubError(
            f"{repository.shown} is {origin}, {source.location} says SOURCE={repository.name}; "
            f"move it away and run {repository.command}"
        )
    if pinned is not None and pinned.value != revision:
        raise HubError(
            f"{repository.shown} is {name} at {revision}, {pinned.location} says "
            f"REVISION={pinned.value}; {cure}"
        )
    manifest_time = (repository.target / MANIFEST).stat().st_mtime_ns
    for file_name, record in manifest.files.items():
        file = repository.target / file_name
        stat = file.stat() if file.is_file() else None
        # Only a file newer than the manifest can have changed at the same length.
        if (
            stat is None
            or stat.st_size != record.bytes
            or (stat.st_mtime_ns >= manifest_time and sha256(file) != record.sha256)
        ):
            raise HubError(
                f"{repository.shown}/{file_name} is no longer the file that was downloaded; {cure}"
            )
    checkpoint.check_folder(repository.target, cure)
    return Copy(source, revision, pinned is not None, repository.target, manifest, fetched=False)


def _checkpoint_files(source: Setting, names: Sequence[str], revision: str) -> list[str]:
    """The files of a checkpoint among those of a repository."""
    # Folders of a repository hold other formats, and a name with a slash could lead out of the folder.
    checkpoint_files = [
        name
        for name in names
        if not name.startswith(".")
        and "/" not in name
        and name not in (MANIFEST, *COMPILE_CACHE)
        and any(fnmatch.fnmatch(name, pattern) for pattern in _CHECKPOINT_PATTERNS)
    ]
    if not any(name.endswith(".safetensors") for name in checkpoint_files):
        raise HubError(
            f"{source.value} has no .safetensors file at {revision}; correct SOURCE in {source.location}"
        )
    return checkpoint_files
