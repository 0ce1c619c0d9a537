"""Answers of the rungs, kept in a journal, so that a later run does not measure them again."""

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from slimqwen.records.journal import Journal
from slimqwen.search.executors import Executor, Failure, Task


@dataclass(frozen=True)
class Question:
    """A question of a rung: everything that decides its answer, as JSON, and the task that measures it."""

    request: Any
    task: Task


def measure(
    questions: Iterable[Question], executor: Executor, answers: Journal
) -> list[tuple[Task, Failure]]:
    """Measure the questions without an answer, each once.

    Args:
        executor: entered already.
        answers: receives each answer as soon as it is measured.

    Returns:
        The tasks that raised or died.
    """
    pending: dict[str, Question] = {}
    for question in questions:
        if answers.get(question.request) is None and question.task.key not in pending:
            pending[question.task.key] = question
            executor.submit(question.task)
    failures = []
    while pending:
        outcome = executor.wait()
        question = pending.pop(outcome.key)
        if isinstance(outcome, Failure):
            failures.append((question.task, outcome))
        else:
            answers.add(question.request, outcome.value)
    return failures
