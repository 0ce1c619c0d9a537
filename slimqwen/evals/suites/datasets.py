"""Data of suites that are not in this repository: hub datasets and nltk resources, fetched into data/.

A dataset is fetched at one commit, checked against the hub's hashes, and published by one rename; its manifest.json
names the commit. Later runs only check its hashes, so they need no network.
"""

import fnmatch
import json
import shutil
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from pydantic import BaseModel, ConfigDict, Field

from slimqwen.checkpoint.files import publish, sha256
from slimqwen.evals import EvalError
from slimqwen.hub import HubError, Repository, download_files, one_line
from slimqwen.progress import Progress, silent

MANIFEST = "manifest.json"
LOCAL = "files of a folder"
"""Revision in the manifest of a dataset that a user's folder gave."""
NLTK_DATA = Path("data") / "nltk"
"""Folder of nltk's resources, relative to the repository."""

_CURE = "`slimqwen download --suite core`"


class HubDataset(BaseModel):
    """Files of a dataset repository on the hub.

    Attributes:
        repository: owner/name on the hub.
        revision: commit of 40 hexadecimal digits; None for the newest commit of the branch main.
        folder: destination relative to the repository root.
        files: paths in the hub's repository, or patterns such as "*/test.parquet".
        local_files: names under which a folder of the user's may hold the data instead of the hub (`take_datasets`).
        optional: whether missing data are no error; the tasks that read them are then left out.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    repository: str = Field(pattern=r"^[\w.-]+/[\w.-]+$")
    revision: str | None = Field(default=None, pattern="^[0-9a-f]{40}$")
    folder: Path
    files: tuple[str, ...] = Field(min_length=1)
    local_files: tuple[str, ...] = ()
    optional: bool = False


def is_fetched(folder: Path, root: Path) -> bool:
    """Whether a dataset's folder, relative to the repository, is complete."""
    return (root / folder / MANIFEST).is_file()


def take_datasets(datasets: Iterable[HubDataset], source: Path, root: Path) -> list[str]:
    """Copy the data of a suite from a folder of the user's, where it holds their `local_files`.

    Args:
        datasets: the data sets of the suite; those that are here already are not copied.
        source: folder with the files.
        root: folder of the workspace or checkout, which gets them.

    Returns:
        A line for each dataset that says what was copied, or what the folder lacks.

    Raises:
        EvalError: the folder holds no dataset of the suite.
    """
    lines, found = [], False
    for dataset in datasets:
        if is_fetched(dataset.folder, root):
            lines.append(f"{dataset.folder} is present")
            found = True
            continue
        missing = [name for name in dataset.local_files if not (source / name).is_file()]
        if missing or not dataset.local_files:
            lines.append(
                f"{dataset.folder} is not taken: no {', '.join(missing or dataset.files)} in {source}"
            )
            continue
        found = True
        with publish(root / dataset.folder) as folder:
            for name in dataset.local_files:
                shutil.copyfile(source / name, folder / name)
            hashes = {name: sha256(folder / name) for name in dataset.local_files}
            _write_manifest(folder, dataset.repository, LOCAL, hashes)
        lines.append(f"{dataset.folder} is complete: {', '.join(dataset.local_files)} of {source}")
    if not found:
        raise EvalError(f"{'; '.join(lines)}; name a folder that holds them with --data")
    return lines


def fetch_datasets(
    datasets: Iterable[HubDataset], resources: Iterable[str], root: Path, progress: Progress = silent
) -> list[str]:
    """Fetch the data of a suite that are missing, and check those that are present.

    Args:
        datasets: the data sets of the suite.
        resources: names of nltk resources.
        root: folder of the workspace or checkout, whose data/ gets them.
        progress: receives (activity, done, total) in bytes.

    Returns:
        A line for each dataset and resource that says whether it was fetched or present.

    Raises:
        HubError: the hub or nltk's server cannot be reached, or refuses or lacks what is asked.
        EvalError: a local dataset is of another commit, or was changed.
    """
    lines = [fetch_dataset(dataset, root, progress) for dataset in datasets]
    return lines + [f"{archive.relative_to(root)} is present" for archive in fetch_nltk(resources, root)]


