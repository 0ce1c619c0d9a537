"""Token ids of a pruned vocabulary: the route that serves the map, and requests that hold old ids.

The map is `vocab_map.json` beside the checkpoint (`slimqwen.recipe.stages.prune_vocab` says what is in it).
"""

import json
from collections.abc import Awaitable, Mapping
from http import HTTPStatus
from pathlib import Path
from typing import Any

from starlette.requests import Request
from starlette.responses import FileResponse, Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from slimqwen.errors import SlimqwenError
from slimqwen.vllm_plugin.refusal import refusal

VOCAB_MAP = "vocab_map.json"
ROUTE = "/v1/slimqwen/vocab"
HEADER = b"x-slimqwen-token-ids"

_PATHS = ("/v1/completions", "/v1/chat/completions")
"""Endpoints whose fields are known here; anywhere else an old id might pass for a new one."""

_LISTS = ("prompt", "stop_token_ids", "allowed_token_ids", "logprob_token_ids")
"""Fields of a request that hold token ids, in lists or lists of lists."""


class TokenIdError(SlimqwenError):
    """A token id of before the pruning that has no row any more."""


async def vocabulary(request: Request) -> Response:
    """Answer `ROUTE`: the map of the checkpoint that is served, 404 where its vocabulary is whole."""
    file = Path(request.app.state.args.model) / VOCAB_MAP
    if not file.is_file():
        return refusal(HTTPStatus.NOT_FOUND, "the vocabulary of this variant is whole: there is no map")
    return FileResponse(file, media_type="application/json")


class OldTokenIds:
    """Renumbers the token ids of requests with the header `X-Slimqwen-Token-Ids: old`; others pass untouched."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app
        self._new: Mapping[int, int] | None = None

    def __call__(self, scope: Scope, receive: Receive, send: Send) -> Awaitable[None]:
        """Renumber, refuse, or let the application answer."""
        if scope["type"] == "http":
            for name, value in scope["headers"]:
                if name == HEADER:
                    return self._renumbered(value, scope, receive, send)
        return self._app(scope, receive, send)

    async def _renumbered(self, said: bytes, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            if scope["path"].removeprefix(scope.get("root_path", "")) not in _PATHS:
                raise TokenIdError(f"X-Slimqwen-Token-Ids is understood by {' and '.join(_PATHS)} alone")
            body = self._renumbered_body(said, scope["app"], await Request(scope, receive).body())
        except TokenIdError as error:
            await refusal(HTTPStatus.BAD_REQUEST, str(error))(scope, receive, send)
            return
        headers = [(name, value) for name, value in scope["headers"] if name != b"content-length"]
        headers.append((b"content-length", str(len(body)).encode()))
        given = iter([{"type": "http.request", "body": body, "more_body": False}])

        async def receive_again() -> Message:
            return next(given, None) or await receive()

        await self._app({**scope, "headers": headers}, receive_again, send)

    def _renumbered_body(self, said: bytes, app: Any, body: bytes) -> bytes:
        if said != b"old":
            raise TokenIdError("X-Slimqwen-Token-Ids knows one value, old: ids of before the pruning")
        if self._new is None:
            self._new = read(Path(app.state.args.model))
        try:
            request = json.loads(body)
            return json.dumps(renumber(request, self._new)).encode() if isinstance(request, dict) else body
        except RecursionError:
            raise TokenIdError("the body is nested too deeply to find its token ids") from None
        except ValueError:
            return body  # vLLM says what is wrong with it


def read(folder: Path) -> dict[int, int]:
    """Old id -> new id of a checkpoint with a pruned vocabulary.

    Raises:
        TokenIdError: its vocabulary is whole.
    """
    file = folder / VOCAB_MAP
    if not file.is_file():
        raise TokenIdError(
            "the vocabulary of this variant is whole: send token ids without X-Slimqwen-Token-Ids"
        )
    old_ids = json.loads(file.read_text(encoding="utf-8"))["new_to_old"]
    return {old: new for new, old in enumerate(old_ids)}


def renumber(request: Mapping[str, Any], new: Mapping[int, int]) -> dict[str, Any]:
    """The request with new ids; text, and what is no id, stays as it is.

    Args:
        request: of any endpoint, decoded.
        new: old id -> new id.

    Raises:
        TokenIdError: an id has no row any more.
    """

    def one(value: Any, field: str) -> Any:
        if isinstance(value, list):
            return [one(part, field) for part in value]
        if value is None or (field == "prompt" and isinstance(value, str)):
            return value
        if type(value) is not int:  # vLLM would make one of 9.0, "9" or true
            raise TokenIdError(f"{json.dumps(value)[:40]} in {field} is no token id")
        if value not in new:
            raise TokenIdError(
                f"token id {value} in {field} has no row in this variant's pruned vocabulary; send the text, or "
                f"spell it with ids that GET {ROUTE} lists"
            )
        return new[value]

    renumbered = {field: one(value, field) if field in _LISTS else value for field, value in request.items()}
    bias = request.get("logit_bias")
    if isinstance(bias, dict):
        renumbered["logit_bias"] = {
            # vLLM would make an id of " 9" and "+9" too.
            str(one(int(key) if key.isascii() and key.isdecimal() else key, "logit_bias")): weight
            for key, weight in bias.items()
        }
    return renumbered
