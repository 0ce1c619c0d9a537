"""Export of records to an MLflow tracking store.

All variants are in one experiment, because MLflow compares the runs of one experiment. A run is one record; the SHA-256
of the record's file says whether the store has it already. Exports from one machine to one store take turns.
"""

import hashlib
import json
import logging
import os
import re
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import TYPE_CHECKING

from slimqwen import redaction
from slimqwen.checkpoint.files import sha256
from slimqwen.errors import SlimqwenError
from slimqwen.file_lock import hold_lock
from slimqwen.progress import Progress, silent
from slimqwen.records import provenance
from slimqwen.records.collection import Problem, StoredRecord, collect
from slimqwen.records.record import Record

if TYPE_CHECKING:
    from mlflow import MlflowClient

EXPERIMENT = "slimqwen"

_TAG = "slimqwen."
_DIGEST = f"{_TAG}sha256"
"""The last tag of a complete run; a run without it was left by an interrupted export."""

_RECORD = f"{_TAG}record"
_SETTINGS = ("suite", "workload", "plan", "limit", "split", "endpoint", "rounds", "baseline")
# The tracking API's own limits.
_METRICS_AT_ONCE, _PARAMS_AT_ONCE, _LONGEST_PARAM, _RUNS_AT_ONCE = 1000, 100, 6000, 1000


class MlflowExportError(SlimqwenError):
    """MLflow is not installed, or its store cannot be used."""


@dataclass(frozen=True)
class ExportResult:
    """What an export sent, and to which store.

    Attributes:
        uri: of the tracking store, without credentials.
        added: locations of the records that became runs.
        known: number of records that the store had already.
        problems: files that were left out.
    """

    uri: str
    added: tuple[str, ...]
    known: int
    problems: tuple[Problem, ...]


def export(root: Path, uri: str | None = None, progress: Progress = silent) -> ExportResult:
    """Send every record that a tracking store does not have yet; a second export waits for the first to end.

    Args:
        uri: of the store, such as http://host:5000 or sqlite:////absolute/file.db; by default the SQLite file
            mlruns/mlflow.db of the repository, with the artifacts beside it.

    Raises:
        MlflowExportError: MLflow is not installed, or the store cannot be reached or written; the records sent so far
            are complete, and the next export sends the others.
    """
    # MLflow reads the variable when it is imported.
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
    shown_uri, records = redaction.text(uri), collect(root)
    try:
        with hold_lock(_lock_file(root, uri), reason="another export", progress=progress):
            client = MlflowClient(tracking_uri=uri)
            experiment = _experiment(client, uri)
            known = _known_digests(client, experiment)
            new = [
                (entry, digest) for entry in records.records if (digest := sha256(entry.path)) not in known
            ]
            for number, (entry, digest) in enumerate(new):
                progress("sending records", number, len(new))
                _send(client, experiment, entry, digest)
    except (MlflowException, OSError) as error:
        reason = redaction.text(" ".join(str(error).split()))[:300]
        raise MlflowExportError(
            f"{shown_uri}: {reason}; check URI, and that the store runs and can be written"
        ) from error
    progress("sending records", len(new), len(new))
    added = tuple(entry.location for entry, _ in new)
    return ExportResult(shown_uri, added, len(records.records) - len(added), records.problems)


def _lock_file(root: Path, uri: str) -> Path:
    """The lock of a store: a second export from this machine at the same time would delete unfinished runs."""
    scheme, _, database = uri.partition(":///")
    if scheme == "sqlite":
        return Path(f"{database}.lock").absolute()
    return root / ".cache" / f"mlflow_{hashlib.sha256(uri.encode()).hexdigest()[:16]}.lock"


def _experiment(client: "MlflowClient", uri: str) -> str:
    """The id of the experiment, created if missing; artifacts go beside a database file."""
    experiment = client.get_experiment_by_name(EXPERIMENT)
    if experiment is not None:
        return str(experiment.experiment_id)
    scheme, _, file = uri.partition(":///")
    artifacts = (Path(file).parent / "artifacts").absolute().as_uri() if scheme == "sqlite" else None
    return str(client.create_experiment(EXPERIMENT, artifact_location=artifacts))


