"""The task needle: a fact is hidden in a long text, and the question about it follows the text.

lm-eval calls `items`, `text` and `score` by `!function`; it passes its metadata beside the dataset_kwargs.
"""

import itertools
import random
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from datasets import Dataset

from slimqwen.evals.suites.questions import Question, item_rows, question_text, score_response
from slimqwen.text.documents import read_documents

_PLACES = ("harbour", "library", "observatory", "workshop", "greenhouse", "archive", "mill", "station")
_COLOURS = ("amber", "blue", "crimson", "green", "ivory", "silver", "violet", "white")

text = question_text


def items(
    data_files: str, characters: list[int], depths: list[float], count: int, seed: int, **_: Any
) -> dict[str, Dataset]:
    """The items of the task, in the documents of a file."""
    texts = [document.text or "" for document in read_documents(Path(data_files))]
    questions = make_needle_questions(texts, characters, depths, count, seed)
    return {"test": Dataset.from_list(item_rows(questions))}


def score(item: dict[str, str], responses: list[str]) -> dict[str, float]:
    """Score one response; a sentence around the code is none of its business."""
    return score_response(item, responses, "contains")


def make_needle_questions(
    texts: Sequence[str], characters: Sequence[int], depths: Sequence[float], count: int, seed: int
) -> list[Question]:
    """Make questions for a hidden code of seven digits; equal arguments give equal questions.

    Args:
        texts: texts of the haystacks, joined in another order for each question and repeated if they are too short.
        characters: lengths of the haystacks; lengths in tokens would differ between the tokenizers of two variants.
        depths: positions of the needle as shares of the haystack; each is moved to the start of a line.
        count: questions of each length and depth.
    """
    rng = random.Random(seed)
    return [
        _make_question(texts, length, depth, rng)
        for length, depth, _ in itertools.product(characters, depths, range(count))
    ]


def _make_question(texts: Sequence[str], length: int, depth: float, rng: random.Random) -> Question:
    door = f"{rng.choice(_COLOURS)} door of the {rng.choice(_PLACES)}"
    code = str(rng.randrange(1_000_000, 10_000_000))
    order = itertools.cycle(rng.sample(texts, len(texts)))
    hay = ""
    while len(hay) < length:
        hay += next(order) + "\n\n"
    position = hay.rfind("\n", 0, round(depth * length)) + 1
    needle = f"The code of the {door} is {code}.\n"
    return Question(
        prompt=f"Read this text.\n\n{hay[:position]}{needle}{hay[position:length]}\n\n"
        f"What is the code of the {door}, by that text? Answer with the code alone.",
        answer=code,
    )
