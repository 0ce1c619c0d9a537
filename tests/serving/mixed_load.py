"""Mixed load: completions and chats, streamed or not, malformed ones among them."""

import asyncio
import contextlib
import json
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import httpx

from slimqwen.vllm_plugin.api_key import authorization

PATHS = ("/v1/completions", "/v1/chat/completions")
"""Paths that questions are sent to."""

EXPECTED = ("answered", "overload", "refused")
"""Outcomes that are no faults."""

TIMEOUT_S = 300
_AFTER_FAULT_S = 0.5


@dataclass(frozen=True)
class Question:
    """A request and the length of its answer, None for a malformed request, which is to be refused."""

    path: str
    content: bytes
    tokens: int | None
    streams: bool


def question(number: int, paths: Sequence[str] = PATHS) -> Question:
    """Question of a number: a completion or a chat, streamed or not, of 2 to 8 tokens; one in eight is malformed."""
    if number % 8 == 7:
        wrong = (b'{"prompt": "The"', b'{"prompt": "The", "max_tokens": 10000000}', b'{"prompt": 5}', b"\xff")
        return Question(PATHS[0], wrong[number // 8 % len(wrong)], None, False)
    tokens, streams = 2 + number % 7, number % 2 == 0
    body: dict[str, Any] = {"max_tokens": tokens, "ignore_eos": True, "temperature": number % 3 / 2}
    if streams:
        body |= {"stream": True, "stream_options": {"include_usage": True}}
    path = paths[number // 2 % len(paths)]
    text = f"Who lives in house {number}?"
    body |= {"prompt": text} if path == PATHS[0] else {"messages": [{"role": "user", "content": text}]}
    return Question(path, json.dumps(body).encode(), tokens, streams)


def outcome(question: Question, answer: httpx.Response) -> str:
    """Outcome of a request: answered, overload or refused; any other text names a fault."""
    kind = "a malformed request" if question.tokens is None else f"a request to {question.path}"
    with contextlib.suppress(ValueError, LookupError, TypeError, AttributeError):
        if answer.status_code == httpx.codes.TOO_MANY_REQUESTS:
            clear = answer.json()["error"]["message"] and answer.headers.get("Retry-After")
            return "overload" if clear else "429 says nothing"
        if question.tokens is None:
            refusal = answer.json() if answer.status_code == httpx.codes.BAD_REQUEST else {}
            if refusal.get("error") or refusal.get("detail"):
                return "refused"
            return f"{answer.status_code} for {kind}"
        if answer.status_code != httpx.codes.OK:
            return f"{answer.status_code} for {kind}"
        if not question.streams:
            parts = [answer.json()]
        else:
            *lines, last = [line.removeprefix("data: ") for line in answer.text.splitlines() if line]
            if last != "[DONE]":
                return f"a stream of {question.path} was cut off"
            parts = [json.loads(line) for line in lines]
        reasons = [choice["finish_reason"] for part in parts for choice in part.get("choices", ())]
        tokens = [part["usage"]["completion_tokens"] for part in parts if part.get("usage")]
        is_complete = reasons[-1:] == ["length"] and tokens[-1:] == [question.tokens]
        return "answered" if is_complete else f"an answer of {question.path} is not as long as requested"
    return f"{answer.status_code} that cannot be read, for {kind}"


async def load(url: str, numbers: Iterable[int], clients: int, paths: Sequence[str] = PATHS) -> Counter[str]:
    """Send the questions of these numbers and count the requests by outcome.

    Each client sends the next question after its answer, and waits when the server is overloaded.
    """
    remaining, outcomes = iter(numbers), Counter[str]()
    async with _client(url) as http:

        async def ask() -> None:
            for number in remaining:
                request = question(number, paths)
                headers = {"Content-Type": "application/json"}
                try:
                    answer = await http.post(request.path, content=request.content, headers=headers)
                    result = outcome(request, answer)
                except httpx.HTTPError as error:
                    result = f"lost: {type(error).__name__}"
                outcomes[result] += 1
                if result == "overload":
                    await asyncio.sleep(float(answer.headers["Retry-After"]))
                elif result not in EXPECTED:
                    await asyncio.sleep(_AFTER_FAULT_S)

        await asyncio.gather(*(ask() for _ in range(clients)))
    return outcomes


def _client(url: str) -> httpx.AsyncClient:
    return httpx.AsyncClient(
        base_url=url,
        timeout=TIMEOUT_S,
        trust_env=False,
        # vLLM and httpx both close connections that are idle for 5 s; a request sent at that moment would be lost.
        limits=httpx.Limits(max_connections=None, keepalive_expiry=2),
        headers=authorization(),
    )
