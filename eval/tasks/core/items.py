"""Items and scores of this folder's tasks, which lm-eval calls by `!function`.

Items are made from the task file's dataset_kwargs; lm-eval passes its metadata beside them.
"""

from collections.abc import Iterable
from pathlib import Path
from typing import Any

from datasets import Dataset

from slimqwen.evals.suites import questions
from slimqwen.evals.suites.needle import make_needle_questions
from slimqwen.evals.suites.tool_questions import make_tool_questions
from slimqwen.text.files import TextFile

text = questions.question_text


def tool_calls(count: int, seed: int, **_: Any) -> dict[str, Dataset]:
    """The items of tool_calls."""
    return _dataset(make_tool_questions(count, seed))


def needle(
    data_files: str, characters: list[int], depths: list[float], count: int, seed: int, **_: Any
) -> dict[str, Dataset]:
    """The items of needle, in the documents of a file."""
    texts = [document.text or "" for document in TextFile(Path(data_files))]
    return _dataset(make_needle_questions(texts, characters, depths, count, seed))


def called(item: dict[str, str], responses: list[str]) -> dict[str, float]:
    """Score one response of tool_calls."""
    return questions.score_response(item, responses, "tool_call")


def found(item: dict[str, str], responses: list[str]) -> dict[str, float]:
    """Score one response of needle; a sentence around the code is none of its business."""
    return questions.score_response(item, responses, "contains")


def _dataset(items: Iterable[questions.Question]) -> dict[str, Dataset]:
    return {"test": Dataset.from_list(questions.item_rows(items))}
