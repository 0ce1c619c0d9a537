"""What a request may ask for, inside vLLM's API server: more is refused at once, with the reason.

vLLM limits its queue (`--max-num-queued-reqs`, `--max-num-queued-tokens`) and refuses prompts and answers that exceed
the context. Here is what it leaves: bodies of any size, answers that it cuts without a word, and overload that it calls
503 without saying when to come back.
"""

import functools
import importlib
from collections.abc import Awaitable, Iterator
from http import HTTPStatus
from typing import Any

from starlette.requests import Request
from starlette.responses import Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from slimqwen.serving import policy
from slimqwen.serving.engine_fixes.upstream import expect, expect_parameters
from slimqwen.serving.refusal import refusal

_NAME = "request_limits"
_RETRY_AFTER_S = 1

_COMPLETIONS = "vllm.entrypoints.openai.completion.serving"
_COUNTING = (
    "vllm.entrypoints.openai.chat_completion.serving",
    "vllm.entrypoints.openai.chat_completion.batch_serving",
    _COMPLETIONS,
)
"""Modules that ask vLLM's `get_max_tokens` how long an answer to a client's one question may be."""


class BodyLimit:
    """413 for a body over the policy's limit, before any of it is parsed; the rest passes untouched."""

    def __init__(self, app: ASGIApp, max_bytes: int | None = None) -> None:
        """Wrap an application.

        Args:
            app: what answers behind this.
            max_bytes: of a body; None for what the policy says.
        """
        self._app = app
        self._max_bytes = policy.read().max_body_bytes if max_bytes is None else max_bytes

    def __call__(self, scope: Scope, receive: Receive, send: Send) -> Awaitable[None]:
        """Answer, or let the application answer."""
        if scope["type"] == "http":
            for name, value in scope["headers"]:
                if name == b"content-length" and int(value) > self._max_bytes:
                    return self._too_large()(scope, receive, send)
                if name == b"transfer-encoding":
                    return self._with_body(scope, receive, send)
        return self._app(scope, receive, send)

    async def _with_body(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Have a body of untold size read before the application sees the request."""
        body = bytearray()
        while True:
            message = await receive()
            if message["type"] == "http.disconnect":
                return
            body += message.get("body", b"")
            if len(body) > self._max_bytes:
                await self._too_large()(scope, receive, send)
                return
            if not message.get("more_body", False):
                break
        again: Iterator[Message] = iter([{"type": "http.request", "body": bytes(body), "more_body": False}])

        async def receive_again() -> Message:
            return next(again, None) or await receive()

        await self._app(scope, receive_again, send)

    def _too_large(self) -> Response:
        return refusal(
            HTTPStatus.REQUEST_ENTITY_TOO_LARGE,
            f"the body is larger than {self._max_bytes} bytes, the limit here",
        )


def answer_overload(app: Any) -> None:
    """Have vLLM's application answer 429 with Retry-After where its queue is full, not 503.

    Args:
        app: vLLM's application, before it is started.
    """
    from vllm.exceptions import MaxQueuedTokensError, QueueOverflowError

    async def too_many(request: Request, error: Exception) -> Response:
        return refusal(HTTPStatus.TOO_MANY_REQUESTS, str(error), _RETRY_AFTER_S)

    for overload in (QueueOverflowError, MaxQueuedTokensError):
        app.add_exception_handler(overload, too_many)


def refuse_longer_answers() -> None:
    """Have vLLM refuse a question whose prompt and `max_tokens` exceed the context, or the variant's longest answer.

    vLLM answers such a question with fewer tokens than were asked for and says nothing. A question without
    `max_tokens` still gets what there is room for; so does a completion that asks for what it would get without, which
    cannot be told apart. Of chats and completions alone: `/v1/responses` counts for itself. Goes away when
    `get_max_tokens` in vllm/entrypoints/serve/utils/api_utils.py raises.

    Raises:
        EngineFixError: this vLLM is not the one it was written for.
    """
    from vllm.entrypoints.openai.completion.protocol import CompletionRequest
    from vllm.entrypoints.serve.utils import api_utils
    from vllm.exceptions import VLLMValidationError

    stock = api_utils.get_max_tokens
    names = ("max_model_len", "max_tokens", "input_length", "default_sampling_params", "override_max_tokens")
    expect_parameters(_NAME, stock, (*names, "truncate_prompt_tokens"))

    def limited(unsaid: int | None) -> Any:
        @functools.wraps(stock)
        def get_max_tokens(
            max_model_len: int, max_tokens: int | None, input_length: int, *others: Any, **named: Any
        ) -> int:
            room = int(stock(max_model_len, max_tokens, input_length, *others, **named))
            if max_tokens is not None and max_tokens > room and max_tokens != unsaid:
                raise VLLMValidationError(
                    f"max_tokens={max_tokens} were asked for and at most {room} can be answered to a prompt of "
                    f"{input_length} tokens here: the context is {max_model_len} tokens, prompt and answer together",
                    parameter="max_tokens",
                    value=max_tokens,
                )
            return room

        return get_max_tokens

    for name in _COUNTING:
        module = importlib.import_module(name)
        if getattr(module.get_max_tokens, "__wrapped__", None) is stock:
            continue
        expect(_NAME, module.get_max_tokens is stock, f"{name} has a get_max_tokens of its own")
        unsaid = CompletionRequest.model_fields["max_tokens"].default if name == _COMPLETIONS else None
        module.get_max_tokens = limited(unsaid)  # type: ignore[attr-defined]
