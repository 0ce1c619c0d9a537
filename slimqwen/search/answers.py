"""Answers of the rungs, kept in a journal: what an earlier run measured is not measured again."""

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from slimqwen.records.journal import Journal
from slimqwen.search.executors import Executor, Failure, Task


@dataclass(frozen=True)
class Question:
    """What a rung asks.

    Attributes:
        request: everything that decides the answer, as JSON.
        task: measures it.
    """

    request: Any
    task: Task


def measure(
    questions: Iterable[Question], executor: Executor, answers: Journal
) -> list[tuple[Task, Failure]]:
    """Measure what has no answer yet, each question once.

    Args:
        executor: where tasks run; entered already.
        answers: receives each answer as soon as it is there.

    Returns:
        The tasks that raised or died.
    """
    asked: dict[str, Question] = {}
    for question in questions:
        if answers.get(question.request) is None and question.task.key not in asked:
            asked[question.task.key] = question
            executor.submit(question.task)
    failures = []
    while asked:
        outcome = executor.wait()
        question = asked.pop(outcome.key)
        if isinstance(outcome, Failure):
            failures.append((question.task, outcome))
        else:
            answers.add(question.request, outcome.value)
    return failures
