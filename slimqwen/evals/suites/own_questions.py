"""Asks the questions of an own evaluation at a running server's /v1/chat/completions, as its clients do.

The server renders the chats with its own template and parses thoughts and tool calls itself.
"""

import asyncio
import math
from collections.abc import Mapping, Sequence
from typing import Any

import httpx

from slimqwen.errors import SlimqwenError
from slimqwen.evals.suites import questions
from slimqwen.evals.suites.generation import SLOWEST_TOKEN_S, TIMEOUT_S, Generation, PromptTooLongError
from slimqwen.evals.suites.item_texts import cut, right_answer
from slimqwen.evals.suites.loops import is_looping
from slimqwen.evals.suites.questions import Question
from slimqwen.evals.suites.scored import Item, TaskRun, item_hash
from slimqwen.evals.suites.suite import AUTO, Limit, Suite, SuiteTask
from slimqwen.evals.suites.thinking import resolve_thinking
from slimqwen.progress import Progress, silent
from slimqwen.records.journal import Journal
from slimqwen.records.split import Split
from slimqwen.serving.http_client import open_async_client
from slimqwen.serving.shared_server import SharedServer, require_healthy, server_lost
from slimqwen.text.files import CorpusError

Request = dict[str, Any]


_REFUSALS = (httpx.codes.BAD_REQUEST, httpx.codes.UNPROCESSABLE_ENTITY)


class _RefusedRequestError(SlimqwenError):
    """The server answered that a request cannot be served, which another try would not change."""

    def __init__(self, place: int, said: str) -> None:
        super().__init__(said)
        self.place, self.said = place, said


def ask_questions(
    suite: Suite,
    server: SharedServer,
    *,
    limit: Limit,
    answers: Journal | None = None,
    split: Split | None = None,
    progress: Progress = silent,
) -> list[TaskRun]:
    """Ask the questions of an own evaluation and score the responses.

    Args:
        suite: suite of the own evaluation.
        server: server that gets the requests.
        limit: number of questions, from the beginning of the file; AUTO: by power analysis; None: all.
        answers: journal of responses, with those of an interrupted run; None keeps none.
        split: side of the split whose questions are asked; None for both sides.
        progress: receives (activity, done, total) in questions.

    Returns:
        The run of the suite's only task.

    Raises:
        EvalError: the server has no chat template, or one that ignores the thinking switch that the suite sets.
        ServerLostError: the server died.
        PromptTooLongError: the served context cannot hold a question.
        CorpusError: the questions cannot be read or used, or the server refuses one.
    """
    (task,), own = suite.tasks, suite.questions
    assert own is not None
    every = suite.read_questions(server.variant.root)
    thinking = resolve_thinking(suite, task, server)
    count = task.items_to_decide if limit == AUTO else limit
    asked = [
        (number, question)
        for number, question in enumerate(every)
        if split is None or split.has(_split_text(question))
    ][:count]
    requests = [_request(number, question, server, suite) for number, question in asked]
    activity = f"generating responses of {task.name}"
    try:
        responses = _ask(requests, server, own.max_gen_toks, answers, activity, progress)
    except _RefusedRequestError as error:
        number, _ = asked[error.place]
        raise _faulty_question(suite, server, number, f"the server refuses it ({error.said})") from error
    # With a reasoning parser the content is the response already, also where the thoughts are empty.
    removed = None if server.server.command.flags.get("reasoning-parser") else thinking
    generations = [Generation.of_choice(choice, usage, removed) for choice, usage in responses]
    items = [
        _item(task, number, question, generation, questions.score(question, generation, own.metric))
        for (number, question), generation in zip(asked, generations, strict=True)
    ]
    require_healthy(server.server, "finishing")
    return [TaskRun(task, items, len(every), suite.settings_of(task))]


def _request(number: int, question: Question, server: SharedServer, suite: Suite) -> Request:
    """The chat of a question as the server's endpoints take it, without the length of the response."""
    try:
        messages = [questions.as_request(message) for message in questions.messages_of(question)]
    except ValueError as error:
        raise _faulty_question(suite, server, number, str(error)) from None
    thinking = suite.tasks[0].thinking
    request: Request = {"model": server.server.model, "messages": messages}
    if question.tools:
        request["tools"] = question.tools
    if thinking is not None:
        request["chat_template_kwargs"] = {"enable_thinking": thinking}
    return request


