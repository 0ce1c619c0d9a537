"""Questions as lm-eval tasks: the file questions.jsonl (.json, .csv, .parquet) of an own evaluation, and the scoring.

A row holds `prompt` (the user's message) or `messages` (a chat, with `tools`), `answer`, and optionally `choices` or
`tolerance`.
The metric of suite.yaml decides what is right. Without one, the form of a question decides: it is scored by choice if
it has choices, as a tool call if its answer is an object, else by exact match. A chat with tools goes to the server's
/v1/chat/completions, so that the tool parser on which clients rely parses the calls.
"""

import errno
import json
import os
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any, Self

from pydantic import BaseModel, ConfigDict, Field, ValidationError, field_validator, model_validator

from slimqwen.evals.suites import exact_answers, scorer
from slimqwen.evals.suites.question_rows import read_question_rows
from slimqwen.evals.suites.scorer import Metric
from slimqwen.records import store
from slimqwen.text.chats import check_message
from slimqwen.text.files import CorpusError
from slimqwen.text.tables import Faults

SCORE = "exact_match"
"""Name of the score in lm-eval's results, the same for every metric."""

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
        """The texts of which each is a right response; none if the answer is a tool call."""
        if isinstance(self.answer, dict):
            return []
        return [self.answer] if isinstance(self.answer, str) else self.answer

    @property
    def allowed(self) -> exact_answers.Tolerance | None:
        """The tolerance, parsed."""
        return None if self.tolerance is None else exact_answers.read_tolerance(self.tolerance)

    @property
    def form(self) -> Metric:
        """The metric by which this question is scored if suite.yaml names none."""
        return scorer.form_of(self.answer, self.choices)


def _digits(value: Any) -> Any:
    """A number as text; other values as they are."""
    return str(value) if isinstance(value, int | float) and not isinstance(value, bool) else value


def read_questions(file: Path, metric: Metric | None) -> list[Question]:
    """Read and check all questions.

    Raises:
        CorpusError: the file cannot be read, or rows cannot be used; it has all faults with their lines.
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
    """What was understood of questions, such as "80 questions (60 exact, 20 choice), 12 with a tolerance"."""
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


def write_task(name: str, file: Path, metric: Metric | None, max_gen_toks: int, folder: Path) -> None:
    """Write the questions as an lm-eval task: task file, items and scoring.

    Args:
        name: name of the task.
        file: questions.jsonl, or another that `question_rows.find_questions` finds.
        folder: created if missing; each file in it is replaced by a rename, because two runs may use it at once.

    Raises:
        CorpusError: as `read_questions`.
    """
    questions = read_questions(file, metric)
    folder.mkdir(parents=True, exist_ok=True)
    items = folder / "items.jsonl"
    rows = [json.dumps(row) for row in item_rows(questions)]
    scoring = (
        f"from slimqwen.evals.suites import questions\n\ntext = questions.question_text\n\n\n"
        f"def score(item, responses):\n    return questions.score_response(item, responses, {metric!r})\n"
    )
    task = (
        f"task: {name}\ndataset_path: json\ndataset_kwargs: {{data_files: {{test: {json.dumps(str(items))}}}}}\n"
        "test_split: test\noutput_type: generate_until\nnum_fewshot: 0\n"
        "doc_to_text: !function scoring.text\ndoc_to_target: question\n"
        f"generation_kwargs: {{until: [], do_sample: false, temperature: 0.0, max_gen_toks: {max_gen_toks}}}\n"
        "process_results: !function scoring.score\n"
        f"metric_list: [{{metric: {SCORE}, aggregation: mean, higher_is_better: true}}]\n"
    )
    files = {items.name: "\n".join(rows) + "\n", "scoring.py": scoring, "questions.yaml": task}
    for file_name, content in files.items():
        store.publish(folder / file_name, content.encode(), replace=True)


def item_rows(questions: Iterable[Question]) -> list[dict[str, str]]:
    """Items of a task, each a JSON string: a dataset column has one type, but answers and tools have several."""
    return [{"question": question.model_dump_json(exclude_none=True)} for question in questions]


def question_text(item: Mapping[str, str]) -> str:
    """The user's message of an item, or its whole chat as `chat_text` encodes it.

    Raises:
        ValueError: no server would accept a message of the chat.
    """
    question = Question.model_validate_json(item["question"])
    choices = [_choice_list(question.choices)] if question.choices else []
    if question.messages is None:
        return "\n".join([str(question.prompt), *choices])
    messages = [
        *map(check_message, question.messages),
        *({"role": "user", "content": each} for each in choices),
    ]
    return chat_text(messages, question.tools)


def chat_text(messages: list[dict[str, Any]], tools: list[dict[str, Any]] | None) -> str:
    """Encode a chat as text; `chat_of` decodes it."""
    return CHAT_PREFIX + json.dumps({"messages": messages, "tools": tools})


def chat_of(messages: list[dict[str, Any]]) -> tuple[list[dict[str, Any]], list[dict[str, Any]] | None]:
    """Messages and tools of a chat by lm-eval, whose single message may be a chat encoded by `chat_text`."""
    content = messages[0]["content"] if len(messages) == 1 else ""
    if not content.startswith(CHAT_PREFIX):
        return messages, None
    chat = json.loads(content.removeprefix(CHAT_PREFIX))
    return chat["messages"], chat["tools"]


def score_response(
    item: Mapping[str, str], responses: Sequence[str], metric: Metric | None
) -> dict[str, float]:
    """Score a response as lm-eval's `process_results` does: 1 if it is right, else 0.

    Args:
        responses: the model's responses without thoughts; only the first is scored.
        metric: None for the metric of the question's form.
    """
    question = Question.model_validate_json(item["question"])
    return {
        SCORE: float(
            scorer.is_right(responses[0], question.answer, question.choices, metric, question.allowed)
        )
    }


def _choice_list(choices: Sequence[str]) -> str:
    lines = [f"{chr(ord('A') + number)}. {choice}" for number, choice in enumerate(choices)]
    return "\n".join([*lines, "Answer with the letter of the right choice."])
