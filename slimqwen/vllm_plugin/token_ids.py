"""Token ids of a pruned vocabulary: the route that serves the map, and requests with old ids.

The map is `vocab_map.json` beside the checkpoint (`slimqwen.recipe.stages.prune_vocab` describes its content).
"""

import json
from collections.abc import Awaitable, Mapping
from http import HTTPStatus
from pathlib import Path
from typing import Any

from starlette.datastructures import Headers, MutableHeaders
from starlette.requests import ClientDisconnect, Request
from starlette.responses import FileResponse, Response
from starlette.types import ASGIApp, Receive, Scope, Send

from slimqwen.errors import SlimqwenError
from slimqwen.vllm_plugin.refusal import refusal
from slimqwen.vllm_plugin.request_limits import body_receiver

VOCAB_MAP = "vocab_map.json"
ROUTE = "/v1/slimqwen/vocab"
HEADER = "X-Slimqwen-Token-Ids"

_PATHS = ("/v1/completions", "/v1/chat/completions")
"""Endpoints with known fields; elsewhere an old id might pass for a new one."""

_LISTS = ("prompt", "stop_token_ids", "allowed_token_ids", "logprob_token_ids")
"""Fields of a request that hold token ids, in lists or lists of lists."""


class TokenIdError(SlimqwenError):
    """A request with old token ids that cannot be renumbered."""


async def vocabulary(request: Request) -> Response:
    """Answer `ROUTE`: the map of the served checkpoint, 404 where its vocabulary is not pruned."""
    file = Path(request.app.state.args.model) / VOCAB_MAP
    if not file.is_file():
        return refusal(HTTPStatus.NOT_FOUND, "the vocabulary of this variant is not pruned: there is no map")
    return FileResponse(file, media_type="application/json")


class OldTokenIds:
    """Renumbers the token ids of requests with the header `X-Slimqwen-Token-Ids: old`; others pass untouched."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app
        self._new_ids: Mapping[int, int] | None = None

    def __call__(self, scope: Scope, receive: Receive, send: Send) -> Awaitable[None]:
        """Renumber, refuse, or let the application answer."""
        if scope["type"] == "http":
            header = Headers(scope=scope).get(HEADER)
            if header is not None:
                return self._renumbered(header, scope, receive, send)
        return self._app(scope, receive, send)

    async def _renumbered(self, header: str, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            if scope["path"].removeprefix(scope.get("root_path", "")) not in _PATHS:
                raise TokenIdError(f"{HEADER} applies to {' and '.join(_PATHS)} only; leave it out here")
            body = self._renumbered_body(header, scope["app"], await Request(scope, receive).body())
        except TokenIdError as error:
            await refusal(HTTPStatus.BAD_REQUEST, str(error))(scope, receive, send)
            return
        except ClientDisconnect:
            return
        headers = MutableHeaders(raw=list(scope["headers"]))
        headers["Content-Length"] = str(len(body))
        await self._app({**scope, "headers": headers.raw}, body_receiver(body, receive), send)

    def _renumbered_body(self, header: str, app: Any, body: bytes) -> bytes:
        if header != "old":
            raise TokenIdError(f"{HEADER} takes one value, old: the ids before the pruning")
        if self._new_ids is None:
            self._new_ids = read(Path(app.state.args.model))
        try:
            request = json.loads(body)
            if isinstance(request, dict):
                return json.dumps(renumber(request, self._new_ids)).encode()
        except RecursionError:
            raise TokenIdError("the body is nested too deeply to find its token ids") from None
        except ValueError:
            pass  # vLLM says what is wrong with the body
        return body


def read(folder: Path) -> dict[int, int]:
    """Old id -> new id of a checkpoint with a pruned vocabulary.

    Raises:
        TokenIdError: its vocabulary is not pruned.
    """
    file = folder / VOCAB_MAP
    if not file.is_file():
        raise TokenIdError(f"the vocabulary of this variant is not pruned: send token ids without {HEADER}")
    old_ids = json.loads(file.read_text(encoding="utf-8"))["new_to_old"]
    return {old: new for new, old in enumerate(old_ids)}


def renumber(request: Mapping[str, Any], new_ids: Mapping[int, int]) -> dict[str, Any]:
    """The decoded request with new ids, by old ids; text and other fields stay unchanged.

    Raises:
        TokenIdError: an id has no row after the pruning, or is no integer.
    """

    def new_value(value: Any, field: str) -> Any:
        if isinstance(value, list):
            return [new_value(part, field) for part in value]
        if value is None or (field == "prompt" and isinstance(value, str)):
            return value
        if type(value) is not int:  # vLLM would make one of 9.0, "9" or true
            raise TokenIdError(f"{json.dumps(value)[:40]} in {field} is no token id")
        if value not in new_ids:
            raise TokenIdError(
                f"token id {value} in {field} has no row in this variant's pruned vocabulary; send the text, or "
                f"spell it with ids that GET {ROUTE} lists"
            )
        return new_ids[value]

    renumbered = dict(request)
    for field, value in request.items():
        if field in _LISTS:
            renumbered[field] = new_value(value, field)
    bias = request.get("logit_bias")
    if isinstance(bias, dict):
        renumbered["logit_bias"] = {}
        for key, weight in bias.items():
            # vLLM would make an id of " 9" and "+9" too.
            old_id = int(key) if key.isascii() and key.isdecimal() else key
            renumbered["logit_bias"][str(new_value(old_id, "logit_bias"))] = weight
    return renumbered
