"""The shortlist of a search: the candidates that may become finalists, with their drafts counted on more prompts.

The best of many on few prompts owes part of it to these prompts, and its proof fails (30 candidates on 24 prompts a
class: 1.3 % of the acceptance length). So the fastest are counted once more on the search's side, with as many prompts
as the proof has, and the second count decides who is a finalist.
"""

import dataclasses
from collections.abc import Sequence

from slimqwen.evals import acceptance_share
from slimqwen.progress import Progress, silent
from slimqwen.records.journal import Journal
from slimqwen.records.record import Ratio
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
        ladder: the rungs of the search.
        executor: where drafts are counted; entered already.
        answers: journal of the rungs' answers.
        finalists: number of likely proven trials after which no further one is counted.
        progress: receives the trials counted.

    Returns:
        The trials that were counted, with `recounted_share`; those whose count broke down are left out.
    """
    larger_ladder = dataclasses.replace(ladder, budget=ladder.budget.for_finalists())
    settings = larger_ladder.budget.acceptance
    counted: list[SearchTrial] = []
    likely_count = 0
    for start in range(0, len(trials), executor.width):
        progress("recounts", start, len(trials))
        group = trials[start : start + executor.width]
        questions = {trial.name: _questions(trial, larger_ladder) for trial in group}
        measure([each for of_trial in questions.values() for each in of_trial], executor, answers)
        for trial in group:
            if questions[trial.name]:
                base, own = (answers.get(question.request) for question in questions[trial.name])
                if base is None or own is None:
                    continue
                share = acceptance_share.judge(
                    base, own, depth=settings.gate_depth, least_share=settings.least_share
                )
                trial = trial.model_copy(update={"recounted_share": Ratio.from_ratio(share.ratio)})
            counted.append(trial)
            likely_count += ladder.budget.is_likely_proven(trial, finalists)
        if likely_count >= finalists:
            break
    return counted


def _questions(trial: SearchTrial, larger_ladder: Ladder) -> list[Question]:
    """Drafts of the base and of a trial at the gate's depth; none where the trial drafts nothing."""
    candidate = Candidate(**trial.changes)
    if not candidate.depth:
        return []
    candidate = dataclasses.replace(candidate, depth=larger_ladder.budget.acceptance.gate_depth)
    variant = candidate.in_overlay(larger_ladder.base, larger_ladder.space, larger_ladder.overlay)
    requests = larger_ladder.requests(candidate)
    return [
        Question(requests[answer], larger_ladder.task(candidate, variant.name, answer))
        for answer in ("base_acceptance", "acceptance")
    ]
