"""The driver of a sweep: submits tasks as their inputs become ready, and writes every record itself.

Results of tasks are kept in .cache/sweep/ until every variant has ended: the same command goes on from there.
"""

import hashlib
import json
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

from slimqwen import variant as variants
from slimqwen.errors import SlimqwenError
from slimqwen.evals import gate, quality
from slimqwen.evals.engine import EngineCheck
from slimqwen.evals.gate import Gate, GateSettings
from slimqwen.evals.quality import ScoredPart
from slimqwen.evals.suites.suite import Suite
from slimqwen.records import provenance, registry, store
from slimqwen.records.journal import Journal, locked
from slimqwen.records.record import Provenance
from slimqwen.search import SearchError
from slimqwen.search.executors import Executor, Failure, Outcome, Task
from slimqwen.search.sweep import required_tasks
from slimqwen.search.sweep.required_tasks import Checks, Options
from slimqwen.search.sweep.tasks import UnwrittenRecord
from slimqwen.variant import Variant

_FURTHER_WRITES = 2
_SETUP = "setup"

_P = TypeVar("_P", bound=Provenance)


@dataclass(frozen=True)
class SweepResult:
    """The result of a sweep for one variant.

    Attributes:
        records: records that it rests on, in the order of their measurement; the gate's record last.
        failures: failed measurements by name; `_SETUP` where there was nothing to measure.
        outcome: verdict of its gate; empty without one.
        earlier: titles of its tasks that an interrupted run had finished.
    """

    variant: str
    records: list[Path]
    failures: Mapping[str, Failure]
    outcome: str = ""
    earlier: tuple[str, ...] = ()

    @property
    def failure(self) -> str | None:
        """Why measurements failed; None where none did."""
        return "; ".join(dict.fromkeys(each.reason for each in self.failures.values())) or None


@dataclass
class _Subject:
    """A variant on its way through the sweep.

    Attributes:
        started: start of the sweep, UTC.
        tasks: tasks that measure it and its baseline.
        measures: name of the measurement of each of these tasks, by key.
        waiting_keys: keys of its tasks that have not ended.
        stage_keys: keys of the stages that were submitted for it.
        complete: names of the sides whose recipe is made to its end.
        checks: checks of its baseline and of itself, by name; a side is missing until its checkpoint answers.
        timing: task that times both; None until it is submitted.
    """

    variant: Variant
    baseline: Variant
    started: str
    tasks: list[Task] = field(default_factory=list)
    measures: dict[str, str] = field(default_factory=dict)
    waiting_keys: set[str] = field(default_factory=set)
    stage_keys: set[str] = field(default_factory=set)
    complete: set[str] = field(default_factory=set)
    checks: dict[str, Checks] = field(default_factory=dict)
    timing: Task | None = None
    failures: dict[str, Failure] = field(default_factory=dict)
    result: SweepResult | None = None


