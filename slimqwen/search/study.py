"""The study of a search: which candidate to try next, and where the others ended.

Optuna's multi-objective TPE proposes points. It maximises the modelled tokens per second, minimises the largest share
of a limit that is used, and minimises the bytes of the checkpoint; a candidate that ended before the last rung violates
a constraint and has no score. The study is a journal in .cache/search/, so the same command goes on where it stopped.
"""

import hashlib
import json
import math
import time
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from slimqwen import variant as variants
from slimqwen.captured_log import capture_logger
from slimqwen.evals.acceptance import summarise_items
from slimqwen.progress import Progress, silent
from slimqwen.records.journal import locked
from slimqwen.records.record import Estimate
from slimqwen.roofline.gpu import RooflineError
from slimqwen.search import SearchError
from slimqwen.search.answers import Question, measure
from slimqwen.search.candidate import Candidate, without_cache
from slimqwen.search.executors import Executor, Failure, Outcome
from slimqwen.search.ladder import Ladder
from slimqwen.search.record import Incumbent, Rung, SearchTrial
from slimqwen.search.rungs import Shares
from slimqwen.search.space import Choice

_STARTUP_TRIALS = 12
"""Trials before TPE proposes points: those that were enqueued, and random ones."""

_FIRST_MOVES = 6
"""Moves of one lever that a study begins with."""

_ASKS_PER_TRIAL = 20
"""Suggestions of known candidates in a row after which the space counts as used up."""

_CANDIDATES_PER_TASK = 2
"""Most candidates under way for each task that may run, where several wait for one answer; the sampler would propose
more of them without results."""

_CRASHED = 1e3
"""Constraint value of a candidate that crashed, larger than any measured one."""


@dataclass(frozen=True)
class Findings:
    """The results of a study.

    Attributes:
        trials: every candidate once, in the order of their trials.
        repeated: number of suggestions of known candidates.
        importance: of each lever for the modelled speed; empty where too few trials passed.
    """

    trials: list[SearchTrial]
    incumbent: Incumbent
    repeated: int
    importance: dict[str, float]


@dataclass
class _Running:
    """A trial with a task that has not ended.

    Attributes:
        question: the question that the task answers.
        answer: its key in `Ladder.questions`.
        began: when the task was submitted, seconds of the monotonic clock.
    """

    trial: Any
    candidate: Candidate
    row: dict[str, Any]
    question: Question = field(init=False)
    answer: str = field(init=False)
    began: float = field(init=False)


