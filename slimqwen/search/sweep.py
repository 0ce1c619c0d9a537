"""Sweeps: the same measurements of many variants against their baselines, as tasks of an executor.

Tasks are submitted as their inputs become ready, and every record is written here. A record that still holds is not
measured again; finished parts of the others are kept in .cache/sweep/, so that the same command goes on from there.
"""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from slimqwen import variant as variants
from slimqwen.bench.latency import Latency
from slimqwen.bench.workload import Workload
from slimqwen.errors import SlimqwenError
from slimqwen.evals import gate, quality
from slimqwen.evals.drafting import AcceptanceSettings
from slimqwen.evals.engine import EngineCheck
from slimqwen.evals.gate import Gate, GateSettings
from slimqwen.evals.suites.suite import Suite
from slimqwen.records import provenance, registry, store
from slimqwen.records.journal import locked
from slimqwen.search import SearchError
from slimqwen.search.executors import Executor, Failure, Result, Task, content_key
from slimqwen.search.measurements import KINDS, WORKLOAD, Measurement, Options, measurement_task, next_stage
from slimqwen.search.scheduler import Scheduler
from slimqwen.variant import Variant

Pair = tuple[Variant, Variant]
"""A baseline and a variant of it."""

SETUP = "setup"
"""Name of the failure of a variant that could not be made or described, so that nothing of it is measured."""

_OF_BOTH_SIDES = ("quality", "acceptance")
"""Checks that compare a record of the variant with one of its baseline."""


@dataclass(frozen=True)
class SweepResult:
    """The result of a sweep for one variant.

    Attributes:
        records: records that it rests on by measurement, the baseline's first; the gate's last.
        reused: those of them that were there before.
        failures: failed measurements by name; `SETUP` where there was nothing to measure.
    """

    variant: str
    records: Mapping[str, Sequence[Path]]
    reused: Sequence[Path]
    failures: Mapping[str, Failure]

    @property
    def failure(self) -> str | None:
        """Why measurements failed; None where none did."""
        return "; ".join(dict.fromkeys(each.reason for each in self.failures.values())) or None


@dataclass
class _Progress:
    """How far a measurement is.

    Attributes:
        paths: its records, one for each side; empty until it has ended well.
        reused: whether the records were there before.
    """

    tasks: Sequence[Task] = ()
    paths: Sequence[Path] = ()
    reused: bool = False
    failure: Failure | None = None

    @property
    def has_ended(self) -> bool:
        return bool(self.paths or self.failure)


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
    pairs: list[Pair] = []
    for name in dict.fromkeys(names):
        variant = variants.load(name, root)
        if variant.baseline is None:
            raise SearchError(
                f"{name} has no baseline to compare with; leave it out, because baselines are measured beside variants"
            )
        pairs.append((variants.load(variant.baseline, root), variant))
    file = root / ".cache" / "sweep" / f"{content_key(sorted(variant.name for _, variant in pairs))}.jsonl"
    with locked(file) as journal, executor:
        driver = _Driver(options, executor, Scheduler(executor, journal), root)
        while True:
            results = [driver.advance(pair) for pair in pairs]
            if not driver.scheduler.is_waiting:
                break
            driver.scheduler.wait()
        ended = [result for result in results if result]
        if not any(result.failures for result in ended):
            journal.discard()
    return ended


