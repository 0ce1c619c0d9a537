"""Old token ids before a bare application that serves a pruned checkpoint, or a whole one."""

import asyncio
import json
from types import SimpleNamespace

import pytest
from starlette.applications import Starlette
from starlette.responses import JSONResponse
from starlette.routing import Route

from slimqwen.recipe.stages import prune_vocab
from slimqwen.vllm_plugin import token_ids
from tests.vllm_plugin import asgi

pytestmark = pytest.mark.timeout(120)

OLD = {"X-Slimqwen-Token-Ids": "old"}


@pytest.fixture
def ask(tmp_path):
    """Ask an application that echoes what reaches it; its vocabulary keeps the old ids 0, 2, 5 and 9."""

    def ask(method, path, *, pruned=True, **request):
        (tmp_path / token_ids.VOCAB_MAP).unlink(missing_ok=True)
        if pruned:
            content = {"schema": "vocab_map/1", "old_vocab_size": 10, "new_vocab_size": 4}
            content["new_to_old"] = [0, 2, 5, 9]
            (tmp_path / token_ids.VOCAB_MAP).write_text(json.dumps(content))

        async def echo(request):
            body = await request.body()
            assert int(request.headers["content-length"]) == len(body)
            return JSONResponse({"heard": body.decode("latin-1")})

        app = Starlette(
            routes=[
                Route("/v1/completions", echo, methods=["POST"]),
                Route(token_ids.ROUTE, token_ids.vocabulary),
            ]
        )
        app.state.args = SimpleNamespace(model=str(tmp_path))
        app.add_middleware(token_ids.OldTokenIds)
        return asgi.request(app, method, path, **request)

    return ask


def test_a_client_that_leaves_gets_no_answer_and_no_traceback():
    sent = []

    async def application(*_):
        raise AssertionError("the application must not see the request")

    async def receive():
        return {"type": "http.disconnect"}

    async def send(message):
        sent.append(message)

    scope = {
        "type": "http",
        "method": "POST",
        "path": "/v1/completions",
        "headers": [(b"x-slimqwen-token-ids", b"old")],
        "app": None,
    }
    asyncio.run(token_ids.OldTokenIds(application)(scope, receive, send))
    assert sent == []


def heard(answer):
    return json.loads(answer.json()["heard"])


def test_the_map_lies_where_the_stage_writes_it():
    assert token_ids.VOCAB_MAP == prune_vocab.VOCAB_MAP


def test_the_map_is_served_and_its_absence_said(ask):
    assert ask("GET", token_ids.ROUTE).json()["new_to_old"] == [0, 2, 5, 9]
    answer = ask("GET", token_ids.ROUTE, pruned=False)
    assert (answer.status_code, "not pruned" in answer.json()["error"]["message"]) == (404, True)


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ([0, 9, 9, 5], [0, 3, 3, 2]),
        ([[2], [5, 0]], [[1], [2, 0]]),
        ("2 5", "2 5"),
        (["2", "5"], ["2", "5"]),
        ([], []),
    ],
)
def test_old_ids_become_new_ones_and_text_stays(ask, old, new):
    body = {"prompt": old, "max_tokens": 9, "stop_token_ids": [5], "logit_bias": {"9": -100}}
    answer = ask("POST", "/v1/completions", json=body, headers=OLD)
    assert heard(answer) == {"prompt": new, "max_tokens": 9, "stop_token_ids": [2], "logit_bias": {"3": -100}}


def test_without_the_header_nothing_changes(ask):
    assert heard(ask("POST", "/v1/completions", json={"prompt": [9]})) == {"prompt": [9]}


@pytest.mark.parametrize(
    ("body", "where"),
    [
        ({"prompt": [0, 3]}, "token id 3 in prompt"),
        ({"prompt": [[0], [10]]}, "token id 10 in prompt"),
        ({"prompt": [-1]}, "token id -1 in prompt"),
        ({"prompt": "x", "stop_token_ids": [1]}, "token id 1 in stop_token_ids"),
        ({"prompt": "x", "logit_bias": {"8": 1}}, "token id 8 in logit_bias"),
        # vLLM would make ids of these.
        ({"prompt": [0, 9.0]}, "9.0 in prompt is no token id"),
        ({"prompt": "x", "stop_token_ids": ["5"]}, '"5" in stop_token_ids is no token id'),
        ({"prompt": "x", "stop_token_ids": [True]}, "true in stop_token_ids is no token id"),
        ({"prompt": "x", "logit_bias": {" 9": 1}}, '" 9" in logit_bias is no token id'),
    ],
)
def test_an_id_without_an_image_is_an_error_and_never_another_token(ask, body, where):
    answer = ask("POST", "/v1/completions", json=body, headers=OLD)
    assert answer.status_code == 400
    assert where in answer.json()["error"]["message"]


@pytest.mark.parametrize(
    ("question", "reason"),
    [
        pytest.param({"content": b"[" * 100_000}, "nested too deeply", id="nested too deeply"),
        pytest.param({"method": "GET", "path": token_ids.ROUTE}, "/v1/completions", id="another route"),
        pytest.param({"json": {"prompt": [1]}, "pruned": False}, "is not pruned", id="a whole vocabulary"),
        pytest.param({"headers": {"X-Slimqwen-Token-Ids": "new"}}, "one value, old", id="another word"),
    ],
)
def test_what_cannot_be_renumbered_is_refused_with_the_reason(ask, question, reason):
    answer = ask(**{"method": "POST", "path": "/v1/completions", "headers": OLD, **question})
    assert (answer.status_code, reason in answer.text) == (400, True)


@pytest.mark.parametrize(
    "body",
    [
        b"{",
        b"\xff",
        b"[1, 2]",
        b'{"prompt": 1' + b"0" * 5000 + b"}",
        b'{"logit_bias": {"1' + b"0" * 5000 + b'": 1}}',
    ],
)
def test_what_is_no_request_is_left_for_vllm_to_refuse(ask, body):
    answer = ask("POST", "/v1/completions", content=body, headers=OLD)
    assert answer.status_code == 200
    assert answer.json()["heard"].encode("latin-1").replace(b" ", b"") == body.replace(b" ", b"")