def _known_digests(client: "MlflowClient", experiment: str) -> set[str]:
    """The digests of the records that the store has; deletes incomplete runs of an interrupted export."""
    digests: set[str] = set()
    incomplete = []
    token: str | None = None
    while True:
        page = client.search_runs([experiment], max_results=_RUNS_AT_ONCE, page_token=token)
        for run in page:
            if _DIGEST in run.data.tags:
                digests.add(run.data.tags[_DIGEST])
            elif _RECORD in run.data.tags:
                incomplete.append(run.info.run_id)
        token = page.token
        if not token:
            break
    for run_id in incomplete:
        client.delete_run(run_id)
    return digests


def _send(client: "MlflowClient", experiment: str, entry: StoredRecord[Record], digest: str) -> None:
    from mlflow.entities import Metric, Param

    block = entry.record.provenance
    started, ended = (_milliseconds(moment) for moment in (block.started, block.ended))
    name = f"{entry.variant} {entry.path.stem}".strip()
    run = client.create_run(experiment, start_time=started, run_name=name, tags=_tags(entry)).info.run_id
    metrics = [Metric(key, value, ended, 0) for key, value in _metrics(entry).items()]
    for start in range(0, len(metrics), _METRICS_AT_ONCE):
        client.log_batch(run, metrics=metrics[start : start + _METRICS_AT_ONCE])
    params = [Param(key, value) for key, value in _params(entry).items()]
    for start in range(0, len(params), _PARAMS_AT_ONCE):
        client.log_batch(run, params=params[start : start + _PARAMS_AT_ONCE])
    client.log_artifact(run, str(entry.path))
    if entry.record.items:
        client.log_artifact(run, str(entry.path.with_name(entry.record.items.file)))
    client.set_terminated(run, "FINISHED", end_time=ended)
    client.set_tag(run, _DIGEST, digest)


def _tags(entry: StoredRecord[Record]) -> dict[str, str]:
    block = entry.record.provenance
    values = {
        "record": entry.location,
        "variant": entry.variant,
        "kind": entry.kind,
        "verdict": entry.record.outcome,
        "checkpoint": block.checkpoint_digest,
        "hardware": provenance.hardware_name(block.hardware),
        "commit": block.git.commit,
        "dirty": block.git.dirty,
        "command": block.command,
        "vllm": block.packages.get("vllm"),
    }
    tags = {f"{_TAG}{name}": str(value) for name, value in values.items() if value not in (None, "")}
    # MLflow's own name, which its pages link.
    return tags | ({"mlflow.source.git.commit": block.git.commit} if block.git.commit else {})


def _params(entry: StoredRecord[Record]) -> dict[str, str]:
    """Settings of the measurement, and vLLM's flags."""
    fields = entry.record.as_json()
    settings = {name: fields[name] for name in _SETTINGS if name in fields}
    return {
        _key(name): (value if isinstance(value, str) else json.dumps(value))[:_LONGEST_PARAM]
        for name, value in {**entry.record.provenance.flags, **settings}.items()
    }


def _metrics(entry: StoredRecord[Record]) -> dict[str, float]:
    """The figures of a record by name, each with its error and interval where it has them."""
    metrics: dict[str, float] = {}
    for name, figure in entry.record.figures().items():
        numbers = {
            "": figure.value,
            ".standard_error": figure.standard_error,
            ".low": figure.low,
            ".high": figure.high,
        }
        metrics |= {_key(name + end): float(number) for end, number in numbers.items() if number is not None}
    checkpoint = entry.record.provenance.checkpoint
    if checkpoint and checkpoint.size_bytes is not None:
        metrics["size_bytes"] = float(checkpoint.size_bytes)
    return metrics


def _key(name: str) -> str:
    """The name in the letters that MLflow takes."""
    return re.sub(r"[^\w\-. :/]", "_", name)


def _milliseconds(moment: str) -> int:
    return int(datetime.fromisoformat(moment).timestamp() * 1000)