class Study:
    """A search under way."""

    def __init__(
        self, ladder: Ladder, executor: Executor, folder: Path, log: Path, progress: Progress = silent
    ) -> None:
        """Open a study, or go on with an earlier one of the same ladder.

        Args:
            executor: entered already.
            folder: folder of the study's journal and of the rungs' answers.
            log: file for Optuna's log.
        """
        self._ladder, self._executor, self._progress = ladder, executor, progress
        self._folder, self._log = folder, log
        self._running: dict[str, list[_Running]] = {}
        self._known: dict[str, SearchTrial] = {}
        self._interrupted: deque[Any] = deque()
        self._repeated = 0

    def run(self, trials: int, seconds: float = math.inf, width: int = 1) -> Findings:
        """Try candidates, until the trials, the time or the space are used up.

        Args:
            trials: number of different candidates, those of earlier runs included.
            seconds: time after which no further one is begun.
            width: tasks that run at a time; candidates with the same question wait for one task.

        Raises:
            SearchError: the base or the incumbent could not be measured.
        """
        deadline = time.monotonic() + seconds
        with locked(self._folder / "answers.jsonl") as answers, capture_logger("optuna", self._log):
            self._answers = answers
            self._measure_references()
            self._study = self._open()
            asks = 0
            while len(self._known) < trials and asks < _ASKS_PER_TRIAL * trials:
                open_trials = trials - len(self._known) - len(self._candidates())
                can_begin = (
                    len(self._running) < width and len(self._candidates()) < _CANDIDATES_PER_TASK * width
                )
                if open_trials > 0 and can_begin and time.monotonic() < deadline:
                    asks += 1
                    self._ask()
                elif self._running:
                    self._take(self._executor.wait())
                else:
                    break
                self._progress("candidates", len(self._known), trials)
            while self._running:
                self._take(self._executor.wait())
            return Findings(
                sorted(self._known.values(), key=lambda trial: trial.number),
                self._incumbent,
                self._repeated,
                self._importance(),
            )

    def _measure_references(self) -> None:
        """Count the base's drafts, at the largest depth for first bounds and at the gate's, and the incumbent's."""
        ladder = self._ladder
        incumbent = ladder.space.settings.incumbent
        point = Candidate.from_point(ladder.space.complete(incumbent.point))
        base = without_cache(ladder.base, ladder.overlay)
        variant = variants.load(incumbent.variant, ladder.base.root) if incumbent.variant else ladder.base
        questions: dict[str, Question] = {}
        if ladder.deepest:
            questions["base"] = ladder.reference(base, ladder.deepest)
            questions["base at the gate's depth"] = ladder.reference(
                base, ladder.budget.acceptance.gate_depth
            )
        if point.depth:
            questions["incumbent"] = ladder.reference(without_cache(variant, ladder.overlay), point.depth)
        for task, failure in measure(questions.values(), self._executor, self._answers):
            raise SearchError(f"{task.title}: {failure.reason}")
        items = {name: self._answers.get(question.request) or [] for name, question in questions.items()}
        self._base_rates: list[float] = []
        if "base" in items:
            drafts = sum(item["drafts"] for item in items["base"])
            accepted = zip(*(item["accepted_per_position"] for item in items["base"]), strict=True)
            self._base_rates = [sum(position) / drafts for position in accepted]
        length = _length(items["incumbent"], point.depth) if "incumbent" in items else None
        self._incumbent = Incumbent(
            variant=variant.name,
            tokens_per_second=ladder.tokens_per_second(point, length.value if length else 1.0),
            acceptance_length=length,
        )

    def _open(self) -> Any:
        import optuna
        from optuna.storages import JournalStorage
        from optuna.storages.journal import JournalFileBackend

        optuna.logging.disable_default_handler()
        text = json.dumps([self._ladder.space.as_text(), self._ladder.gpu.name, self._incumbent.as_json()])
        name = hashlib.sha256(text.encode()).hexdigest()[:16]
        study = optuna.create_study(
            storage=JournalStorage(JournalFileBackend(str(self._folder / "study.log"))),
            study_name=name,
            directions=("minimize", "minimize", "minimize"),
            load_if_exists=True,
        )
        for trial in study.trials:
            if trial.state == optuna.trial.TrialState.RUNNING:  # of a run that was interrupted
                self._interrupted.append(optuna.trial.Trial(study, trial._trial_id))
            if "row" in trial.user_attrs:
                row = SearchTrial.model_validate(trial.user_attrs["row"])
                self._known[row.name] = row
            elif "repeated" in trial.user_attrs:
                self._repeated += 1
        for point in [] if study.trials else self._first_points():
            study.enqueue_trial({lever: point[lever] for lever in self._ladder.space.levers})
        return study

    def _first_points(self) -> list[dict[str, Choice]]:
        """The points of the space, then the moves of one lever with the highest bounds, the fastest first."""
        space = self._ladder.space

        def bound(point: Mapping[str, Choice]) -> float:
            try:
                return self._ladder.best_tokens_per_second(Candidate.from_point(point), self._base_rates)
            except RooflineError:
                return 0.0

        return [*space.first_points(), *sorted(space.moves(), key=bound, reverse=True)[:_FIRST_MOVES]]

    def _ask(self) -> None:
        """Begin the trial that the sampler proposes, or answer it by a known candidate."""
        # A resumed run proposes what an uninterrupted one would.
        seed = self._ladder.space.settings.seed + len(self._known) + self._repeated
        self._study.sampler = _sampler(seed)
        trial = self._interrupted.popleft() if self._interrupted else self._study.ask()
        ladder, space = self._ladder, self._ladder.space
        suggested = {
            name: trial.suggest_categorical(name, list(values)) for name, values in space.levers.items()
        }
        candidate = Candidate.from_point(space.complete(suggested))
        variant = ladder.in_overlay(candidate)
        known_trial = self._known.get(variant.name)
        if known_trial is not None or any(each.row["name"] == variant.name for each in self._candidates()):
            self._repeated += 1
            trial.set_user_attr("repeated", True)
            self._tell(trial, known_trial)
            return
        row: dict[str, Any] = {
            "number": trial.number,
            "name": variant.name,
            "changes": candidate.changes,
            "checkpoint_bytes": ladder.checkpoint_bytes(candidate),
            "bound_tokens_per_second": 0.0,
            "crashed": False,
            "seconds": 0.0,
        }
        try:
            row["bound_tokens_per_second"] = ladder.best_tokens_per_second(candidate, self._base_rates)
        except RooflineError as error:
            self._end(trial, row, "roofline", str(error))
            return
        least, reason = self._least_speed()
        if row["bound_tokens_per_second"] < least:
            self._end(trial, row, "roofline", reason)
            return
        self._climb(_Running(trial, candidate, row))

    def _climb(self, running: _Running) -> None:
        """Begin the next measurement of a candidate, or end its trial where no rung needs one."""
        questions = self._ladder.questions(running.candidate)
        answers = {name: self._answers.get(question.request) for name, question in questions.items()}
        missing = [name for name, answer in answers.items() if answer is None]
        if not missing or (answers["fidelity"] and self._shares(answers).lower_share > 1):
            self._end(running.trial, *self._judge(running.candidate, running.row, answers))
            return
        running.answer, running.began = missing[0], time.monotonic()
        running.question = questions[running.answer]
        key = running.question.task.key
        if key not in self._running:
            self._executor.submit(running.question.task)
        self._running.setdefault(key, []).append(running)

    def _least_speed(self) -> tuple[float, str]:
        """The least bound that a candidate has to reach, and the reason for ending one below it."""
        share = self._ladder.space.settings.speed_share
        # Only possible finalists count: a candidate that is fast but beyond a limit must not end the others.
        within_budget = filter(self._ladder.budget.is_met_by, self._known.values())
        fastest = max((row.speed for row in within_budget), default=0.0)
        if share * fastest > self._incumbent.tokens_per_second:
            return share * fastest, f"less than {share:.0%} of the fastest so far, even at its bound"
        return self._incumbent.tokens_per_second, f"slower than {self._incumbent.variant}, even at its bound"

    def _candidates(self) -> list[_Running]:
        """The candidates that wait for a task."""
        return [running for group in self._running.values() for running in group]

    def _take(self, outcome: Outcome) -> None:
        group = self._running.pop(outcome.key)
        if not isinstance(outcome, Failure):
            self._answers.add(group[0].question.request, outcome.value)
        for running in group:
            running.row["seconds"] = round(running.row["seconds"] + time.monotonic() - running.began, 1)
            if isinstance(outcome, Failure):
                rung: Rung = "fidelity" if running.answer == "fidelity" else "acceptance"
                self._end(running.trial, {**running.row, "crashed": True}, rung, outcome.reason)
            else:
                self._climb(running)

    def _shares(self, answers: Mapping[str, Any]) -> Shares:
        return Shares.from_answer(answers["fidelity"], self._ladder.budget)

    def _judge(
        self, candidate: Candidate, row: dict[str, Any], answers: Mapping[str, Any]
    ) -> tuple[dict[str, Any], Rung, str]:
        """The row with the figures of a candidate's answers, the rung that it reached, and why it ended there."""
        shares = self._shares(answers)
        row |= {
            "kl_nats": shares.kl_nats,
            "fidelity_share": shares.share,
            "fidelity_figure": shares.worst,
            "worst_share": shares.share,
        }
        if shares.lower_share > 1:
            return row, "fidelity", f"{shares.worst} is at least {shares.lower_share:.2f} times its limit"
        length = 1.0
        if candidate.depth:
            estimate = _length(answers["acceptance"], candidate.depth)
            length = min(estimate.value, candidate.depth + 1.0)
            budget = self._ladder.budget
            least = budget.acceptance.least_share
            ratio = budget.acceptance_share(answers["base_acceptance"], answers["acceptance"])
            used_share = (1 - ratio.value) / (1 - least) if least < 1 else 0.0
            row |= {
                "acceptance_length": estimate,
                "acceptance_share": ratio,
                "worst_share": max(shares.share, used_share),
            }
            if ratio.high < least:
                return row, "acceptance", f"acceptance length is at most {ratio.high:.3f} of the base's"
        row["tokens_per_second"] = self._ladder.tokens_per_second(candidate, length)
        return row, "speed", ""

    def _end(self, trial: Any, row: dict[str, Any], rung: Rung, reason: str) -> None:
        finished_trial = SearchTrial(**row, rung=rung, reason=reason)
        self._known[finished_trial.name] = finished_trial
        trial.set_user_attr("row", finished_trial.as_json())
        self._tell(trial, finished_trial)

    def _tell(self, trial: Any, row: SearchTrial | None) -> None:
        """Give a trial's scores, or the constraint that it violates, to the sampler."""
        from optuna.trial import TrialState

        if row is None:  # the candidate is being measured for another trial
            self._study.tell(trial, state=TrialState.FAIL)
            return
        for name, value in self._violations(row).items():
            trial.set_constraint(name, value)
        if row.passed:
            self._study.tell(trial, list(row.scores))
        else:
            self._study.tell(trial, state=TrialState.PRUNED)

    def _violations(self, row: SearchTrial) -> dict[str, float]:
        """Constraints that a trial was judged by; above 0 it is violated."""
        if row.crashed:
            return {"crash": _CRASHED}
        if row.passed:
            if self._ladder.budget.is_met_by(row):
                return {"limits": -1.0}
            return {"limits": max(1e-6, (row.worst_share or 1) - 1)}
        if row.rung == "roofline":
            return {"roofline": max(1e-6, 1 - row.bound_tokens_per_second / self._least_speed()[0])}
        if row.rung == "fidelity":
            return {"fidelity": (row.fidelity_share or 1) - 1}
        assert row.acceptance_share is not None
        return {"acceptance": 1 - row.acceptance_share.value}

    def _importance(self) -> dict[str, float]:
        """PED-ANOVA's importance of each lever for the modelled speed of the trials that passed."""
        from optuna.importance import PedAnovaImportanceEvaluator, get_param_importances

        try:
            importances = get_param_importances(
                self._study,
                evaluator=PedAnovaImportanceEvaluator(),
                target=lambda trial: trial.values[0],
            )
        except (ValueError, RuntimeError):
            return {}
        return {
            lever: float(importances[lever])
            for lever in self._ladder.space.choices
            if lever in importances and math.isfinite(importances[lever])
        }


def _sampler(seed: int) -> Any:
    from optuna.samplers import TPESampler

    return TPESampler(seed=seed, n_startup_trials=_STARTUP_TRIALS, multivariate=True)


def _length(items: Sequence[Mapping[str, Any]], depth: int) -> Estimate:
    (length,) = (row.length for row in summarise_items(items) if row.depth == depth)
    assert length is not None
    return length