def fetch_dataset(dataset: HubDataset, root: Path, progress: Progress = silent, cure: str = _CURE) -> str:
    """Fetch a dataset at its pinned commit, or check its hashes if it is present; returns a line that says which.

    An interrupted call leaves its files in data/.download-<name>/<commit>, where the next call continues. The
    environment variable HF_TOKEN opens gated repositories, HF_ENDPOINT names another hub.

    Args:
        dataset: the dataset.
        root: folder of the workspace or checkout, whose data/ gets it.
        progress: receives (activity, done, total) in bytes.
        cure: the command that is to be run again after an error.

    Raises:
        HubError: offline mode, no network, no such repository, commit or file, no right to read it, or a file that does
            not match the hub's hash.
        EvalError: the local dataset is of another commit, or was changed.
    """
    state = "is present, every file as it was fetched"
    if not is_fetched(dataset.folder, root):
        _download(dataset, root, progress, cure)
        state = "is complete, as the hub lists it"
    revision, names = _checked_revision(dataset, root, cure)
    size = sum((root / dataset.folder / name).stat().st_size for name in names)
    pin = (
        ""
        if dataset.revision or revision == LOCAL
        else f"; to pin it: `revision: {revision}` in its file of eval/"
    )
    return f"{dataset.folder} {state}: {dataset.repository} at {revision}, {size / 1e6:.1f} MB{pin}"


def _download(dataset: HubDataset, root: Path, progress: Progress, cure: str) -> None:
    repository = Repository(dataset.repository, "dataset", dataset.revision, cure, "its file of eval/")

    def select(names: Sequence[str]) -> Sequence[str]:
        if absent := [pattern for pattern in dataset.files if not fnmatch.filter(names, pattern)]:
            raise HubError(
                f"{dataset.repository} has no {', '.join(absent)}; correct the `files` of this data set in eval/"
            )
        return [name for name in names if any(fnmatch.fnmatchcase(name, each) for each in dataset.files)]

    with download_files(repository, root / dataset.folder, select, progress) as (folder, commit, files):
        hashes = {name: record.sha256 for name, record in files.items()}
        _write_manifest(folder, dataset.repository, commit, hashes)


def _write_manifest(folder: Path, repository: str, revision: str, files: Mapping[str, str]) -> None:
    manifest = {"repository": repository, "revision": revision, "files": files}
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
    """Check that all data of a suite are present; optional data sets may be missing.

    Args:
        datasets: the data sets of the suite.
        resources: names of nltk resources.
        root: folder of the workspace or checkout.

    Returns:
        Archives of the nltk resources, which affect scores as the datasets do.

    Raises:
        EvalError: some data are missing or were changed.
    """
    present_sets = [dataset for dataset in datasets if is_fetched(dataset.folder, root)]
    missing = [str(each.folder) for each in datasets if not each.optional and each not in present_sets]
    archives: list[Path] = []
    for name in resources:
        present = _nltk_archives(name, root)
        archives += present
        missing += [] if present else [str(NLTK_DATA / name)]
    if missing:
        raise EvalError(f"missing data: {', '.join(missing)}; {_CURE} fetches them from the network")
    for dataset in present_sets:
        _checked_revision(dataset, root)
    return archives


def _nltk_archives(name: str, root: Path) -> list[Path]:
    return list((root / NLTK_DATA).glob(f"*/{name}.zip"))


def _checked_revision(dataset: HubDataset, root: Path, cure: str = _CURE) -> tuple[str, list[str]]:
    """Commit and files of the local dataset; an EvalError unless the suite wants it and no file was changed."""
    folder = root / dataset.folder
    cure = f"delete {dataset.folder} and run {cure}"
    manifest: dict[str, Any] = json.loads((folder / MANIFEST).read_text(encoding="utf-8"))
    source = f"{manifest['repository']} at {manifest['revision']}"
    allowed = {None, manifest["revision"]} if manifest["revision"] != LOCAL else {dataset.revision}
    if manifest["repository"] != dataset.repository or dataset.revision not in allowed:
        raise EvalError(
            f"{dataset.folder} is {source}, but the suite needs {dataset.repository} at {dataset.revision or 'main'}; "
            f"{cure}"
        )
    for name, expected in manifest["files"].items():
        file = folder / name
        if not file.is_file() or sha256(file) != expected:
            raise EvalError(f"{dataset.folder}/{name} was changed or deleted after its download; {cure}")
    return str(manifest["revision"]), list(manifest["files"])
