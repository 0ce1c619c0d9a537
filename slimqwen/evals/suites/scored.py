"""Scored responses to the items of a task, as records keep them."""

import hashlib
import json
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from slimqwen.evals.suites.suite import SuiteTask


@dataclass(frozen=True)
class Item:
    """One scored response.

    Attributes:
        task: name of the task.
        index: position in the task's fixed order.
        item: hash of the item, the same for every variant.
        value: score in the task's measure.
        weight: weight of the score in the mean: bytes for BITS_PER_BYTE, else 1.
        output: generated text that was scored; None if nothing is generated.
        truncated: whether the token limit cut the output; None if nothing is generated.
        repeat: number of the generation of this item, from 0.
        cluster: hash shared by the generations of one item; None where each item has a single one.
        output_tokens: generated tokens with thoughts; None if nothing is generated or the server reports no usage.
        looping: whether the output loops (`loops.is_looping`); None if nothing is generated.
        question: the prompt, cut in its middle if it is long; None if the sample has none.
        expected: the right response, cut in its middle if it is long; None if the sample has none.
    """

    task: str
    index: int
    item: str
    value: float
    weight: float
    output: str | None
    truncated: bool | None
    repeat: int = 0
    cluster: str | None = None
    output_tokens: int | None = None
    looping: bool | None = None
    question: str | None = None
    expected: str | None = None


@dataclass(frozen=True)
class TaskRun:
    """All scored responses to one task.

    Attributes:
        task: the task.
        items: one for each response, sorted by index and repeat.
        available_count: all items of the task, scored or not.
        settings: settings of the suite that two records must share to be compared, beside measure and items.
    """

    task: SuiteTask
    items: list[Item]
    available_count: int
    settings: Mapping[str, Any]


def score_endings(task: SuiteTask, run: TaskRun, settings: Mapping[str, Any]) -> TaskRun:
    """Score the responses of another task's run by ENDED: 1 if a response neither loops nor was cut, else 0.

    The new items do not repeat the outputs.

    Args:
        task: the task that gets the scores.
        run: the other task's run.
        settings: settings of `task` that two records must share.
    """
    items = [
        replace(
            item,
            task=task.name,
            value=float(not item.truncated and not item.looping),
            output=None,
            truncated=None,
            output_tokens=None,
            looping=None,
            question=None,
            expected=None,
        )
        for item in run.items
    ]
    return TaskRun(task, items, run.available_count, settings)


def item_hash(content: Any) -> str:
    """Hash of an item, the same for every variant, from its JSON."""
    return hashlib.sha256(json.dumps(content, sort_keys=True, ensure_ascii=False).encode()).hexdigest()[:16]
