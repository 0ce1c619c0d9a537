"""Export of records to an MLflow tracking store: one MLflow experiment with a run for each record."""

import json
import logging
import os
import re
from collections.abc import Iterator
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import Any

from slimqwen import redaction
from slimqwen.checkpoint.files import sha256
from slimqwen.errors import SlimqwenError
from slimqwen.progress import Progress, silent
from slimqwen.records import provenance
from slimqwen.records.collection import Problem, StoredRecord, collect
from slimqwen.records.record import Record

EXPERIMENT = "slimqwen"
_DIGEST = "slimqwen.sha256"
"""Name of the tag of a complete run; its value is the SHA-256 of the record's file."""

_LONGEST_PARAM, _MOST_RUNS, _METRICS_AT_ONCE = 6000, 50_000, 1000  # limits of the tracking API


class MlflowExportError(SlimqwenError):
    """MLflow is not installed, or its store cannot be used."""


@dataclass(frozen=True)
class ExportResult:
    """The outcome of an export.

    Attributes:
        uri: URI of the store, without credentials.
        added: records that were sent.
        known: number of records that the store had already.
        problems: files that were left out.
    """

    uri: str
    added: tuple[str, ...]
    known: int
    problems: tuple[Problem, ...]


def export_records(root: Path, uri: str, progress: Progress = silent) -> ExportResult:
    """Send every record that a tracking store lacks.

    Args:
        uri: URI of the store, such as http://host:5000; the folder of an SQLite file is created.

    Raises:
        MlflowExportError: MLflow is not installed, or the store cannot be used; another call sends what is missing.
    """
    os.environ.setdefault("MLFLOW_DISABLE_TELEMETRY", "true")  # MLflow reads the variable at import
    try:
        from mlflow import MlflowClient
        from mlflow.exceptions import MlflowException
    except ImportError as error:
        raise MlflowExportError(f"MLflow is not installed ({error}); run `make install`") from error
    for name in ("mlflow", "alembic"):
        logging.getLogger(name).setLevel(logging.WARNING)
    shown_uri, records = redaction.text(uri), collect(root)
    try:
        client = MlflowClient(tracking_uri=uri)
        experiment = client.get_experiment_by_name(EXPERIMENT)
        experiment_id = experiment.experiment_id if experiment else _create_experiment(client, uri)
        runs = client.search_runs([experiment_id], max_results=_MOST_RUNS)
        known = {run.data.tags.get(_DIGEST) for run in runs}
        new = [(entry, digest) for entry in records.records if (digest := sha256(entry.path)) not in known]
        for number, (entry, digest) in enumerate(new):
            progress("sending records", number, len(new))
            _send_record(client, experiment_id, entry, digest)
    except (MlflowException, OSError) as error:
        reason = redaction.text(" ".join(str(error).split()))[:300]
        raise MlflowExportError(f"{shown_uri}: {reason}; check URI and write access") from error
    added = tuple(entry.location for entry, _ in new)
    return ExportResult(shown_uri, added, len(records.records) - len(added), records.problems)


def _create_experiment(client: Any, uri: str) -> str:
    scheme, _, file = uri.partition(":///")
    artifacts = (Path(file).parent / "artifacts").absolute().as_uri() if scheme == "sqlite" else None
    return str(client.create_experiment(EXPERIMENT, artifact_location=artifacts))


def _send_record(client: Any, experiment_id: str, entry: StoredRecord[Record], digest: str) -> None:
    """Write a run with the record's figures, flags and files; an interrupted run of the same record is deleted."""
    from mlflow.entities import Metric, Param, RunTag

    block = entry.record.provenance
    started, ended = (
        int(datetime.fromisoformat(moment).timestamp() * 1000) for moment in (block.started, block.ended)
    )
    run = client.create_run(experiment_id, start_time=started, run_name=f"{entry.variant} {entry.path.stem}")
    try:
        metrics = [Metric(key, number, ended, 0) for key, number in _metrics(entry.record)]
        for first in range(0, len(metrics), _METRICS_AT_ONCE):
            client.log_batch(run.info.run_id, metrics=metrics[first : first + _METRICS_AT_ONCE])
        params = [
            Param(name, (value if isinstance(value, str) else json.dumps(value))[:_LONGEST_PARAM])
            for name, value in block.flags.items()
        ]
        client.log_artifact(run.info.run_id, str(entry.path))
        if entry.record.items:
            client.log_artifact(run.info.run_id, str(entry.path.with_name(entry.record.items.file)))
        tags = [RunTag(f"slimqwen.{name}", value) for name, value in _tags(entry).items() if value]
        client.log_batch(run.info.run_id, params=params, tags=[*tags, RunTag(_DIGEST, digest)])
        client.set_terminated(run.info.run_id, "FINISHED", end_time=ended)
    except BaseException:
        client.delete_run(run.info.run_id)
        raise


def _metrics(record: Record) -> Iterator[tuple[str, float]]:
    for name, figure in record.figures().items():
        for end in ("value", "standard_error", "low", "high"):
            if (number := getattr(figure, end)) is not None:
                yield re.sub(r"[^\w\-. :/]", "_", name if end == "value" else f"{name}.{end}"), float(number)


def _tags(entry: StoredRecord[Record]) -> dict[str, str | None]:
    block = entry.record.provenance
    return {
        "record": entry.location, "variant": entry.variant, "kind": entry.kind, "verdict": entry.record.outcome,
        "checkpoint": block.checkpoint_digest, "hardware": provenance.hardware_name(block.hardware),
        "commit": block.git.commit, "command": block.command,
    }  # fmt: skip
