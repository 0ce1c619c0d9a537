"""The shortlist of a search: the candidates that may become finalists, with their drafts counted on more prompts.

The best of many on few prompts owes part of it to these prompts, and its proof fails (30 candidates on 24 prompts a
class: 1.3 % of the acceptance length). So the fastest are counted once more on the search's side, with as many prompts
as the proof has, and the second count decides who is a finalist.
"""

import dataclasses
from collections.abc import Sequence

from slimqwen.progress import Progress, silent
from slimqwen.records.journal import Journal
from slimqwen.search.answers import Question, measure
from slimqwen.search.candidate import Candidate
from slimqwen.search.executors import Executor
from slimqwen.search.ladder import Ladder
from slimqwen.search.record import SearchTrial


def recount(
    trials: Sequence[SearchTrial],
    ladder: Ladder,
    executor: Executor,
    answers: Journal,
    *,
    finalists: int,
    progress: Progress = silent,
) -> list[SearchTrial]:
    """Count drafts of trials again, as many trials at a time as the executor runs tasks.

    Args:
        trials: candidates within the limits, the most wanted first.
        executor: entered already.
        finalists: number of likely proven trials after which no further one is counted.

    Returns:
        The trials that were counted, with `recounted_share`; those whose count broke down are left out.
    """
    budget = ladder.budget.for_finalists()
    larger_ladder = dataclasses.replace(ladder, budget=budget)
    counted: list[SearchTrial] = []
    likely_count = 0
    for start in range(0, len(trials), executor.width):
        progress("recounts", start, len(trials))
        group = trials[start : start + executor.width]
        questions: dict[str, list[Question]] = {}
        for trial in group:
            candidate = Candidate(**trial.changes)
            if candidate.depth:
                candidate = dataclasses.replace(candidate, depth=budget.acceptance.gate_depth)
                rung_questions = larger_ladder.questions(candidate)
                questions[trial.name] = [rung_questions["base_acceptance"], rung_questions["acceptance"]]
        measure([question for pair in questions.values() for question in pair], executor, answers)
        for trial in group:
            if trial.name in questions:
                base, own = (answers.get(question.request) for question in questions[trial.name])
                if base is None or own is None:
                    continue
                trial = trial.model_copy(update={"recounted_share": budget.acceptance_share(base, own)})
            counted.append(trial)
            likely_count += ladder.budget.is_likely_proven(trial, finalists)
        if likely_count >= finalists:
            break
    return counted
