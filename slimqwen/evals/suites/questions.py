"""Questions as lm-eval tasks: the file eval/own/NAME/questions.jsonl of an own evaluation, and the scoring.

A line holds `prompt` (the user's message) or `messages` (a chat, with `tools`), `answer`, and optionally `choices`.
The metric of suite.yaml decides what is right. Without one, the form of a question decides: it is scored by choice if
it has choices, as a tool call if its answer is an object, else by exact match. A chat with tools goes to the server's
/v1/chat/completions, so that the tool parser on which clients rely parses the calls.
"""

import json
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any, Self

from pydantic import BaseModel, ConfigDict, Field, ValidationError, field_validator, model_validator

from slimqwen.evals.suites import exact_answers, scorer
from slimqwen.evals.suites.scorer import Metric
from slimqwen.records import store
from slimqwen.text.chats import check_message
from slimqwen.text.files import CorpusError, read_json_lines

SCORE = "exact_match"
"""Name of the score in lm-eval's results, the same for every metric."""

CHAT_PREFIX = "slimqwen-chat:"
"""Prefix of a text that encodes a whole chat, because lm-eval passes only text; the client decodes and renders it."""


class Question(BaseModel):
    """One line of questions.jsonl.

    Attributes:
        prompt: message of the user.
        messages: chat instead of a prompt, as chat templates take it, without the response that is asked for.
        tools: functions that the chat offers.
        answer: the right response, one of the choices, or a list of several that are each right; or the tool call
            {"name", "arguments"}.
        choices: options of a multiple-choice question, listed after the prompt under the letters A, B, C, …
    """

    model_config = ConfigDict(extra="ignore", frozen=True)

    prompt: Annotated[str, Field(min_length=1)] | None = None
    messages: Annotated[list[dict[str, Any]], Field(min_length=1)] | None = None
    tools: list[dict[str, Any]] | None = None
    answer: str | Annotated[list[str], Field(min_length=1)] | dict[str, Any]
    choices: Annotated[list[str], Field(min_length=2, max_length=26)] | None = None

    @field_validator("answer", mode="before")
    @classmethod
    def _check_answer(cls, answer: Any) -> Any:
        # The fault of a union would name each of its types.
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
        return self

    @property
    def right_answers(self) -> list[str]:
        """The texts of which each is a right response; none if the answer is a tool call."""
        if isinstance(self.answer, dict):
            return []
        return [self.answer] if isinstance(self.answer, str) else self.answer

    @property
    def form(self) -> Metric:
        """The metric by which this question is scored if suite.yaml names none."""
        return scorer.form_of(self.answer, self.choices)


def read_questions(file: Path, metric: Metric | None) -> list[Question]:
    """Read and check all questions.

    Raises:
        CorpusError: the file cannot be read, or lines cannot be used; the message names faults with their lines.
    """
    questions: list[Question] = []
    faults: dict[str, list[int]] = {}
    try:
        data = file.read_bytes()
    except OSError as error:
        raise CorpusError(f"{file}: cannot be read ({error.strerror}); put the questions there") from None
    for position, content in read_json_lines(data.splitlines(keepends=True), file):
        number = data.count(b"\n", 0, position) + 1
        try:
            question = Question.model_validate(content)
            if (metric or question.form) == "choice" and question.choices is None:
                raise ValueError("the metric choice needs the field choices")
            if (metric == "tool_call") != isinstance(question.answer, dict) and metric is not None:
                raise ValueError(f"metric {metric} does not fit this answer")
            questions.append(question)
        except ValidationError as error:
            first = error.errors()[0]
            field = ".".join(str(part) for part in first["loc"])
            fault = f"{field + ': ' if field else ''}{first['msg'].removeprefix('Value error, ')}"
            faults.setdefault(fault, []).append(number)
        except ValueError as error:
            faults.setdefault(str(error), []).append(number)
    if faults:
        named = "; ".join(f"{_line_numbers(numbers)}: {fault}" for fault, numbers in faults.items())
        raise CorpusError(f"{file}: {named}; correct them")
    if len(questions) < 2:
        raise CorpusError(f"{file}: {len(questions)} questions give no standard error; write 2 or more")
    return questions


def _line_numbers(numbers: Sequence[int]) -> str:
    """Text that names the first three of these line numbers and how many more there are."""
    more = f" and {len(numbers) - 3} more" if len(numbers) > 3 else ""
    return f"line{'s' if len(numbers) > 1 else ''} {', '.join(map(str, numbers[:3]))}{more}"


def write_task(name: str, file: Path, metric: Metric | None, max_gen_toks: int, folder: Path) -> None:
    """Write the questions as an lm-eval task: task file, items and scoring.

    Args:
        name: name of the task.
        file: questions.jsonl.
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
    return {SCORE: float(scorer.is_right(responses[0], question.answer, question.choices, metric))}


def _choice_list(choices: Sequence[str]) -> str:
    lines = [f"{chr(ord('A') + number)}. {choice}" for number, choice in enumerate(choices)]
    return "\n".join([*lines, "Answer with the letter of the right choice."])
