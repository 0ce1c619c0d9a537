"""The study of a search: chooses the next candidate to try, and records at which rung each candidate ended.

Optuna's multi-objective TPE proposes points. It maximises the modelled tokens per second, minimises the largest used
share of a limit, and minimises the bytes of the checkpoint; a candidate that ended before the last rung violates a
constraint and has no score. The study is a journal in .cache/search/, so the same command continues an interrupted one.
"""

import math
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from slimqwen import variant as variants
from slimqwen.captured_log import capture_logger
from slimqwen.evals.acceptance import summarise_items
from slimqwen.fit import FitError
from slimqwen.identity import digest_of
from slimqwen.processes import Executor, Failure, Outcome, Result, Task
from slimqwen.progress import Progress, silent
from slimqwen.records.journal import Journal, locked
from slimqwen.records.record import Estimate
from slimqwen.search import SearchError
from slimqwen.search.candidate import Candidate
from slimqwen.search.ladder import Ladder
from slimqwen.search.record import Incumbent, Rung, SearchTrial
from slimqwen.search.rungs import LimitShares

_STARTUP_TRIALS = 12
"""Number of trials before TPE proposes points: first the enqueued points, then random ones."""

_ASKS_PER_TRIAL = 20
"""Proposals per trial after which the space counts as exhausted, because most proposals were known candidates."""

_CRASHED = 1e3
"""Constraint value of a candidate that crashed, larger than any measured one."""


@dataclass(eq=False)
class _Running:
    """A trial that has not ended.

    Attributes:
        row: fields of the trial's `SearchTrial` that are known so far.
        began: start of the trial, seconds of the monotonic clock.
    """

    trial: Any
    candidate: Candidate
    row: dict[str, Any]
    began: float = field(default_factory=time.monotonic)


