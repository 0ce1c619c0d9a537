"""Request limits inside vLLM's API server: a request over a limit is refused at once, with the reason.

vLLM limits its queue (`--max-num-queued-reqs`, `--max-num-queued-tokens`) and refuses prompts that exceed the context.
This module adds a limit of bodies, an error instead of a silently shortened response, 429 with Retry-After instead of a
bare 503 under overload, and a thinking budget for requests that set none.
"""

import functools
import importlib
import json
import traceback
from collections.abc import Awaitable, Callable, Iterator
from http import HTTPStatus
from typing import Any

from fastapi.dependencies.utils import request_body_to_args
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from slimqwen.vllm_plugin import policy
from slimqwen.vllm_plugin.patches.upstream import replace
from slimqwen.vllm_plugin.refusal import is_stream, refusal

_RETRY_AFTER_S = 1

_COMPLETIONS = "vllm.entrypoints.openai.completion.serving"
_COUNTING = (
    "vllm.entrypoints.openai.chat_completion.serving",
    "vllm.entrypoints.openai.chat_completion.batch_serving",
    _COMPLETIONS,
)
"""Modules that get the longest allowed response to a request from vLLM's `get_max_tokens`."""


class BodyLimit:
    """Returns 413 for a body over the limit, before any of it is parsed; other requests pass unchanged.

    Args:
        app: the application.
        max_bytes: the limit; None for the variant's MAX_BODY_BYTES, by default 16 MiB.
    """

    def __init__(self, app: ASGIApp, max_bytes: int | None = None) -> None:
        self._app = app
        self._max_bytes = policy.read_policy().max_body_bytes if max_bytes is None else max_bytes

    def __call__(self, scope: Scope, receive: Receive, send: Send) -> Awaitable[None]:
        """Refuse a request with 413, or pass it to the application."""
        if scope["type"] == "http":
            for name, value in scope["headers"]:
                if name == b"content-length" and int(value) > self._max_bytes:
                    return self._too_large()(scope, receive, send)
                if name == b"transfer-encoding":
                    return self._with_body(scope, receive, send)
        return self._app(scope, receive, send)

    async def _with_body(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Read a body of unknown size before the application sees the request."""
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
        messages: Iterator[Message] = iter(
            [{"type": "http.request", "body": bytes(body), "more_body": False}]
        )

        async def receive_again() -> Message:
            return next(messages, None) or await receive()

        await self._app(scope, receive_again, send)

    def _too_large(self) -> Response:
        return refusal(
            HTTPStatus.REQUEST_ENTITY_TOO_LARGE,
            f"the body is larger than {self._max_bytes} bytes, the limit of this server",
        )


class RefusedStreams:
    """Gives a stream that begins with an error the status of the error, not 200; other responses pass unchanged.

    vLLM checks for room in its queue before it begins a stream, and again after; some of several simultaneous streams
    pass only the first check. The status of a stream is therefore sent together with its first event. Remove this class
    when vLLM reserves a place in the queue at its first check.
    """

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    def __call__(self, scope: Scope, receive: Receive, send: Send) -> Awaitable[None]:
        """Pass a request to the application, and hold back the status of a stream until its first event."""
        if scope["type"] != "http" or scope["method"] != "POST":
            return self._app(scope, receive, send)
        held_start: Message | None = None
        is_refused = False

        async def send_from_first_event(message: Message) -> None:
            nonlocal held_start, is_refused
            if is_refused:
                return
            if message["type"] == "http.response.start" and is_stream(message):
                held_start = message
                return
            if held_start is not None:
                start, held_start = held_start, None
                error_response = _error_response(message.get("body", b""))
                if error_response is not None:
                    is_refused = True
                    await error_response(scope, receive, send)
                    return
                await send(start)
            await send(message)

        return self._app(scope, receive, send_from_first_event)


def _error_response(event: bytes) -> Response | None:
    """The response that replaces a stream which begins with `event`; None if the event is no error."""
    if not event.startswith(b'data: {"error"'):
        return None
    answer = json.loads(event.splitlines()[0].removeprefix(b"data: "))
    status, kind = answer["error"]["code"], answer["error"]["type"]
    # vLLM's errors about a full queue have this type.
    if (status, kind) == (HTTPStatus.SERVICE_UNAVAILABLE, HTTPStatus.SERVICE_UNAVAILABLE.phrase):
        return _too_many(answer["error"]["message"])
    return JSONResponse(answer, status)


def _too_many(reason: str) -> Response:
    return refusal(HTTPStatus.TOO_MANY_REQUESTS, reason, _RETRY_AFTER_S)


def answer_overload(app: Any) -> None:
    """Make vLLM's application, before its start, return 429 with Retry-After instead of 503 if its queue is full."""
    from vllm.exceptions import MaxQueuedTokensError, QueueOverflowError

    async def too_many(request: Request, error: Exception) -> Response:
        return _too_many(str(error))

    for overload in (QueueOverflowError, MaxQueuedTokensError):
        app.add_exception_handler(overload, too_many)


def refuse_unreadable_bodies(app: Any) -> None:
    """Make vLLM's application return 400 instead of 500 if reading a body fails on a value of the wrong type.

    vLLM reads some values before pydantic has checked their types: it calls `get` on `structured_outputs` even if that
    is a string. Errors after the body was read keep vLLM's status. Remove this function when
    `check_structured_outputs_count` in vllm/entrypoints/openai/chat_completion/protocol.py refuses such values.
    """

    async def unreadable(request: Request, error: Exception) -> Response:
        frames = [frame.f_code for frame, _ in traceback.walk_tb(error.__traceback__)]
        if request_body_to_args.__code__ not in frames:
            raise error
        reason = f"a value in the body has the wrong type: {frames[-1].co_name}: {error}"
        return refusal(HTTPStatus.BAD_REQUEST, reason)

    for error_class in (AttributeError, LookupError):
        app.add_exception_handler(error_class, unreadable)


def refuse_longer_answers() -> None:
    """Make vLLM refuse a request whose prompt and `max_tokens` exceed the context, or the variant's longest response.

    vLLM silently generates fewer tokens than such a request asks for. A request without `max_tokens` still gets the
    tokens that fit, and so does a completion that names the default, which looks the same. Only chats and completions
    are covered: `/v1/responses` has its own count. Remove this function when `get_max_tokens` in
    vllm/entrypoints/serve/utils/api_utils.py raises.

    Raises:
        PatchError: the installed vLLM is not the one for which the function was written.
    """
    from vllm.entrypoints.openai.completion.protocol import CompletionRequest
    from vllm.exceptions import VLLMValidationError

    def limited(
        default: int | None,
        get_max_tokens: Callable[..., int],
        max_model_len: int,
        max_tokens: int | None,
        input_length: int,
        *arguments: Any,
        **keywords: Any,
    ) -> int:
        room = get_max_tokens(max_model_len, max_tokens, input_length, *arguments, **keywords)
        if max_tokens is not None and max_tokens > room and max_tokens != default:
            raise VLLMValidationError(
                f"max_tokens={max_tokens} exceeds the limit: at most {room} for a prompt of {input_length} tokens; "
                f"the context is {max_model_len} tokens, prompt and response together",
                parameter="max_tokens",
                value=max_tokens,
            )
        return room

    names = ("max_model_len", "max_tokens", "input_length", "default_sampling_params", "override_max_tokens")
    for name in _COUNTING:
        default = CompletionRequest.model_fields["max_tokens"].default if name == _COMPLETIONS else None
        replacement = functools.partial(limited, default)
        module = importlib.import_module(name)
        replace(
            "refuse_longer_answers", module, "get_max_tokens", replacement, (*names, "truncate_prompt_tokens")
        )


def forget_unsent_requests() -> None:
    """Make vLLM forget a request that it could not send to its engine, and refuse it with the reason.

    vLLM keeps such a request in its queue for ever: after `--max-num-queued-reqs` requests with a `top_k` beyond 64
    bits, every later request is refused while /health returns 200. Remove this function when `_add_request` in
    vllm/v1/engine/async_llm.py aborts requests that it could not send, as `add_request` does if n > 1.

    Raises:
        PatchError: the installed vLLM is not the one for which the function was written.
    """
    from vllm.exceptions import VLLMValidationError
    from vllm.v1.engine.async_llm import AsyncLLM

    async def send_or_forget(
        send: Callable[..., Awaitable[None]], self: Any, request: Any, *arguments: Any
    ) -> None:
        try:
            await send(self, request, *arguments)
        except BaseException:
            if self.output_processor.has_request(request.request_id):
                await self.abort(request.request_id, internal=True)
            raise

    async def add_or_refuse(add: Callable[..., Awaitable[Any]], *arguments: Any, **keywords: Any) -> Any:
        try:
            return await add(*arguments, **keywords)
        except OverflowError as error:
            raise VLLMValidationError(f"a number of the request is out of range: {error}") from error

    names = ("self", "request", "prompt", "parent_req", "index", "queue")
    replace("forget_unsent_requests", AsyncLLM, "_add_request", send_or_forget, names)
    replace("forget_unsent_requests", AsyncLLM, "add_request", add_or_refuse)


def refuse_chosen_logprobs_of_drafts() -> None:
    """Make vLLM refuse `logprob_token_ids` with speculative decoding.

    vLLM's rejection sampler treats the log-probabilities of the named tokens as those of the whole vocabulary, and the
    engine dies: one chat, or any request to /generative_scoring, ends the server. Remove this function when
    `_get_logprobs_tensors` in vllm/v1/sample/rejection_sampler.py supports such requests, or vLLM itself refuses them.

    Raises:
        PatchError: the installed vLLM is not the one for which the function was written.
    """
    from vllm.exceptions import VLLMValidationError
    from vllm.sampling_params import SamplingParams

    def verify(
        stock: Callable[..., None],
        self: Any,
        model_config: Any,
        speculative_config: Any,
        structured_outputs_config: Any,
        tokenizer: Any,
    ) -> None:
        stock(self, model_config, speculative_config, structured_outputs_config, tokenizer)
        if speculative_config is not None and self.logprob_token_ids is not None:
            raise VLLMValidationError(
                "Log-probabilities of chosen tokens (logprob_token_ids, /generative_scoring) are not supported with "
                "speculative decoding."
            )

    replace("refuse_chosen_logprobs_of_drafts", SamplingParams, "verify", verify)


def limit_thinking(budget: int) -> None:
    """Give a thinking budget to every request (chat, completion, response) that sets none.

    Args:
        budget: largest number of tokens between `<think>` and `</think>`.

    Raises:
        PatchError: the installed vLLM is not the one for which the function was written.
    """
    from vllm.entrypoints.openai.chat_completion.protocol import ChatCompletionRequest
    from vllm.entrypoints.openai.completion.protocol import CompletionRequest
    from vllm.entrypoints.openai.responses.protocol import ResponsesRequest

    def with_budget(to_sampling_params: Callable[..., Any], *arguments: Any, **keywords: Any) -> Any:
        parameters = to_sampling_params(*arguments, **keywords)
        if parameters.thinking_token_budget is None:
            parameters.thinking_token_budget = budget
        return parameters

    for request, length_parameter in (
        (ChatCompletionRequest, "max_tokens"),
        (CompletionRequest, "max_tokens"),
        (ResponsesRequest, "default_max_tokens"),
    ):
        names = ("self", length_parameter, "default_sampling_params")
        replace("limit_thinking", request, "to_sampling_params", with_budget, names)
