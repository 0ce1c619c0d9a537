"""Questions: the file questions.jsonl (.json, .csv, .parquet) of an own evaluation, how they are asked, and scored.

A row holds `prompt` (the user's message) or `messages` (a chat, with `tools`), `answer`, and optionally `choices` or
`tolerance`.
The metric of suite.yaml decides what is right. Without one, the form of a question decides: it is scored by choice if
it has choices, as a tool call if its answer is an object, else by exact match. The tasks of eval/tasks/core/ make
questions of their own, which lm-eval carries as text.
"""

import errno
import json
import os
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any, Final, Self

from pydantic import BaseModel, ConfigDict, Field, ValidationError, field_validator, model_validator

from slimqwen.evals.suites import exact_answers, scorer
from slimqwen.evals.suites.question_rows import read_question_rows
from slimqwen.evals.suites.scorer import Metric
from slimqwen.text.chats import check_message
from slimqwen.text.files import CorpusError
from slimqwen.text.tables import Faults

SCORE = "exact_match"
"""Name of the score in records and in lm-eval's results, the same for every metric."""

SAMPLING: Final = {"temperature": 0}
"""Fields of a request that asks a question: greedy."""

CHAT_PREFIX = "slimqwen-chat:"
"""Prefix of a text that encodes a whole chat, because lm-eval passes only text; the client decodes and renders it."""


class Question(BaseModel):
    """One row of the questions.

    Attributes:
        prompt: message of the user.
        messages: chat instead of a prompt, as chat templates take it, without the response that is asked for.
        tools: functions that the chat offers.
        answer: the right response, one of the choices, or a list of several that are each right; or the tool call
            {"name", "arguments"}.
        choices: options of a multiple-choice question, listed after the prompt under the letters A, B, C, …
        tolerance: how far a number may be from the answer, such as "0.5" or "5%"; None if only the number is right.
    """

    model_config = ConfigDict(extra="ignore", frozen=True)

    prompt: Annotated[str, Field(min_length=1)] | None = None
    messages: Annotated[list[dict[str, Any]], Field(min_length=1)] | None = None
    tools: list[dict[str, Any]] | None = None
    answer: str | Annotated[list[str], Field(min_length=1)] | dict[str, Any]
    choices: Annotated[list[str], Field(min_length=2, max_length=26)] | None = None
    tolerance: str | None = None

    @field_validator("answer", mode="before")
    @classmethod
    def _check_answer(cls, answer: Any) -> Any:
        # The fault of a union would name each of its types.
        if isinstance(answer, list):
            answer = [_digits(each) for each in answer]
        answer = _digits(answer)
        is_list = isinstance(answer, list) and all(isinstance(each, str) for each in answer)
        if not (isinstance(answer, (str, dict)) or is_list):
            raise ValueError(
                'write it as text, such as "3", as a list of texts, or as {"name": …, "arguments": {…}}'
            )
        if not isinstance(answer, dict) and not all(
            map(exact_answers.normalised, [answer] if isinstance(answer, str) else answer or [""])
        ):
            raise ValueError("it is empty; write the right response, or leave the question out")
        return answer

    @field_validator("tolerance", mode="before")
    @classmethod
    def _check_tolerance(cls, tolerance: Any) -> Any:
        text = str(_digits(tolerance))
        exact_answers.read_tolerance(text)
        return text

    @model_validator(mode="after")
    def _check_fields_together(self) -> Self:
        if (self.prompt is None) == (self.messages is None):
            raise ValueError("give either prompt or messages")
        if self.tools and self.messages is None:
            raise ValueError("tools need messages instead of prompt")
        if self.choices is not None and not set(self.right_answers) <= set(self.choices):
            raise ValueError("the answer is none of the choices; write the choice itself, not its letter")
        if self.choices is not None and len({*map(exact_answers.normalised, self.choices), ""}) <= len(
            self.choices
        ):
            raise ValueError("two choices are the same, or one is empty; give each choice a text of its own")
        if isinstance(self.answer, dict) and not isinstance(self.answer.get("name"), str):
            raise ValueError('write an answer that is a tool call as {"name": …, "arguments": {…}}')
        if isinstance(self.answer, dict) and not self.tools:
            raise ValueError("an answer that is a tool call needs `tools`, without which no call is parsed")
        is_numeric = bool(self.right_answers) and all(map(exact_answers.is_number, self.right_answers))
        if self.tolerance is not None and (self.choices is not None or not is_numeric):
            raise ValueError("a tolerance needs an answer that is a number, and no choices; remove it")
        return self

    @property
    def right_answers(self) -> list[str]:
        """All texts that are right responses; empty if the answer is a tool call."""
        if isinstance(self.answer, dict):
            return []
        return [self.answer] if isinstance(self.answer, str) else self.answer

    @property
    def allowed(self) -> exact_answers.Tolerance | None:
        """The parsed tolerance; None if there is none."""
        return None if self.tolerance is None else exact_answers.read_tolerance(self.tolerance)

    @property
    def form(self) -> Metric:
        """The metric by which this question is scored if suite.yaml names none: choice, tool_call or exact."""
        return scorer.form_of(self.answer, self.choices)


def _digits(value: Any) -> Any:
    """A number as text; other values as they are."""
    return str(value) if isinstance(value, int | float) and not isinstance(value, bool) else value