def sweep(names: Sequence[str], options: Options, executor: Executor, root: Path) -> list[SweepResult]:
    """Measure variants against their baselines, and write their records.

    A variant of which a stage fails ends there, with the reason. Where a measurement fails, the others go on.

    Args:
        executor: entered here.

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
        if not any(subject.failures for subject in subjects):
            journal.discard()
    return [subject.result or SweepResult(subject.variant.name, [], subject.failures) for subject in subjects]


@dataclass
class _Driver:
    _subjects: Sequence[_Subject]
    _options: Options
    _executor: Executor
    _journal: Journal
    _root: Path
    _values: dict[str, Any] = field(default_factory=dict)
    _earlier_keys: set[str] = field(default_factory=set)

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
                subject.failures.setdefault(subject.measures.get(outcome.key, _SETUP), outcome)
            self._advance(subject)

    def _advance(self, subject: _Subject) -> None:
        """Submit the tasks that the variant can begin now, or write its records where none is missing.

        The baseline is checked while the variant is made, the variant as soon as its answers are decided; both are
        timed at the end.
        """
        # Nothing follows from some checks of a gate.
        if _SETUP in subject.failures or (subject.failures and "gate" in self._options.measures):
            return
        if subject.result:
            return
        try:
            if not self._is_made(subject, subject.baseline):
                return
            self._check(subject, subject.baseline)
            if not self._is_made(subject, subject.variant):
                return
            self._check(subject, subject.variant)
            if subject.timing is None and "latency" in self._options.measures:
                with self._executor.as_task():
                    subject.timing = required_tasks.timing(subject.variant, subject.baseline, self._options)
                self._submit(subject, "latency", [subject.timing])
            if not subject.waiting_keys:
                subject.result = self._finish(subject)
        except SlimqwenError as error:
            subject.failures[_SETUP] = Failure(subject.variant.name, str(error), error)

    def _is_made(self, subject: _Subject, side: Variant) -> bool:
        """Whether the recipe of a side is made to its end; submits the next stage where none is at work.

        A side is checked while its last stage is at work, if its answers do not depend on that.
        """
        if side.name in subject.complete:
            return True
        if subject.stage_keys & subject.waiting_keys:
            return False
        stage = required_tasks.next_stage(side)
        if stage is None:
            side.require_weights()
            subject.complete.add(side.name)
            return True
        if stage.key in subject.stage_keys:
            raise SearchError(f"{stage.title} ended and left nothing; see its log in weights/store")
        subject.stage_keys.add(stage.key)
        self._executor.submit(stage)
        subject.waiting_keys.add(stage.key)
        if self._makes_only_a_cache(stage, side):
            self._check(subject, side)
        return False

    def _makes_only_a_cache(self, stage: Task, side: Variant) -> bool:
        """Whether a stage makes a compile cache that fits no task with a share of the CPUs.

        Checks that run before such a cache is there and after it have the same environment.
        """
        if not required_tasks.answers_are_decided(side):
            return False
        with self._executor.as_task():
            stage_of_task = required_tasks.next_stage(side)
        return stage_of_task is not None and stage_of_task.key != stage.key

    def _check(self, subject: _Subject, side: Variant) -> None:
        """Submit the checks of a side, once."""
        if side.name in subject.checks:
            return
        with self._executor.as_task():
            checks = required_tasks.checks(side, (subject.baseline, subject.variant), self._options)
        subject.checks[side.name] = checks
        for check, tasks in checks.tasks.items():
            self._submit(subject, check, tasks)

    def _submit(self, subject: _Subject, measure: str, tasks: Sequence[Task]) -> None:
        """Submit the tasks of a measurement whose values are not known, from this run or an earlier one."""
        subject.tasks += tasks
        subject.measures |= {task.key: measure for task in tasks}
        for task in tasks:
            if task.key in self._values:
                continue
            value = self._journal.get(task.key)
            if value is None:
                self._executor.submit(task)
                subject.waiting_keys.add(task.key)
            else:
                self._values[task.key] = value
                self._earlier_keys.add(task.key)

    def _finish(self, subject: _Subject) -> SweepResult:
        """Write a variant's records, but for those of failed measurements."""
        paths: dict[str, list[Path]] = {}
        for side in (subject.baseline, subject.variant):
            checks = subject.checks[side.name]
            for check, path in checks.records.items():
                paths.setdefault(check, []).append(path)
            for check, tasks in checks.tasks.items():
                if check in subject.failures:
                    continue
                keys = [task.key for task in tasks]
                written = self._write_once(keys, partial(self._write_check, side, check, tasks))
                paths.setdefault(check, []).extend(written)
        kinds = {
            provenance.hardware_name(store.read_record(path).provenance.hardware)
            for path in paths.get("quality", ())
        }
        if len(kinds) > 1:
            raise SearchError(
                f"{subject.variant.name} and its baseline were scored on different hardware ({'; '.join(kinds)}); "
                "run the sweep on nodes of one kind"
            )
        if (timing := subject.timing) and "latency" not in subject.failures:
            baseline, variant = self._values[timing.key]
            paths["latency"] = self._write_once(
                [timing.key],
                partial(self._publish, baseline, subject.baseline),
                partial(self._publish, variant, subject.variant),
            )
        outcome = ""
        if "gate" in self._options.measures and not subject.failures:
            inputs = [str(path) for group in paths.values() for path in group]
            paths["gate"] = self._write_once(
                ["gate", subject.variant.name, *inputs], partial(self._conclude, subject, paths)
            )
            outcome = store.read_record(paths["gate"][0], Gate).outcome
        records = [path for group in paths.values() for path in group]
        earlier = tuple(task.title for task in subject.tasks if task.key in self._earlier_keys)
        return SweepResult(subject.variant.name, records, subject.failures, outcome, earlier)

    def _write_once(self, key: Sequence[str], *writes: Callable[[], Path]) -> list[Path]:
        """The paths that functions write; those of the first call for variants and runs with the same key."""
        entry = self._journal.get(["written", *key])
        if entry is None:
            entry = [str(_write_with_retries(write)) for write in writes]
            self._journal.add(["written", *key], entry)
        return [Path(path) for path in entry]

    def _write_check(self, side: Variant, check: str, tasks: Sequence[Task]) -> Path:
        if check == "quality":
            return self._write_quality(side, tasks)
        (unwritten,) = self._values[tasks[0].key]
        return self._publish(unwritten, side)

    def _write_quality(self, side: Variant, parts: Sequence[Task]) -> Path:
        suite = Suite.load(parts[0].argument["suite"], self._root)
        answers = []
        for task in parts:
            part = ScoredPart.from_json(self._values[task.key][side.name])
            answers.append(replace(part, block=_with_present_files(part.block, side)))
        return quality.write_quality_record(
            side,
            suite,
            answers,
            limit=self._options.limit,
            split=suite.split(self._options.split),
            folder=self._folder(side.name),
        )

    def _publish(self, unwritten: UnwrittenRecord, side: Variant) -> Path:
        kind = unwritten["record"]["schema"].partition("/")[0]
        record = registry.kinds()[kind].model_validate(unwritten["record"])
        block = _with_present_files(record.provenance, side)
        record = record.model_copy(update={"provenance": block})
        return store.write_record(self._folder(unwritten["variant"]), record, unwritten["items"])

    def _folder(self, name: str) -> Path:
        return self._root / self._options.records / name

    def _conclude(self, subject: _Subject, paths: Mapping[str, Sequence[Path]]) -> Path:
        variant = subject.variant
        settings = GateSettings.load(variant.evaluation, variant.root)
        engine = store.read_record(paths["engine"][0], EngineCheck).provenance
        block = provenance.describe_again(
            engine, self._options.command, subject.started, self._root, [settings.file(self._root)]
        )
        return gate.write_gate_record(
            variant,
            variant.evaluation,
            paths,
            command=self._options.command,
            started=subject.started,
            block=block,
        )


def _with_present_files(block: _P, side: Variant) -> _P:
    """A provenance with the size of the checkpoint as it is now: a cache may have come after the measurement."""
    files = provenance.checkpoint_files(side.weights, side.root)
    if block.checkpoint_digest != files.digest:
        return block
    return block.model_copy(update={"checkpoint": files})


def _write_with_retries(write: Callable[[], Path]) -> Path:
    """Write a record; try again a second later where a record of its kind already has the name of this second."""
    for _ in range(_FURTHER_WRITES):
        with suppress(store.RecordExistsError):
            return write()
        time.sleep(1)
    return write()


def _journal(names: Sequence[str], options: Options, root: Path) -> Path:
    # Runs of the same sweep may differ in these two.
    shared = {name: value for name, value in vars(options).items() if name not in ("parts", "command")}
    text = json.dumps([sorted(set(names)), shared], sort_keys=True)
    return root / ".cache" / "sweep" / f"{hashlib.sha256(text.encode()).hexdigest()[:16]}.jsonl"
