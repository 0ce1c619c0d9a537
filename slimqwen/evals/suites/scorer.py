"""Scores responses to questions: right or wrong, by one of four metrics."""

import json
from collections.abc import Mapping, Sequence
from typing import Any, Literal

from slimqwen.evals.suites import exact_answers, stated_choices

Metric = Literal["exact", "contains", "choice", "tool_call"]

_CALLS = "slimqwen-calls:"
"""Separates the text of a response from the tool calls that the server found in it, as JSON."""


def form_of(answer: str | Sequence[str] | Mapping[str, Any], choices: Sequence[str] | None) -> Metric:
    """The default metric of a question, by the form of its answer and whether it has choices."""
    if choices is not None:
        return "choice"
    return "tool_call" if isinstance(answer, Mapping) else "exact"


def is_right(
    response: str,
    answer: str | Sequence[str] | Mapping[str, Any],
    choices: Sequence[str] | None = None,
    metric: Metric | None = None,
    tolerance: exact_answers.Tolerance | None = None,
) -> bool:
    """Whether a response is right.

    Args:
        response: the model's response without thoughts; tool calls are in it as `response_text` writes them.
        answer: the right response, several that are each right, or a tool call.
        choices: options of a multiple-choice question, shown under the letters A, B, C, …
        metric: exact, contains, choice or tool_call; None for the one that fits answer and choices (`form_of`).
        tolerance: how far a number may be from a right one, by the metric exact.
    """
    metric = metric or form_of(answer, choices)
    if isinstance(answer, Mapping):
        return metric == "tool_call" and tool_calls(response) == [_call(answer)]
    answers = [answer] if isinstance(answer, str) else answer
    if metric == "choice":
        number = stated_choices.stated_choice(response, choices or [])
        return number is not None and (choices or [])[number] in answers
    if metric == "contains":
        return any(exact_answers.contains(response, each) for each in answers)
    return exact_answers.is_any(response, stated_choices.stated_texts(response), answers, tolerance)


def response_text(text: str, calls: Sequence[Mapping[str, Any]]) -> str:
    """Join the text of a response and the tool calls that the server found in it; `tool_calls` separates them."""
    return text + _CALLS + json.dumps(calls) if calls else text


def tool_calls(response: str) -> list[tuple[str, str]]:
    """Name and normalised arguments of each tool call that `response_text` joined to a response; empty without any."""
    _, _, calls = response.partition(_CALLS)
    return [_call(call) for call in json.loads(calls or "[]")]


def _call(call: Mapping[str, Any]) -> tuple[str, str]:
    """Name and arguments of a call, normalised so that equal arguments are equal texts; invalid JSON stays as it is."""
    arguments = call.get("arguments") or {}
    text = arguments if isinstance(arguments, str) else json.dumps(arguments)
    try:
        arguments = json.loads(text, parse_float=_number)
    except ValueError:
        return str(call["name"]), text
    return str(call["name"]), json.dumps(arguments, sort_keys=True)


def _number(digits: str) -> float:
    """Convert a JSON number with a point or exponent; 2.0 becomes the integer 2."""
    number = float(digits)
    return int(number) if number.is_integer() else number