def read_questions(file: Path, metric: Metric | None) -> list[Question]:
    """Read and check all questions of a file.

    Args:
        file: JSON lines or a table.
        metric: metric of suite.yaml, which every question must fit; None for the metric of each question's form.

    Raises:
        CorpusError: the file cannot be read, has fewer than two questions, or rows cannot be used; the message lists
            all faults with their lines.
    """
    questions: list[Question] = []
    faults = Faults()
    if not file.exists():
        raise CorpusError(f"{file}: cannot be read ({os.strerror(errno.ENOENT)}); put the questions there")
    for row, fields in read_question_rows(file):
        if row.fault is not None:
            faults.add(row, row.fault)
            continue
        try:
            question = Question.model_validate(fields)
            if (metric or question.form) == "choice" and question.choices is None:
                raise ValueError("the metric choice needs the field choices")
            if (metric == "tool_call") != isinstance(question.answer, dict) and metric is not None:
                raise ValueError(f"metric {metric} does not fit this answer")
            if (metric or question.form) != "exact" and question.tolerance is not None:
                raise ValueError(f"metric {metric} has no tolerance; remove it, or use the metric exact")
            questions.append(question)
        except ValidationError as error:
            for each in error.errors():
                field = ".".join(str(part) for part in each["loc"])
                message = each["msg"].removeprefix("Value error, ")
                faults.add(row, f"{field + ': ' if field else ''}{message}")
        except ValueError as error:
            faults.add(row, str(error))
    if faults:
        raise faults.error()
    if len(questions) < 2:
        raise CorpusError(f"{file}: {len(questions)} questions give no standard error; write 2 or more")
    return questions


def describe(questions: Sequence[Question], metric: Metric | None) -> str:
    """Summarise questions in words, such as "80 questions (60 exact, 20 choice), 12 with a tolerance"."""
    metrics = Counter(metric or question.form for question in questions)
    line = (
        f"{len(questions):,} questions ({', '.join(f'{count:,} {name}' for name, count in metrics.items())})"
    )
    for name, count in (
        ("several right answers", sum(len(question.right_answers) > 1 for question in questions)),
        ("a tolerance", sum(question.tolerance is not None for question in questions)),
        ("tools", sum(bool(question.tools) for question in questions)),
    ):
        line += f", {count:,} with {name}" if count else ""
    return line


def item_rows(questions: Iterable[Question]) -> list[dict[str, str]]:
    """Rows of an lm-eval dataset, each a question as one JSON string, because a column can hold only one type."""
    return [{"question": question.model_dump_json(exclude_none=True)} for question in questions]


def messages_of(question: Question) -> list[dict[str, Any]]:
    """The chat that asks a question, as chat templates take it.

    Raises:
        ValueError: no server would accept a message of the chat.
    """
    choices = [_choice_list(question.choices)] if question.choices else []
    if question.messages is None:
        return [{"role": "user", "content": "\n".join([str(question.prompt), *choices])}]
    return [
        *map(check_message, question.messages),
        *({"role": "user", "content": each} for each in choices),
    ]


def text_of(question: Question) -> str:
    """The user's message that asks a question; for a question with `messages`, the whole chat encoded as one text.

    Raises:
        ValueError: no server would accept a message of the chat.
    """
    messages = messages_of(question)
    if question.messages is None:
        return str(messages[0]["content"])
    return chat_text(messages, question.tools)


def question_text(item: Mapping[str, str]) -> str:
    """The prompt of a row of `item_rows`, as text; lm-eval's task files name this function."""
    return text_of(Question.model_validate_json(item["question"]))


def chat_text(messages: list[dict[str, Any]], tools: list[dict[str, Any]] | None) -> str:
    """Encode a chat with its tools as one text, which lm-eval can carry; `chat_of` decodes it."""
    return CHAT_PREFIX + json.dumps({"messages": messages, "tools": tools})


def chat_of(messages: list[dict[str, Any]]) -> tuple[list[dict[str, Any]], list[dict[str, Any]] | None]:
    """Messages and tools of lm-eval's messages; a single message that encodes a whole chat (`chat_text`) is decoded."""
    content = messages[0]["content"] if len(messages) == 1 else ""
    if not content.startswith(CHAT_PREFIX):
        return messages, None
    chat = json.loads(content.removeprefix(CHAT_PREFIX))
    return chat["messages"], chat["tools"]


def as_request(message: dict[str, Any]) -> dict[str, Any]:
    """Convert a message from the form of chat templates to that of requests: tool-call arguments become JSON text."""
    if not message.get("tool_calls"):
        return message
    calls = []
    for call in message["tool_calls"]:
        function = {**call["function"], "arguments": json.dumps(call["function"]["arguments"])}
        calls.append({"id": "call", "type": "function", **call, "function": function})
    return {**message, "tool_calls": calls}


def score(question: Question, response: str, metric: Metric | None) -> float:
    """Score a response: 1 if it is right, else 0.

    Args:
        question: the question with its right answer.
        response: the model's response without thoughts.
        metric: exact, contains, choice or tool_call; None for the metric of the question's form.
    """
    return float(scorer.is_right(response, question.answer, question.choices, metric, question.allowed))


def score_response(
    item: Mapping[str, str], responses: Sequence[str], metric: Metric | None
) -> dict[str, float]:
    """Score the first response to an item in the form of lm-eval's `process_results`: {name of the score: 1 or 0}.

    Args:
        item: row of `item_rows`.
        responses: the responses.
        metric: exact, contains, choice or tool_call; None for the metric of the question's form.
    """
    return {SCORE: score(Question.model_validate_json(item["question"]), responses[0], metric)}


def _choice_list(choices: Sequence[str]) -> str:
    lines = [f"{chr(ord('A') + number)}. {choice}" for number, choice in enumerate(choices)]
    return "\n".join([*lines, "Answer with the letter of the right choice."])
