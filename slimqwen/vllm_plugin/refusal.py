"""Error responses in the form of vLLM's own, and detection of streamed responses."""

from http import HTTPStatus

from starlette.datastructures import Headers
from starlette.responses import JSONResponse
from starlette.types import Message


def refusal(status: HTTPStatus, reason: str, retry_after_s: int | None = None) -> JSONResponse:
    """An error response; it has the header Retry-After if `retry_after_s` is given."""
    error = {"message": reason, "type": status.phrase, "param": None, "code": status.value}
    headers = {"Retry-After": str(retry_after_s)} if retry_after_s is not None else None
    return JSONResponse({"error": error}, status.value, headers)


def is_stream(start: Message) -> bool:
    """Whether the response that this message starts is a stream of events."""
    return Headers(scope=start).get("content-type", "").startswith("text/event-stream")