class Study:
    """A search in progress.

    Attributes:
        incumbent: the variant that candidates have to be faster than; `run` measures it.
    """

    incumbent: Incumbent
    _journal: Journal

    def __init__(
        self, ladder: Ladder, executor: Executor, folder: Path, log: Path, progress: Progress = silent
    ) -> None:
        """Open a study, or continue an earlier one of the same ladder.

        Args:
            executor: executor that is entered already.
            folder: folder for the study's journal and for the rungs' results.
            log: file for Optuna's log.
        """
        self._ladder, self._executor, self._progress = ladder, executor, progress
        self._folder, self._log = folder, log
        self._running: list[_Running] = []
        self._known: dict[str, SearchTrial] = {}
        self._waiting: set[str] = set()
        self._outcomes: dict[str, Outcome] = {}

    def run(self, trials: int, seconds: float = math.inf, width: int = 1) -> list[SearchTrial]:
        """Try candidates until the number of trials, the time or the space is exhausted.

        Args:
            trials: number of different candidates, including those of earlier runs.
            seconds: time after which no further candidate is begun.
            width: number of candidates measured at a time.

        Returns:
            A trial for each candidate, in the order of the trials.

        Raises:
            SearchError: the base or the incumbent could not be measured.
        """
        deadline, asks = time.monotonic() + seconds, 0
        with locked(self._folder / "measured.jsonl") as journal, capture_logger("optuna", self._log):
            self._journal = journal
            self._measure_references()
            self._study = self._open_study()
            while True:
                is_open = len(self._known) + len(self._running) < trials and asks < _ASKS_PER_TRIAL * trials
                if is_open and len(self._running) < width and time.monotonic() < deadline:
                    asks += 1
                    self._begin_next_trial()
                elif self._running:
                    self._wait()
                    for running in [*self._running]:
                        self._advance(running)
                else:
                    break
                self._progress("candidates", len(self._known), trials)
        return sorted(self._known.values(), key=lambda trial: trial.number)

    def _ask(self, task: Task) -> Outcome | None:
        """The outcome of a task from this run or an earlier one; without one, submits the task and returns None."""
        if task.key not in self._outcomes and (value := self._journal.get(task.key)) is not None:
            self._outcomes[task.key] = Result(task.key, value)
        if task.key not in self._outcomes and task.key not in self._waiting:
            self._executor.submit(task)
            self._waiting.add(task.key)
        return self._outcomes.get(task.key)

    def _wait(self) -> None:
        """Wait for the next task that ends, and keep its outcome."""
        outcome = self._executor.wait()
        self._waiting.discard(outcome.key)
        self._outcomes[outcome.key] = outcome
        if isinstance(outcome, Result):
            self._journal.add(outcome.key, outcome.value)

    def _measure_references(self) -> None:
        """Measure the acceptance of the base, at the largest depth (for the first rung), and of the incumbent."""
        ladder = self._ladder
        settings = ladder.space.settings.incumbent
        point = Candidate.from_point(ladder.space.complete(settings.point))
        base, incumbent = (
            variants.load(name or ladder.base.name, ladder.overlay) for name in ("", settings.variant)
        )
        sides = [(base, ladder.deepest), (incumbent, point.depth)]
        tasks = [ladder.acceptance_task(variant, depth) if depth else None for variant, depth in sides]
        while None in [self._ask(task) for task in tasks if task]:
            self._wait()
        self._base_items, items = ([] if task is None else self._value(task) for task in tasks)
        deepest = [item for item in self._base_items if item["depth"] == ladder.deepest]
        drafts = sum(item["drafts"] for item in deepest)
        accepted = zip(*(item["accepted_per_position"] for item in deepest), strict=True)
        self._base_rates = [sum(position) / drafts for position in accepted]
        length = _mean_length(items, point.depth) if point.depth else None
        self.incumbent = Incumbent(
            variant=incumbent.name,
            tokens_per_second=ladder.tokens_per_second(point, length.value if length else 1.0),
            acceptance_length=length,
        )

    def _value(self, task: Task) -> list[dict[str, Any]]:
        """The items of an acceptance task that has ended; a SearchError if it failed."""
        outcome = self._ask(task)
        if isinstance(outcome, Failure):
            raise SearchError(f"{task.title}: {outcome.reason}")
        assert outcome is not None
        items: list[dict[str, Any]] = outcome.value
        return items

    def _open_study(self) -> Any:
        import optuna
        from optuna.storages import JournalStorage
        from optuna.storages.journal import JournalFileBackend
        from optuna.trial import TrialState

        optuna.logging.disable_default_handler()
        space = self._ladder.space
        study = optuna.create_study(
            storage=JournalStorage(JournalFileBackend(str(self._folder / "study.log"))),
            study_name=digest_of([space.as_text(), self._ladder.gpu.name, self.incumbent.as_json()])[:24],
            directions=("minimize", "minimize", "minimize"),
            load_if_exists=True,
        )
        for trial in study.trials:
            if "row" in trial.user_attrs:
                row = SearchTrial.model_validate(trial.user_attrs["row"])
                self._known[row.name] = row
            elif trial.state == TrialState.RUNNING:  # left over from an interrupted run
                study.tell(trial.number, state=TrialState.FAIL)
                study.enqueue_trial(trial.params)
        for point in [] if study.trials else space.first_points():
            study.enqueue_trial({choice: point[choice] for choice in space.open_choices})
        return study

    def _begin_next_trial(self) -> None:
        """Begin the trial that the sampler proposes, unless its candidate is known or already running."""
        from optuna.samplers import TPESampler
        from optuna.trial import TrialState

        ladder, space = self._ladder, self._ladder.space
        # The seed changes with each proposal, so that a continued run does not propose the same points again.
        seed = space.settings.seed + len(self._study.trials)
        self._study.sampler = TPESampler(seed=seed, n_startup_trials=_STARTUP_TRIALS, multivariate=True)
        trial = self._study.ask()
        suggested = {
            name: trial.suggest_categorical(name, list(values)) for name, values in space.open_choices.items()
        }
        candidate = Candidate.from_point(space.complete(suggested))
        name = ladder.in_overlay(candidate).name
        if name in self._known or any(each.row["name"] == name for each in self._running):
            self._study.tell(trial, state=TrialState.FAIL)
            return
        running = _Running(
            trial,
            candidate,
            {
                "number": trial.number,
                "name": name,
                "changes": candidate.changes,
                "checkpoint_bytes": ladder.checkpoint_bytes(candidate),
                "bound_tokens_per_second": 0.0,
                "crashed": False,
                "seconds": 0.0,
            },
        )
        try:
            bound = ladder.best_tokens_per_second(candidate, self._base_rates)
        except FitError as error:
            self._finish_trial(running, "roofline", str(error))
            return
        running.row["bound_tokens_per_second"] = bound
        least, reason = self._least_speed()
        if bound < least:
            self._finish_trial(running, "roofline", reason)
        else:
            self._running.append(running)
            self._advance(running)

    def _advance(self, running: _Running) -> None:
        """Judge a candidate by the rungs that are measured; then submit the next rung's task or finish the trial."""
        ladder, candidate = self._ladder, running.candidate
        rungs: list[tuple[Rung, Task, Callable[[_Running, Any], str]]] = [
            ("fidelity", ladder.fidelity_task(candidate), self._judge_fidelity)
        ]
        if candidate.depth:
            task = ladder.acceptance_task(ladder.in_overlay(candidate), candidate.depth)
            rungs.append(("acceptance", task, self._judge_acceptance))
        for rung, task, judge in rungs:
            outcome = self._ask(task)
            if outcome is None:
                return
            if isinstance(outcome, Failure):
                running.row["crashed"], reason = True, outcome.reason
            else:
                reason = judge(running, outcome.value)
            if reason:
                self._finish_trial(running, rung, reason)
                return
        length = running.row.get("acceptance_length")
        running.row["tokens_per_second"] = ladder.tokens_per_second(
            candidate, min(length.value, candidate.depth + 1.0) if length else 1.0
        )
        self._finish_trial(running, "speed", "")

    def _least_speed(self) -> tuple[float, str]:
        """The least bound that a candidate has to reach, tokens/s, and the reason to end one with a lower bound."""
        share = self._ladder.space.settings.speed_share
        # Only possible finalists set the bar: a fast candidate that is beyond a limit must not end others.
        within_budget = filter(self._ladder.budget.is_met_by, self._known.values())
        fastest = max((row.speed for row in within_budget), default=0.0)
        if share * fastest > self.incumbent.tokens_per_second:
            return share * fastest, f"even its bound is below {share:.0%} of the fastest speed so far"
        return self.incumbent.tokens_per_second, f"even its bound is slower than {self.incumbent.variant}"

    def _judge_fidelity(self, running: _Running, figures: Mapping[str, Any]) -> str:
        """Add the rung's figures to the row; returns why the candidate ends there, or an empty text."""
        shares = LimitShares.of_figures(figures, self._ladder.budget)
        running.row |= {
            "kl_nats": shares.kl_nats,
            "fidelity_share": shares.share,
            "fidelity_figure": shares.worst,
            "worst_share": shares.share,
        }
        if shares.lower_share > 1:
            return f"{shares.worst} is at least {shares.lower_share:.2f} times its limit"
        return ""

    def _judge_acceptance(self, running: _Running, items: Sequence[Mapping[str, Any]]) -> str:
        """Like `_judge_fidelity`, for the rung acceptance."""
        budget = self._ladder.budget
        least = budget.acceptance.least_share
        ratio = budget.acceptance_share(self._base_items, items)
        used_share = (1 - ratio.value) / (1 - least) if least < 1 else 0.0
        running.row |= {
            "acceptance_length": _mean_length(items, running.candidate.depth),
            "acceptance_share": ratio,
            "worst_share": max(running.row["worst_share"], used_share),
        }
        return f"acceptance length is at most {ratio.high:.3f} of the base's" if ratio.high < least else ""

    def _finish_trial(self, running: _Running, rung: Rung, reason: str) -> None:
        """Record a trial and tell the sampler its excess over the limits and, if it passed every rung, its scores."""
        from optuna.trial import TrialState

        if running in self._running:
            self._running.remove(running)
            running.row["seconds"] = round(time.monotonic() - running.began, 1)
        row = SearchTrial(**running.row, rung=rung, reason=reason)
        trial = running.trial
        self._known[row.name] = row
        trial.set_user_attr("row", row.as_json())
        trial.set_constraint("excess", self._excess(row))
        if row.passed:
            self._study.tell(trial, list(row.scores))
        else:
            self._study.tell(trial, state=TrialState.PRUNED)

    def _excess(self, row: SearchTrial) -> float:
        """Optuna's constraint value: how far a trial is beyond its limit; above 0 if it can be no finalist."""
        if row.crashed:
            return _CRASHED
        if row.passed:
            is_met = self._ladder.budget.is_met_by(row)
            return -1.0 if is_met else max(1e-6, (row.worst_share or 1) - 1)
        if row.rung == "roofline":
            return max(1e-6, 1 - row.bound_tokens_per_second / self._least_speed()[0])
        if row.rung == "fidelity":
            return (row.fidelity_share or 1) - 1
        assert row.acceptance_share is not None
        return 1 - row.acceptance_share.value


def _mean_length(items: Sequence[Mapping[str, Any]], depth: int) -> Estimate:
    """Acceptance length over all items at a depth, tokens."""
    (length,) = (row.length for row in summarise_items(items) if row.depth == depth)
    assert length is not None
    return length