@dataclass
class _Driver:
    """A sweep under way.

    Attributes:
        stages: the last task that was submitted to make a side, by its name; None where its recipe is made to its end.
        measurements: by name, last side, and for acceptance the K at which the pair is compared.
        depths: that K by variant.
        results: of the pairs that have ended, by the name of the variant.
    """

    options: Options
    executor: Executor
    scheduler: Scheduler
    root: Path
    started: str = field(default_factory=provenance.utc_now)
    stages: dict[str, Task | None] = field(default_factory=dict)
    measurements: dict[tuple[str, str, int | None], _Progress] = field(default_factory=dict)
    depths: dict[str, int] = field(default_factory=dict)
    results: dict[str, SweepResult] = field(default_factory=dict)

    def advance(self, pair: Pair) -> SweepResult | None:
        """Submit the tasks that a pair can begin now; its result where none is missing."""
        name = pair[1].name
        if name not in self.results:
            try:
                result = self._advance(pair)
            except SlimqwenError as error:
                result = SweepResult(name, {}, (), {SETUP: Failure(name, str(error), error)})
            if result is None:
                return None
            self.results[name] = result
        return self.results[name]

    def _advance(self, pair: Pair) -> SweepResult | None:
        baseline, variant = pair
        measures = self.options.measures
        # The stages of the variant come before the checks of its baseline.
        made = [side for side in (variant, baseline) if self._is_made(side)]
        checks = [
            self._continue(check, (side,), pair)
            for check, side in self._list_checks(pair)
            if side in made and baseline in made
        ]
        if len(made) < 2 or not all(check.has_ended for check in checks):
            return None
        # Nothing follows from some checks of a gate.
        has_failed = "gate" in measures and any(check.failure for check in checks)
        if "latency" in measures and not has_failed and not self._continue("latency", pair, pair).has_ended:
            return None
        return self._conclude(pair)

    def _is_made(self, side: Variant) -> bool:
        """Whether the recipe of a side is made to its end; submits the next stage where none is at work.

        Raises:
            SearchError: a stage failed, or left nothing.
        """
        task = self.stages.setdefault(side.name, next_stage(side))
        while task is not None:
            outcome = self.scheduler.ask(task)
            if outcome is None:
                return False
            if isinstance(outcome, Failure):
                raise SearchError(outcome.reason)
            last, task = task, next_stage(side)
            if task is not None and task.key == last.key:
                raise SearchError(f"{task.title} ended and left nothing; see its log in weights/store")
            self.stages[side.name] = task
        side.require_weights()
        return True

    def _list_checks(self, pair: Pair) -> Iterator[tuple[str, Variant]]:
        """The checks that are asked for, each with its side, the baseline's first."""
        for side in pair:
            for name in KINDS:
                is_asked = name in self.options.measures or "gate" in self.options.measures
                if name != "latency" and is_asked and (side is pair[1] or name in _OF_BOTH_SIDES):
                    yield name, side

    def _continue(self, name: str, sides: Sequence[Variant], pair: Pair) -> _Progress:
        """Begin a measurement that is new, record one whose tasks have ended."""
        key = name, sides[-1].name, self._depth(name, pair[1])
        if key not in self.measurements:
            # A timing runs alone on all CPUs.
            with nullcontext() if name == "latency" else self.executor.as_task():
                self.measurements[key] = self._begin(name, sides, pair)
        one = self.measurements[key]
        if not one.has_ended:
            outcomes = [self.scheduler.ask(task) for task in one.tasks]
            one.failure = next((each for each in outcomes if isinstance(each, Failure)), None)
            values = [each.value for each in outcomes if isinstance(each, Result)]
            if len(values) == len(one.tasks):
                try:
                    one.paths = self._record(one.tasks[0].argument, values)
                except SlimqwenError as error:
                    one.failure = Failure(name, str(error), error)
        return one

    def _depth(self, name: str, variant: Variant) -> int | None:
        """The K at which a variant's drafts are compared with its baseline's; None for other measurements."""
        if name != "acceptance":
            return None
        if variant.name not in self.depths:
            settings = AcceptanceSettings.load(variant.evaluation, self.root)
            self.depths[variant.name] = settings.depth_of(variant)
        return self.depths[variant.name]

    def _begin(self, name: str, sides: Sequence[Variant], pair: Pair) -> _Progress:
        """A new measurement, with its records where these still hold."""
        options, evaluation = self.options, pair[1].evaluation
        # A check without a gate takes the settings of the variant's EVALUATION, and all items.
        settings = GateSettings.load(evaluation, self.root) if "gate" in options.measures else None
        settings_name = WORKLOAD if name == "latency" else evaluation
        if settings and name == "quality":
            settings_name = settings.quality
        # The tokens of the engine and the times are no samples: they have no sides.
        has_sides = settings and name not in ("engine", "latency")
        split = settings.split(options.split, self.root) if settings and has_sides else None
        fields: dict[str, Any] = {"settings_name": settings_name}
        if name == "quality":
            fields = {"suite": settings_name, "limit": options.limit}
        elif name == "acceptance":
            fields["gate_depth"] = self._depth(name, pair[1])
        elif name == "latency":
            rounds = options.rounds or Workload.load(WORKLOAD, self.root).rounds
            fields = {"workload": WORKLOAD, "rounds": rounds}
        paths = [
            path
            for side in sides
            if (
                path := gate.find_reusable(
                    side, KINDS[name][0], folder=self._folder(side.name), split=split, **fields
                )
            )
        ]
        in_turns = name != "latency" or len({store.read_record(path, Latency).run for path in paths}) == 1
        if len(paths) == len(sides) and in_turns:
            return _Progress(paths=paths, reused=True)
        names, depth = tuple(side.name for side in sides), self._depth(name, pair[1])
        return _Progress(
            [
                measurement_task(
                    Measurement(name, names, settings_name, split, options, part, depth), pair[0]
                )
                for part in range(options.parts if name == "quality" else 1)
            ]
        )

    def _folder(self, name: str) -> Path:
        return self.root / self.options.records / name

    def _record(self, what: Measurement, values: Sequence[Any]) -> list[Path]:
        """Write the records of a measurement from the values of its tasks."""
        if what.name == "quality":
            side, suite = variants.load(what.sides[0], self.root), Suite.load(what.settings_name, self.root)
            answers = [quality.ScoredPart.from_json(value) for value in values]
            limit, folder = self.options.limit, self._folder(side.name)
            return [
                quality.write_quality_record(
                    side, suite, answers, limit=limit, split=what.split, folder=folder
                )
            ]
        paths = []
        for unwritten in values[0]:
            kind = unwritten["record"]["schema"].partition("/")[0]
            record = registry.kinds()[kind].model_validate(unwritten["record"])
            paths.append(store.write_record(self._folder(unwritten["variant"]), record, unwritten["items"]))
        return paths

    def _conclude(self, pair: Pair) -> SweepResult:
        """The result of a pair whose measurements have ended, with the record of its gate."""
        variant = pair[1]
        sides = [*self._list_checks(pair), ("latency", variant)]
        ended = {
            (name, side.name): self.measurements[key]
            for name, side in sides
            if (key := (name, side.name, self._depth(name, variant))) in self.measurements
        }
        failures = {name: one.failure for (name, _), one in ended.items() if one.failure}
        records: dict[str, list[Path]] = {}
        for (name, _), one in ended.items():
            if name not in failures:
                records.setdefault(name, []).extend(one.paths)
        if "gate" in self.options.measures and not failures:
            records["gate"] = [self._find_gate(variant, records) or self._write_gate(variant, records)]
        reused = [path for one in ended.values() if one.reused for path in one.paths]
        return SweepResult(variant.name, records, reused, failures)

    def _find_gate(self, variant: Variant, records: Mapping[str, Sequence[Path]]) -> Path | None:
        """The gate record of a variant that rests on the same records."""
        checks = [path for name in gate.CHECKS for path in records[name]]
        names = {f"{path.parent.name}/{path.name}" for path in checks}
        gates = store.records(variant.folder, Gate)
        return next((path for path in gates if set(store.read_record(path, Gate).records) == names), None)

    def _write_gate(self, variant: Variant, records: Mapping[str, Sequence[Path]]) -> Path:
        settings_name, command = variant.evaluation, self.options.command
        # The driver of a cluster may have no GPU: the engine's record says where the checks ran.
        measured = store.read_record(records["engine"][0], EngineCheck).provenance
        file = GateSettings.load(settings_name, self.root).file(self.root)
        block = provenance.describe_again(measured, command, self.started, self.root, [file])
        return gate.write_gate_record(
            variant, settings_name, records, command=command, started=self.started, block=block
        )