def _faulty_question(suite: Suite, server: SharedServer, number: int, fault: str) -> CorpusError:
    file = suite.questions_file(server.variant.root)
    return CorpusError(f"{file}, question {number + 1}: {fault}; correct or remove it")


def _ask(
    requests: Sequence[Request],
    server: SharedServer,
    max_tokens: int,
    answers: Journal | None,
    activity: str,
    progress: Progress,
) -> list[tuple[Mapping[str, Any], Mapping[str, Any]]]:
    """Send the requests, as many at a time as the server runs at once; returns choice and usage of each response.

    No request is sent after one that failed, because the server is probably gone.
    """
    known: list[Any] = [answers.get(request) if answers is not None else None for request in requests]
    unknown = [number for number, answer in enumerate(known) if answer is None]

    async def send_unknown() -> None:
        timeout_s = max(TIMEOUT_S, math.ceil(max_tokens * SLOWEST_TOKEN_S))
        at_once = max(1, server.max_num_seqs)
        slots = asyncio.Semaphore(at_once)

        async def send(number: int) -> tuple[int, Any]:
            async with slots:
                return number, await _send(client, number, requests[number], max_tokens, server.max_model_len)

        done = len(requests) - len(unknown)
        progress(activity, done, len(requests))
        async with open_async_client(timeout_s, server.server.base_url, connections=at_once) as client:
            tasks = [asyncio.create_task(send(number)) for number in unknown]
            try:
                for task in asyncio.as_completed(tasks):
                    number, answer = await task
                    known[number] = answer
                    if answers is not None:
                        answers.add(requests[number], answer)
                    progress(activity, done := done + 1, len(requests))
            finally:
                for each in tasks:
                    each.cancel()
                await asyncio.gather(*tasks, return_exceptions=True)

    try:
        asyncio.run(send_unknown())
    except httpx.HTTPStatusError as error:
        said = f"{error.response.status_code}, {error.response.text[:200]}"
        raise server_lost(server.server, activity, said) from error
    except (httpx.HTTPError, LookupError, TypeError, ValueError) as error:
        raise server_lost(server.server, activity, error) from error
    return [(choice, usage) for choice, usage in known]


async def _send(
    client: httpx.AsyncClient, number: int, request: Request, max_tokens: int, max_model_len: int
) -> list[Any]:
    """Send a request for at most `max_tokens` tokens, fewer where the context is shorter; returns choice and usage."""

    async def post(path: str, body: Request) -> Any:
        response = await client.post(path, json=body)
        if response.status_code in _REFUSALS:
            raise _RefusedRequestError(number, f"{response.status_code}, {response.text[:200]}")
        return response.raise_for_status().json()

    # The server refuses a response that could outgrow the context, and only it knows the length of the rendered chat.
    prompt_tokens = int((await post("/tokenize", request))["count"])
    if prompt_tokens >= max_model_len:
        raise PromptTooLongError.of(prompt_tokens, max_model_len)
    length = {"max_tokens": min(max_tokens, max_model_len - prompt_tokens)}
    response = await post("/v1/chat/completions", {**request, **questions.SAMPLING, **length})
    return [response["choices"][0], response.get("usage") or {}]


def _item(task: SuiteTask, number: int, question: Question, generation: Generation, value: float) -> Item:
    stated = question.model_dump_json(exclude_none=True)
    return Item(
        task=task.name,
        index=number,
        item=item_hash([task.name, {"question": stated}]),
        value=value,
        weight=1.0,
        output=str(generation),
        truncated=generation.finish_reason == "length",
        output_tokens=generation.tokens,
        looping=is_looping(generation),
        question=cut(_split_text(question)),
        expected=right_answer(question.answer),
    )


def _split_text(question: Question) -> str:
    """The text whose hash decides on which side of the split a question is, so that equal questions are on one."""
    return questions.text_of(question).removeprefix(questions.CHAT_PREFIX)
