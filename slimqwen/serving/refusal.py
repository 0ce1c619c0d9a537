"""An answer that refuses, in the form that vLLM gives to its own."""

from http import HTTPStatus

from starlette.responses import JSONResponse


def refusal(status: HTTPStatus, reason: str, retry_after_s: int | None = None) -> JSONResponse:
    """The response.

    Args:
        status: of HTTP.
        reason: for a person to read.
        retry_after_s: when asking again makes sense; None where it does not.
    """
    error = {"message": reason, "type": status.phrase, "param": None, "code": status.value}
    headers = {"Retry-After": str(retry_after_s)} if retry_after_s is not None else None
    return JSONResponse({"error": error}, status.value, headers)
