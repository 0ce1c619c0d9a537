"""The question and the expected answer of an item, as its record keeps them."""

import json
from collections.abc import Mapping
from typing import Any

from slimqwen.evals.suites.questions import CHAT_PREFIX
from slimqwen.evals.suites.suite import BITS_PER_BYTE

_LONGEST_TEXT = 2000
"""Characters of a question or an expected answer that an item keeps."""


def question(sample: Mapping[str, Any]) -> str | None:
    """The prompt of an lm-eval sample, cut in its middle if it is long; None if the sample has none.

    For bits per byte it is the scored text.
    """
    arguments = sample.get("arguments")
    return cut(str(arguments[0][0]).removeprefix(CHAT_PREFIX)) if arguments else None


def expected(sample: Mapping[str, Any]) -> str | None:
    """The right response of an lm-eval sample, cut in its middle if it is long; None for bits per byte."""
    target, doc, arguments = sample.get("target"), sample["doc"], sample.get("arguments")
    if isinstance(target, int) and arguments and len(arguments) > target:
        return cut(str(arguments[target][-1]).strip())
    if isinstance(target, str) and target == doc.get("question") and target.startswith("{"):
        # A question is its own target, for its answer has many forms.
        return right_answer(json.loads(target).get("answer"))
    return None if target is None or BITS_PER_BYTE in sample else cut(str(target))


def right_answer(answer: Any) -> str:
    """The `answer` of a `Question` as text; several answers or a tool call as JSON."""
    return cut(answer if isinstance(answer, str) else json.dumps(answer, ensure_ascii=False))


def cut(text: str) -> str:
    """Leave out the middle of a text of more than 2,000 characters: questions stand at the beginning or the end."""
    half = _LONGEST_TEXT // 2
    return text if len(text) <= _LONGEST_TEXT else f"{text[:half]} […] {text[-half:]}"
