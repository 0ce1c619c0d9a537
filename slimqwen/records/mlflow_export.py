"""Records as runs of an MLflow tracking store, so that a team's dashboard has them.

All variants are in one experiment: to compare them is what they were measured for, and MLflow compares the runs of one
experiment. A run is one record; the SHA-256 of the file of the record says whether the store has it already. Exports to
a store from one machine take turns; from several machines at once they would have to be told to.
"""

import contextlib
import fcntl
import hashlib
import json
import logging
import math
import os
import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from datetime import datetime
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, TypeVar

from slimqwen import redaction
from slimqwen.errors import SlimqwenError
from slimqwen.progress import Progress, silent
from slimqwen.records import frame, provenance
from slimqwen.records.collection import Found, Problem, collect

if TYPE_CHECKING:
    from mlflow import MlflowClient

EXPERIMENT = "slimqwen"

_TAG = "slimqwen."
_WHOLE = f"{_TAG}sha256"
"""The last thing that a run is given: without it, it is what a cut-off export has left."""

_RECORD = f"{_TAG}record"
_ASKED = ("suite", "workload", "plan", "limit", "endpoint", "rounds", "baseline")
# The tracking API's own limits.
_METRICS_AT_ONCE, _PARAMS_AT_ONCE, _LONGEST_PARAM = 1000, 100, 6000
_PAGE = 1000

_Entity = TypeVar("_Entity")


class MlflowExportError(SlimqwenError):
    """MLflow is not installed, or its store cannot be used."""


@dataclass(frozen=True)
class Exported:
    """How an export came out.

    Attributes:
        uri: of the tracking store, without credentials.
        added: the places of the records that became runs.
        known: how many the store had already.
        problems: files that are no usable records, and were left out.
    """

    uri: str
    added: tuple[str, ...]
    known: int
    problems: tuple[Problem, ...]


def export(root: Path, uri: str | None = None, progress: Progress = silent) -> Exported:
    """Send every record that a tracking store does not have yet; a second export waits for the first.

    Args:
        root: the repository.
        uri: of the store, such as http://host:5000 or sqlite:////absolute/file.db; by default the SQLite file
            mlruns/mlflow.db of the repository, with the artifacts beside it.
        progress: told of each record.

    Raises:
        MlflowExportError: MLflow is not installed, or the store cannot be reached or written; the records sent so far
            are whole, and the next export goes on after them.
    """
    # Read when it is imported: nothing here tells anybody that it runs.
    os.environ.setdefault("MLFLOW_DISABLE_TELEMETRY", "true")
    try:
        from mlflow import MlflowClient
        from mlflow.exceptions import MlflowException
    except ImportError as error:
        raise MlflowExportError(f"MLflow is not installed ({error}); `make install` installs it") from error
    for name in ("mlflow", "alembic"):
        logging.getLogger(name).setLevel(logging.WARNING)
    if uri is None:
        (root / "mlruns").mkdir(exist_ok=True)
        uri = f"sqlite:///{root / 'mlruns' / 'mlflow.db'}"
    public, everything = redaction.text(uri), collect(root)
    try:
        with _alone(root, uri, progress):
            client = MlflowClient(tracking_uri=uri)
            experiment = _experiment(client, uri)
            known = _known(client, experiment)
            new = [(found, digest) for found in everything.records if (digest := _sha256(found)) not in known]
            figures = _figures(root) if new else {}
            for number, (found, digest) in enumerate(new):
                progress("sending records", number, len(new))
                _send(client, experiment, found, digest, figures.get(found.place, {}))
    except (MlflowException, OSError) as error:
        reason = redaction.text(" ".join(str(error).split()))[:300]
        raise MlflowExportError(
            f"{public}: {reason}; check URI, and that the store runs and can be written"
        ) from error
    progress("sending records", len(new), len(new))
    added = tuple(found.place for found, _ in new)
    return Exported(public, added, len(everything.records) - len(added), everything.problems)


