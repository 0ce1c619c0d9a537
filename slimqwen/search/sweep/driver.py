"""The driver of a sweep: submits tasks as their inputs become ready, and writes every record itself.

Results of tasks are kept in .cache/sweep/ until every variant has ended: the same command goes on from there.
"""

import hashlib
import json
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

from slimqwen import variant as variants
from slimqwen.errors import SlimqwenError
from slimqwen.evals import gate, quality_parts
from slimqwen.evals.engine import modes
from slimqwen.evals.engine.modes import EngineModes
from slimqwen.evals.gate import Evidence, Gate, GateSettings
from slimqwen.evals.quality_parts import PartAnswers
from slimqwen.evals.suites.suite import Suite
from slimqwen.records import migrations, provenance, registry, store
from slimqwen.records.journal import Journal, locked
from slimqwen.search import SearchError
from slimqwen.search.executors import Executor, Failure, Outcome, Task
from slimqwen.search.sweep import required_tasks
from slimqwen.search.sweep.required_tasks import Measurements, Options
from slimqwen.search.sweep.tasks import UnwrittenRecord
from slimqwen.variant import Variant

_WRITE_ATTEMPTS = 3


@dataclass(frozen=True)
class SweepResult:
    """The result of a sweep for one variant.

    Attributes:
        variant: its name.
        records: records that it rests on, in the order of their measurement; the gate's record last.
        failure: why its measurement failed; None where it did not.
        outcome: verdict of its gate; empty without one.
    """

    variant: str
    records: list[Path]
    failure: str | None
    outcome: str


@dataclass
class _Subject:
    """A variant on its way through the sweep.

    Attributes:
        started: start of the sweep, UTC.
        waiting_keys: keys of its tasks that have not ended.
        stage_keys: keys of the stages that were submitted for it.
        measurements: its tasks and reusable records; None until both checkpoints exist.
        earlier_keys: keys of the tasks that an earlier run ended.
    """

    variant: Variant
    baseline: Variant
    started: str
    waiting_keys: set[str] = field(default_factory=set)
    stage_keys: set[str] = field(default_factory=set)
    measurements: Measurements | None = None
    earlier_keys: set[str] = field(default_factory=set)
    failure: str | None = None
    result: SweepResult | None = None


def sweep(names: Sequence[str], options: Options, executor: Executor, root: Path) -> list[SweepResult]:
    """Measure variants against their baselines, and write their records.

    A variant whose task fails ends there, with the reason; the others go on.

    Args:
        names: variants.
        options: the measurements and their settings.
        executor: where tasks run; entered here.
        root: the repository.

    Returns:
        One result per variant, in the order of the names.

    Raises:
        SlimqwenError: a variant has no baseline or no usable config.env, or the executor cannot work.
    """
    started = provenance.utc_now()
    subjects = []
    for name in dict.fromkeys(names):
        subject = variants.load(name, root)
        if subject.baseline is None:
            raise SearchError(
                f"{name} has no baseline to compare with; leave it out, because baselines are measured beside variants"
            )
        subjects.append(_Subject(subject, variants.load(subject.baseline, root), started))
    with locked(_journal(names, options, root)) as journal, executor:
        _Driver(subjects, options, executor, journal, root).run()
        if not any(subject.failure for subject in subjects):
            journal.discard()
    return [_result(subject) for subject in subjects]


def _result(subject: _Subject) -> SweepResult:
    return subject.result or SweepResult(subject.variant.name, [], subject.failure, "")


