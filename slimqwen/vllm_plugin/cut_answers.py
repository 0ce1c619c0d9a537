"""Answers that the end of the server or of its engine cuts: 503 with Retry-After, or an error event in a stream.

vLLM answers 500 to some of them and 200 with the finish reason `abort` to others. To be removed when
`_send_abort_outputs` in vllm/v1/engine/core.py and `engine_error_handler` in
vllm/entrypoints/serve/exception_handling/ answer 503.
"""

import asyncio
import contextlib
import functools
from collections.abc import AsyncGenerator, Callable
from http import HTTPStatus
from typing import Any

from starlette.datastructures import MutableHeaders
from starlette.responses import Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from slimqwen.vllm_plugin.refusal import is_stream, refusal

RETRY_AFTER_S = 5
"""Value of Retry-After: another server answers at once, a restart of this one takes some seconds."""

EndReason = Callable[[], str | None]
"""Why answers are cut now, for the client; None while the server and its engine live."""


async def answer(app: ASGIApp, scope: Scope, receive: Receive, send: Send, end_reason: EndReason) -> None:
    """Let an application answer an HTTP request, and answer 503 where the end makes it fail.

    Without a reason for the end a server error passes unchanged.
    """
    status: int | None = None
    streams = is_complete = is_refused = False

    async def send_or_refuse(message: Message) -> None:
        nonlocal status, streams, is_complete, is_refused
        if is_refused:
            return
        if message["type"] == "http.response.start":
            status = message["status"]
            streams = is_stream(message)
            reason = end_reason()
            if reason is not None and status == HTTPStatus.INTERNAL_SERVER_ERROR:
                is_refused = True
                await end_refusal(reason)(scope, receive, send)
                return
            if reason is not None and status == HTTPStatus.SERVICE_UNAVAILABLE:
                MutableHeaders(scope=message).setdefault("Retry-After", str(RETRY_AFTER_S))
        else:
            is_complete = not message.get("more_body", False)
        await send(message)

    try:
        await app(scope, receive, send_or_refuse)
    except (Exception, asyncio.CancelledError):
        reason = end_reason()
        if reason is not None and status is None:
            await end_refusal(reason)(scope, receive, send)
        elif reason is not None and streams and not (is_complete or is_refused):
            event = b"data: " + bytes(end_refusal(reason).body) + b"\n\ndata: [DONE]\n\n"
            await send({"type": "http.response.body", "body": event})
        raise


def end_refusal(reason: str) -> Response:
    """The 503 with Retry-After of a server that ends."""
    response = refusal(HTTPStatus.SERVICE_UNAVAILABLE, reason, RETRY_AFTER_S)
    # A client that kept the connection would lose its next request with it.
    response.headers["Connection"] = "close"
    return response


def cut_outputs(
    generate: Callable[..., AsyncGenerator[Any, None]], end_reason: EndReason
) -> Callable[..., AsyncGenerator[Any, None]]:
    """Wrap `AsyncLLM.generate`: an output that the end cuts raises vLLM's retryable error, a 503.

    Without a reason for the end an error or an abort passes unchanged.
    """
    from vllm.exceptions import RetryableRequestError
    from vllm.v1.engine.exceptions import EngineDeadError, EngineGenerateError

    @functools.wraps(generate)
    async def outputs(*arguments: Any, **keywords: Any) -> AsyncGenerator[Any, None]:
        try:
            async with contextlib.aclosing(generate(*arguments, **keywords)) as stock:
                async for output in stock:
                    if output.finished and any(
                        completion.finish_reason == "abort" for completion in output.outputs
                    ):
                        reason = end_reason()
                        if reason is not None:
                            raise RetryableRequestError(reason)
                    yield output
        except (EngineDeadError, EngineGenerateError) as error:
            reason = end_reason()
            if reason is None:
                raise
            raise RetryableRequestError(reason) from error

    return outputs


def fail_unfinished(engine: Any) -> None:
    """Raise an error in every unfinished request of vLLM's `AsyncLLM`, which leaves some waiting at its shutdown.

    To be called on its event loop.
    """
    from vllm.v1.engine.exceptions import EngineDeadError

    engine.output_processor.propagate_error(EngineDeadError())