@contextlib.contextmanager
def _alone(root: Path, uri: str, progress: Progress) -> Iterator[None]:
    """Wait until no other process of this machine exports to the store; its half-sent runs would look cut off."""
    scheme, _, database = uri.partition(":///")
    if scheme == "sqlite":
        lock = Path(f"{database}.lock").absolute()
    else:
        lock = root / ".cache" / f"mlflow_{hashlib.sha256(uri.encode()).hexdigest()[:16]}.lock"
        lock.parent.mkdir(exist_ok=True)
    with lock.open("w") as held:
        try:
            fcntl.flock(held, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            progress("waiting for another export", 0, 0)
            fcntl.flock(held, fcntl.LOCK_EX)
        yield


def _experiment(client: "MlflowClient", uri: str) -> str:
    """The experiment's id; made where it is missing, its artifacts beside a database file."""
    experiment = client.get_experiment_by_name(EXPERIMENT)
    if experiment is not None:
        return str(experiment.experiment_id)
    scheme, _, file = uri.partition(":///")
    beside = (Path(file).parent / "artifacts").absolute().as_uri() if scheme == "sqlite" else None
    return str(client.create_experiment(EXPERIMENT, artifact_location=beside))


def _known(client: "MlflowClient", experiment: str) -> set[str]:
    """The digests of the records that are runs already; what a cut-off export has left is deleted."""
    digests: set[str] = set()
    cut_off = []
    token: str | None = None
    while True:
        page = client.search_runs([experiment], max_results=_PAGE, page_token=token)
        for run in page:
            if _WHOLE in run.data.tags:
                digests.add(run.data.tags[_WHOLE])
            elif _RECORD in run.data.tags:
                cut_off.append(run.info.run_id)
        token = page.token
        if not token:
            break
    for run_id in cut_off:
        client.delete_run(run_id)
    return digests


def _send(
    client: "MlflowClient", experiment: str, found: Found, digest: str, figures: Mapping[str, float]
) -> None:
    from mlflow.entities import Metric, Param

    block = found.record["provenance"]
    started, ended = (_milliseconds(block[key]) for key in ("started", "ended"))
    name = f"{found.variant} {found.path.stem}".strip()
    run = client.create_run(experiment, start_time=started, run_name=name, tags=_tags(found)).info.run_id
    for metrics in _batches(
        (Metric(key, value, ended, 0) for key, value in figures.items()), _METRICS_AT_ONCE
    ):
        client.log_batch(run, metrics=metrics)
    for params in _batches((Param(key, value) for key, value in _params(found).items()), _PARAMS_AT_ONCE):
        client.log_batch(run, params=params)
    client.log_artifact(run, str(found.path))
    if "items" in found.record:
        client.log_artifact(run, str(found.path.with_name(found.record["items"]["file"])))
    client.set_terminated(run, "FINISHED", end_time=ended)
    client.set_tag(run, _WHOLE, digest)


def _tags(found: Found) -> dict[str, str]:
    block = found.record["provenance"]
    weights = block.get("checkpoint")
    said = {
        "record": found.place,
        "variant": found.variant,
        "kind": found.kind,
        "verdict": found.record.get("verdict"),
        "checkpoint": weights["digest"] if isinstance(weights, Mapping) else weights,
        "hardware": provenance.hardware_name(block["hardware"]),
        "commit": block["git"]["commit"],
        "dirty": block["git"]["dirty"],
        "command": block["command"],
        "vllm": block["packages"].get("vllm"),
    }
    tags = {f"{_TAG}{name}": str(value) for name, value in said.items() if value not in (None, "")}
    commit = block["git"]["commit"]
    # MLflow's own name, which its pages link.
    return tags | ({"mlflow.source.git.commit": commit} if commit else {})


def _params(found: Found) -> dict[str, str]:
    """What was asked, and vLLM's flags."""
    asked = {name: found.record[name] for name in _ASKED if name in found.record}
    flags = found.record["provenance"].get("flags", {})
    return {
        _key(name): (value if isinstance(value, str) else json.dumps(value))[:_LONGEST_PARAM]
        for name, value in {**flags, **asked}.items()
    }


def _figures(root: Path) -> dict[str, dict[str, float]]:
    """Place -> the figures of that record by name, each with its error and interval where it has them."""
    found: dict[str, dict[str, float]] = {}
    endings = ("", ".standard_error", ".low", ".high")
    rows = frame.load(root)[["place", "group", "measure", "value", "standard_error", "low", "high"]]
    for place, group, measure, *numbers in rows.itertuples(index=False, name=None):
        name = f"{group}/{measure}" if group else measure
        found.setdefault(place, {}).update(
            (_key(name + ending), float(number))
            for ending, number in zip(endings, numbers, strict=True)
            if not math.isnan(number)
        )
    return found


def _key(name: str) -> str:
    """The name in the letters that MLflow takes."""
    return re.sub(r"[^\w\-. :/]", "_", name)


def _batches(all_of: Iterable[_Entity], size: int) -> Iterator[list[_Entity]]:
    rest = iter(all_of)
    while some := list(islice(rest, size)):
        yield some


def _milliseconds(moment: str) -> int:
    return int(datetime.fromisoformat(moment).timestamp() * 1000)


def _sha256(found: Found) -> str:
    return hashlib.sha256(found.path.read_bytes()).hexdigest()