class _Driver:
    def __init__(
        self,
        subjects: Sequence[_Subject],
        options: Options,
        executor: Executor,
        journal: Journal,
        root: Path,
    ) -> None:
        self._subjects, self._options, self._executor = subjects, options, executor
        self._journal, self._root = journal, root
        self._values: dict[str, Any] = {}

    def run(self) -> None:
        """Submit tasks and take their outcomes until no variant waits for one."""
        for subject in self._subjects:
            self._advance(subject)
        while self._executor.pending:
            self._take(self._executor.wait())

    def _take(self, outcome: Outcome) -> None:
        if not isinstance(outcome, Failure):
            self._values[outcome.key] = outcome.value
            if outcome.value is not None:  # a stage is in the store
                self._journal.add(outcome.key, outcome.value)
        for subject in self._subjects:
            if outcome.key not in subject.waiting_keys:
                continue
            subject.waiting_keys.discard(outcome.key)
            if isinstance(outcome, Failure):
                subject.failure = subject.failure or outcome.reason
            elif not subject.waiting_keys:
                self._advance(subject)

    def _advance(self, subject: _Subject) -> None:
        """Submit the tasks that the variant needs next, or write its records where none is missing."""
        if subject.failure:
            return
        try:
            if subject.measurements is None:
                for side in (subject.baseline, subject.variant):
                    if stage := required_tasks.next_stage(side):
                        if stage.key in subject.stage_keys:
                            raise SearchError(
                                f"{stage.title} ended and left nothing; see its log in weights/store"
                            )
                        subject.stage_keys.add(stage.key)
                        self._submit(subject, stage)
                        return
                    side.require_weights()
                with self._executor.as_task():
                    subject.measurements = required_tasks.measurements(
                        subject.variant, subject.baseline, self._options
                    )
                for task in _tasks(subject.measurements):
                    value = self._journal.get(task.key)
                    if value is None:
                        self._submit(subject, task)
                    else:
                        self._values[task.key] = value
                        subject.earlier_keys.add(task.key)
            if not subject.waiting_keys:
                subject.result = self._finish(subject, subject.measurements)
        except SlimqwenError as error:
            subject.failure = str(error)

    def _submit(self, subject: _Subject, task: Task) -> None:
        self._executor.submit(task)
        subject.waiting_keys.add(task.key)

    def _finish(self, subject: _Subject, measurements: Measurements) -> SweepResult:
        """Write a variant's records, once: an interrupted run does not write them again."""
        name = subject.variant.name
        key = ["written", name, [task.key for task in _tasks(measurements)], _as_texts(measurements.records)]
        entry = self._journal.get(key)
        if entry is None:
            paths = self._write(subject, measurements)
            outcome = ""
            if "gate" in self._options.measures:
                paths["gate"] = [self._conclude(subject, paths)]
                outcome = store.read(paths["gate"][0], Gate).outcome
            entry = {"paths": _as_texts(paths), "outcome": outcome}
            self._journal.add(key, entry)
        records = [Path(path) for group in entry["paths"].values() for path in group]
        return SweepResult(name, records, None, entry["outcome"])

    def _write(self, subject: _Subject, measurements: Measurements) -> dict[str, list[Path]]:
        """Records by the name of their measurement."""
        paths: dict[str, list[Path]] = {check: list(group) for check, group in measurements.records.items()}
        for check, tasks in measurements.by_check.items():
            if check == "quality":
                paths[check] = self._write_quality(subject, tasks)
                continue
            (task,) = tasks
            paths[check] = [self._publish(each) for each in self._values[task.key]]
            if check == "engine":
                (path,) = paths[check]
                modes.update_unsafe_engines(store.read(path, EngineModes), path, self._root)
        return paths

    def _write_quality(self, subject: _Subject, parts: Sequence[Task]) -> list[Path]:
        suite = Suite.load(parts[0].argument["suite"], self._root)
        earlier = [number for number, task in enumerate(parts) if task.key in subject.earlier_keys]
        paths = []
        for side in (subject.baseline, subject.variant):
            answers = [PartAnswers.from_json(self._values[task.key][side.name], suite) for task in parts]
            write = partial(
                quality_parts.write,
                side,
                suite,
                answers,
                limit=self._options.limit,
                split=suite.split(self._options.split),
                earlier=earlier,
                folder=self._folder(side.name),
            )
            paths.append(_write_with_retries(write))
        kinds = {provenance.hardware_name(store.read(path).provenance.hardware) for path in paths}
        if len(kinds) > 1:
            raise SearchError(
                f"{subject.variant.name} and its baseline were scored on different hardware ({'; '.join(kinds)})"
            )
        return paths

    def _publish(self, unwritten: UnwrittenRecord) -> Path:
        kind, _ = migrations.named(unwritten["record"]["schema"])
        record = registry.kinds()[kind].model_validate(unwritten["record"])
        return _write_with_retries(
            partial(store.write, self._folder(unwritten["variant"]), record, unwritten["items"])
        )

    def _folder(self, name: str) -> Path:
        return self._root / self._options.records / name

    def _conclude(self, subject: _Subject, paths: Mapping[str, Sequence[Path]]) -> Path:
        variant = subject.variant
        settings = GateSettings.of_variant(variant, variant.evaluation)
        engine = store.read(paths["engine"][0], EngineModes).provenance
        block = provenance.describe_again(
            engine, self._options.command, subject.started, self._root, [settings.file(self._root)]
        )
        evidence = Evidence(
            paths["fidelity"][0], tuple(paths["acceptance"]), tuple(paths["quality"]), paths["engine"][0]
        )
        conclude = partial(
            gate.conclude,
            variant,
            variant.evaluation,
            evidence,
            command=self._options.command,
            started=subject.started,
            block=block,
        )
        return _write_with_retries(conclude)


def _tasks(measurements: Measurements) -> list[Task]:
    return [task for tasks in measurements.by_check.values() for task in tasks]


def _as_texts(paths: Mapping[str, Sequence[Any]]) -> dict[str, list[str]]:
    return {check: list(map(str, group)) for check, group in paths.items()}


def _write_with_retries(write: Any) -> Path:
    """Write a record; try again a second later where a record of its kind already has the name of this second."""
    for attempt in range(_WRITE_ATTEMPTS):
        try:
            path: Path = write()
            return path
        except store.RecordExistsError:
            if attempt == _WRITE_ATTEMPTS - 1:
                raise
            time.sleep(1)
    raise AssertionError


def _journal(names: Sequence[str], options: Options, root: Path) -> Path:
    text = json.dumps([sorted(set(names)), options.as_json()], sort_keys=True)
    return root / ".cache" / "sweep" / f"{hashlib.sha256(text.encode()).hexdigest()[:16]}.jsonl"
