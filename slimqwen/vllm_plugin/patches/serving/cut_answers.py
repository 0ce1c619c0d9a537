"""Return 503 with Retry-After for requests interrupted by shutdown or engine death; in a stream, an error event.

vLLM returns 500 for some of these requests, and 200 with the finish reason `abort` for others. Remove this module when
`_send_abort_outputs` in vllm/v1/engine/core.py and `engine_error_handler` in vllm/entrypoints/serve/exception_handling/
return 503.
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
"""Value of Retry-After, seconds: another server responds at once, a restart of this one takes some seconds."""

EndReason = Callable[[], str | None]
"""Function that says, for the client, why requests are interrupted now; None while server and engine are alive."""


async def answer(app: ASGIApp, scope: Scope, receive: Receive, send: Send, end_reason: EndReason) -> None:
    """Run the application for an HTTP request, and return 503 where shutdown or engine death makes it fail.

    Args:
        app: the application; `scope`, `receive` and `send` are those of its ASGI call.
        end_reason: function that says why requests are interrupted now. While it returns None, a server error passes
            unchanged.
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
    """Make the response 503 with Retry-After for a server that is ending."""
    response = refusal(HTTPStatus.SERVICE_UNAVAILABLE, reason, RETRY_AFTER_S)
    # A client that reused the connection would lose its next request.
    response.headers["Connection"] = "close"
    return response


def cut_outputs(
    generate: Callable[..., AsyncGenerator[Any, None]], end_reason: EndReason
) -> Callable[..., AsyncGenerator[Any, None]]:
    """Wrap `AsyncLLM.generate`: an output cut by shutdown or engine death raises vLLM's retryable error, a 503.

    Args:
        generate: the function to wrap.
        end_reason: function that says why requests are interrupted now. While it returns None, an error or an abort
            passes unchanged.
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
    """Raise an error in every unfinished request of vLLM's `AsyncLLM`, whose shutdown leaves some waiting.

    To be called on the event loop of `engine`.
    """
    from vllm.v1.engine.exceptions import EngineDeadError

    engine.output_processor.propagate_error(EngineDeadError())
