"""Data of suites that are not in this repository: hub datasets and nltk resources, fetched into data/.

A dataset is fetched at one commit, checked against the hub's hashes, and published by one rename; its manifest.json
names the commit. Later runs only check its hashes, so they need no network.
"""

import json
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from pydantic import BaseModel, ConfigDict, Field

from slimqwen.checkpoint.files import sha256
from slimqwen.evals import EvalError
from slimqwen.hub import HubError, Repository, download_files, one_line
from slimqwen.progress import Progress, silent

MANIFEST = "manifest.json"
NLTK_DATA = Path("data") / "nltk"
"""Folder of nltk's resources, relative to the repository."""

_CURE = "`slimqwen download --suite core`"


class HubDataset(BaseModel):
    """Files of a dataset repository on the hub.

    Attributes:
        revision: commit of 40 hexadecimal digits; None for the newest commit of the branch main.
        folder: destination relative to the repository root.
        files: paths in the hub's repository.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    repository: str = Field(pattern=r"^[\w.-]+/[\w.-]+$")
    revision: str | None = Field(default=None, pattern="^[0-9a-f]{40}$")
    folder: Path
    files: tuple[str, ...] = Field(min_length=1)


def fetch_datasets(
    datasets: Iterable[HubDataset], resources: Iterable[str], root: Path, progress: Progress = silent
) -> list[str]:
    """Fetch the data of a suite that are missing, and check those that are present.

    Args:
        resources: names of nltk resources.

    Returns:
        A line for each dataset and resource that says whether it was fetched or present.

    Raises:
        HubError: as `fetch_dataset` and `fetch_nltk`.
        EvalError: as `fetch_dataset`.
    """
    lines = [fetch_dataset(dataset, root, progress) for dataset in datasets]
    return lines + [f"{archive.relative_to(root)} is present" for archive in fetch_nltk(resources, root)]


def fetch_dataset(dataset: HubDataset, root: Path, progress: Progress = silent) -> str:
    """Fetch a dataset at its pinned commit, or check its hashes if it is present; returns a line that says which.

    An interrupted call leaves its files in data/.download-<name>/<commit>, where the next call continues. The
    environment variable HF_TOKEN opens gated repositories, HF_ENDPOINT names another hub.

    Raises:
        HubError: offline mode, no network, no such repository, commit or file, no right to read it, or a file that
            does not match the hub's hash.
        EvalError: the local dataset is of another commit, or was changed.
    """
    state = "is present, every file as it was fetched"
    if not (root / dataset.folder / MANIFEST).is_file():
        _download(dataset, root, progress)
        state = "is complete, as the hub lists it"
    revision = _checked_revision(dataset, root)
    size = sum((root / dataset.folder / name).stat().st_size for name in dataset.files)
    pin = "" if dataset.revision else f"; to pin it: `revision: {revision}` in eval/suites/"
    return f"{dataset.folder} {state}: {dataset.repository} at {revision}, {size / 1e6:.1f} MB{pin}"


def _download(dataset: HubDataset, root: Path, progress: Progress) -> None:
    repository = Repository(dataset.repository, "dataset", dataset.revision, _CURE, "the suite")

    def select(names: Sequence[str]) -> Sequence[str]:
        if absent := [name for name in dataset.files if name not in names]:
            raise HubError(f"{dataset.repository} has no {', '.join(absent)}; correct `files` in the suite")
        return dataset.files

    with download_files(repository, root / dataset.folder, select, progress) as (folder, commit, files):
        manifest = {
            "repository": dataset.repository,
            "revision": commit,
            "files": {name: record.sha256 for name, record in files.items()},
        }
        (folder / MANIFEST).write_text(json.dumps(manifest, indent=1) + "\n", encoding="utf-8")


def fetch_nltk(resources: Iterable[str], root: Path) -> list[Path]:
    """Fetch nltk resources that are missing, by nltk's own downloader, which checks their hashes; returns the archives.

    Raises:
        HubError: no network, or no such resource.
    """
    from nltk.downloader import Downloader  # type: ignore[import-untyped]

    archives: list[Path] = []
    for name in resources:
        if not _nltk_archives(name, root):
            loader = Downloader(download_dir=str(root / NLTK_DATA))
            try:
                loader.download(name, quiet=True, raise_on_error=True)
            except (ValueError, OSError) as error:
                raise HubError(
                    f"nltk's resource {name} cannot be fetched from {loader.url} ({one_line(error)}); check "
                    f"network and HTTPS_PROXY, then run {_CURE} again"
                ) from error
        archives += _nltk_archives(name, root)
    return archives


def require_datasets(datasets: Sequence[HubDataset], resources: Iterable[str], root: Path) -> list[Path]:
    """Check that all data of a suite are present.

    Returns:
        Archives of the nltk resources, which affect scores as the datasets do.

    Raises:
        EvalError: some data are missing or were changed.
    """
    missing = [
        str(dataset.folder) for dataset in datasets if not (root / dataset.folder / MANIFEST).is_file()
    ]
    archives: list[Path] = []
    for name in resources:
        present = _nltk_archives(name, root)
        archives += present
        missing += [] if present else [str(NLTK_DATA / name)]
    if missing:
        raise EvalError(f"missing data: {', '.join(missing)}; {_CURE} fetches them over the network")
    for dataset in datasets:
        _checked_revision(dataset, root)
    return archives


def _nltk_archives(name: str, root: Path) -> list[Path]:
    return list((root / NLTK_DATA).glob(f"*/{name}.zip"))


def _checked_revision(dataset: HubDataset, root: Path) -> str:
    """The commit of the local dataset; an EvalError unless the suite wants it and every file is as it was fetched."""
    folder = root / dataset.folder
    cure = f"delete {dataset.folder} and run {_CURE}"
    manifest: dict[str, Any] = json.loads((folder / MANIFEST).read_text(encoding="utf-8"))
    source = f"{manifest['repository']} at {manifest['revision']}"
    if manifest["repository"] != dataset.repository or dataset.revision not in (None, manifest["revision"]):
        raise EvalError(
            f"{dataset.folder} is {source}, but the suite needs {dataset.repository} at {dataset.revision or 'main'}; "
            f"{cure}"
        )
    for name in dataset.files:
        file = folder / name
        if not file.is_file() or sha256(file) != manifest["files"].get(name):
            raise EvalError(f"{dataset.folder}/{name} was changed or deleted after its download; {cure}")
    return str(manifest["revision"])
