"""What a suite is asked from that is not in this repository: hub datasets and nltk resources, fetched into data/.

A dataset is fetched at one commit, held against the hub's hashes and appears whole; its manifest.json says which commit
that was. From then on it is only hashed, never asked for again, so that runs need no network.
"""

import contextlib
import hashlib
import json
import re
import shutil
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

from pydantic import BaseModel, ConfigDict, Field

from slimqwen import checkpoint, hub
from slimqwen.errors import SlimqwenError
from slimqwen.progress import Progress, silent

MANIFEST = "manifest.json"
NLTK_DATA = Path("data") / "nltk"
"""Where nltk's resources lie, relative to the repository."""

_CURE = "`make datasets`"


class MissingDataError(SlimqwenError):
    """Data that a suite needs are not here, or are no longer what was fetched."""


class HubDataset(BaseModel):
    """Files of a dataset repository on the hub.

    Attributes:
        repository: owner/name.
        revision: the commit, 40 hexadecimal digits; None is the newest one of main.
        folder: where they go, relative to the repository root.
        files: by their names in the hub's repository.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    repository: str = Field(pattern=r"^[\w.-]+/[\w.-]+$")
    revision: str | None = Field(default=None, pattern="^[0-9a-f]{40}$")
    folder: Path
    files: tuple[str, ...] = Field(min_length=1)


class Fetched(BaseModel):
    """A dataset that is here: at which commit, of how many bytes, and whether it was so before."""

    dataset: HubDataset
    revision: str
    size_bytes: int
    was_here: bool


def fetch(dataset: HubDataset, root: Path, report: Progress = silent, endpoint: str | None = None) -> Fetched:
    """Get a dataset that is not here, at its pinned commit; hash one that is.

    An interrupted run leaves the files that it had in data/.fetching-<name>/<commit>, from where the next goes on. The
    environment's HF_TOKEN opens repositories that are gated.

    Args:
        dataset: what to get.
        root: the repository.
        report: hears how many files are here.
        endpoint: the hub's address; HF_ENDPOINT or huggingface.co by default.

    Raises:
        slimqwen.hub.HubError: offline mode, no network, no such repository, commit or file, no right to read it.
        MissingDataError: what is here is of another commit, or was changed.
        slimqwen.hub.DownloadError: a file is not as the hub lists it.
    """
    from huggingface_hub import HfApi, constants, hf_hub_download, is_offline_mode

    folder = root / dataset.folder
    if (folder / MANIFEST).is_file():
        return _present(dataset, root)
    if is_offline_mode():
        raise hub.HubError(
            f"HF_HUB_OFFLINE is set in the environment, which forbids asking the hub for {dataset.repository}; "
            f"unset it and run {_CURE}"
        )
    endpoint = (endpoint or constants.ENDPOINT).rstrip("/")
    staging = folder.with_name(f".fetching-{folder.name}")
    # main may have moved since an interrupted run.
    begun = [path.name for path in staging.glob("*") if re.fullmatch("[0-9a-f]{40}", path.name)]
    wish = dataset.revision or (begun[0] if len(begun) == 1 else None)
    with _told_in_one_line(dataset, endpoint):
        info = HfApi(endpoint=endpoint).dataset_info(
            dataset.repository, revision=wish, files_metadata=True, timeout=15
        )
        listed = {file.rfilename: file for file in info.siblings or []}
        absent = [name for name in dataset.files if name not in listed]
        if absent:
            raise hub.HubError(
                f"{dataset.repository} has no {', '.join(absent)} at {info.sha}; correct the suite's files"
            )
        part = staging / str(info.sha)
        report(f"fetching {dataset.repository}", 0, len(dataset.files))
        for number, name in enumerate(dataset.files):
            hf_hub_download(
                dataset.repository,
                name,
                repo_type="dataset",
                revision=info.sha,
                endpoint=endpoint,
                local_dir=part,
            )
            report(f"fetching {dataset.repository}", number + 1, len(dataset.files))
    for name in dataset.files:
        lfs, content = listed[name].lfs, (part / name).read_bytes()
        stored = hub.git_blob(content) if lfs is None else hashlib.sha256(content).hexdigest()
        if stored != (listed[name].blob_id if lfs is None else lfs.sha256):
            (part / name).unlink()
            raise hub.DownloadError(
                f"{name} is not what {dataset.repository} lists at {info.sha}, so deleted; run {_CURE} again"
            )
    shutil.rmtree(part / ".cache", ignore_errors=True)  # where huggingface_hub keeps its own notes
    facts = {
        "repository": dataset.repository,
        "revision": info.sha,
        "files": {name: checkpoint.sha256(part / name) for name in dataset.files},
    }
    (part / MANIFEST).write_text(json.dumps(facts, indent=1) + "\n", encoding="utf-8")
    part.rename(folder)
    shutil.rmtree(staging)
    return _present(dataset, root).model_copy(update={"was_here": False})


def fetch_nltk(resources: Iterable[str], root: Path, index: str | None = None) -> list[Path]:
    """Get nltk's resources by nltk's own downloader, which holds them against its index.

    Args:
        resources: names such as punkt_tab.
        root: the repository.
        index: the address of nltk's index, by default nltk's own.

    Returns:
        Their archives.

    Raises:
        slimqwen.hub.HubError: no network, or no such resource.
    """
    from nltk.downloader import Downloader  # type: ignore[import-untyped]

    folder = root / NLTK_DATA
    archives: list[Path] = []
    for name in resources:
        if not list(folder.glob(f"*/{name}.zip")):
            loader = Downloader(server_index_url=index, download_dir=str(folder))
            try:
                loader.download(name, quiet=True, raise_on_error=True)
            except (ValueError, OSError) as error:
                raise hub.HubError(
                    f"nltk's resource {name} cannot be fetched from {loader.url} ({hub.one_line(error)}); check "
                    f"network and HTTPS_PROXY, then run {_CURE} again"
                ) from error
        archives += folder.glob(f"*/{name}.zip")
    return archives


def require(datasets: Iterable[HubDataset], resources: Iterable[str], root: Path) -> list[Path]:
    """Check that all data are here.

    Returns:
        nltk's archives: they decide scores as the datasets do.

    Raises:
        MissingDataError: some are not; names the command that fetches them.
    """
    missing = [str(d.folder) for d in datasets if not (root / d.folder / MANIFEST).is_file()]
    archives: list[Path] = []
    for name in resources:
        found = list((root / NLTK_DATA).glob(f"*/{name}.zip"))
        archives += found
        missing += [] if found else [str(NLTK_DATA / name)]
    if missing:
        raise MissingDataError(f"not here: {', '.join(missing)}; {_CURE} fetches them (it takes a network)")
    for dataset in datasets:
        _present(dataset, root)
    return archives


def _present(dataset: HubDataset, root: Path) -> Fetched:
    """The dataset that is here, if it is the one that is wanted and nothing changed it since."""
    folder = root / dataset.folder
    anew = f"delete {dataset.folder} and run {_CURE}"
    facts: dict[str, Any] = json.loads((folder / MANIFEST).read_text(encoding="utf-8"))
    here = f"{facts['repository']} at {facts['revision']}"
    if facts["repository"] != dataset.repository or dataset.revision not in (None, facts["revision"]):
        raise MissingDataError(
            f"{dataset.folder} is {here}, the suite wants {dataset.repository} at {dataset.revision or 'main'}; {anew}"
        )
    for name in dataset.files:
        file = folder / name
        if not file.is_file() or checkpoint.sha256(file) != facts["files"].get(name):
            raise MissingDataError(f"{dataset.folder}/{name} is no longer the file of {here}; {anew}")
    size = sum((folder / name).stat().st_size for name in dataset.files)
    return Fetched(dataset=dataset, revision=facts["revision"], size_bytes=size, was_here=True)


@contextlib.contextmanager
def _told_in_one_line(dataset: HubDataset, endpoint: str) -> Iterator[None]:
    """Turn what the hub's client raises into one line with the cure."""
    import httpx
    from huggingface_hub import errors

    name = dataset.repository
    token = f"put a token of an account that may read it into the environment's HF_TOKEN and run {_CURE}"
    try:
        yield
    except errors.RevisionNotFoundError as error:
        raise hub.HubError(
            f"{name} has no commit {dataset.revision or 'main'} at {endpoint}; correct the suite's revision"
        ) from error
    except errors.GatedRepoError as error:
        raise hub.HubError(
            f"{name} is gated: accept its terms at {endpoint}/datasets/{name}, {token}"
        ) from error
    except errors.RepositoryNotFoundError as error:
        raise hub.HubError(
            f"{endpoint} has no dataset {name}, or hides it; correct the suite, or {token}"
        ) from error
    except errors.HfHubHTTPError as error:
        status = error.response.status_code
        cure = token if status in (401, 403) else f"later run {_CURE} again"
        raise hub.HubError(f"{endpoint} answers {status} for {name}; {cure}") from error
    except (httpx.HTTPError, errors.LocalEntryNotFoundError, OSError) as error:
        raise hub.HubError(
            f"{name} cannot be fetched from {endpoint} ({hub.one_line(error)}); check network, HTTPS_PROXY and "
            f"HF_ENDPOINT, then run {_CURE} again, it goes on where it stopped"
        ) from error
