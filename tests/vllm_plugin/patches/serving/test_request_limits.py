"""Limits that vLLM lacks, around a bare application and on vLLM's own functions."""

import asyncio
import importlib
import inspect
import json
from types import SimpleNamespace

import fastapi
import pydantic
import pytest
from starlette.applications import Starlette
from starlette.responses import JSONResponse, StreamingResponse
from starlette.routing import Route

from slimqwen.vllm_plugin import policy
from slimqwen.vllm_plugin.patches.serving import request_limits
from slimqwen.vllm_plugin.patches.serving.request_limits import BodyLimit, RefusedStreams, answer_overload
from tests.vllm_plugin import asgi

pytestmark = pytest.mark.timeout(300)


def post(body, limit=100):
    """What a client hears, and whether the application saw the request."""
    seen = []

    async def size(request):
        body = await request.body()
        seen.append(len(body))
        return JSONResponse({"size": len(body)})

    app = Starlette(routes=[Route("/x", size, methods=["POST"])])
    app.add_middleware(BodyLimit, max_bytes=limit)
    return asgi.request(app, "POST", "/x", content=body), seen


async def chunks(*sizes):
    for size in sizes:
        yield b"x" * size


def test_a_body_within_the_limit_arrives_whole():
    answer, _ = post(b"x" * 100)
    assert answer.json() == {"size": 100}


def test_a_larger_body_is_refused_before_the_application_sees_it():
    answer, seen = post(b"x" * 101)
    assert (answer.status_code, seen) == (413, [])
    assert "larger than 100 bytes" in answer.json()["error"]["message"]


def test_a_body_of_untold_size_is_counted_as_it_comes():
    answer, seen = post(chunks(60, 40))
    assert answer.json() == {"size": 100}
    answer, seen = post(chunks(60, 41))
    assert (answer.status_code, seen) == (413, [])


def test_the_limit_is_the_policys(monkeypatch):
    monkeypatch.setenv(policy.VARIABLE, policy.Policy(max_body_bytes=7).model_dump_json())
    assert post(b"x" * 8, limit=None)[0].status_code == 413
    monkeypatch.delenv(policy.VARIABLE)
    assert post(b"x" * 8, limit=None)[0].status_code == 200


@pytest.mark.parametrize("name", ["QueueOverflowError", "MaxQueuedTokensError"])
def test_where_vllms_queue_is_full_the_answer_says_when_to_come_back(name):
    from vllm import exceptions

    async def full(request):
        raise getattr(exceptions, name)

    async def otherwise(request, error):
        return JSONResponse({}, 500)

    app = Starlette(routes=[Route("/x", full)], exception_handlers={exceptions.VLLMError: otherwise})
    answer_overload(app)
    answer = asgi.request(app, "GET", "/x")
    assert (answer.status_code, answer.headers["Retry-After"]) == (429, "1")
    assert "try again later" in answer.json()["error"]["message"].lower()


def test_a_body_that_a_check_cannot_read_is_refused_and_an_error_after_it_was_read_is_not_the_clients():
    class Question(pydantic.BaseModel):
        form: dict[str, str]
        field: str = "name"

        @pydantic.model_validator(mode="before")
        @classmethod
        def take_the_form_for_an_object(cls, data):
            data["form"].get("name")
            return data

    app = fastapi.FastAPI()

    @app.post("/x")
    async def answer(question: Question):
        return {"name": question.form[question.field]}

    request_limits.refuse_unreadable_bodies(app)
    good, no_object, absent, typed, later = (
        asgi.request(app, "POST", "/x", json=body, raises=False)
        for body in (
            {"form": {"name": "a"}},
            {"form": "a"},
            {},
            {"form": {"name": 5}},
            {"form": {"name": "a"}, "field": "none"},
        )
    )
    assert good.json() == {"name": "a"}
    assert [answer.status_code for answer in (no_object, absent, typed, later)] == [400, 400, 422, 500]
    reason = "take_the_form_for_an_object: 'str' object has no attribute 'get'"
    assert reason in no_object.json()["error"]["message"]


OVERLOAD = {
    "error": {"message": "try again later", "type": "Service Unavailable", "param": None, "code": 503}
}
FAULT = {"error": {"message": "no such token", "type": "InternalServerError", "param": None, "code": 500}}


@pytest.mark.parametrize(
    ("events", "status", "heard"),
    [
        ([OVERLOAD], 429, "try again later"),
        ([FAULT], 500, "no such token"),
        ([{"choices": []}, FAULT], 200, 'data: {"choices": []}\n\ndata: {"error"'),
        ([], 200, "data: [DONE]"),
    ],
)
def test_a_stream_that_begins_with_an_error_has_the_status_of_the_error(events, status, heard):
    async def stream(request):
        async def lines():
            for event in events:
                yield f"data: {json.dumps(event)}\n\n"
            yield "data: [DONE]\n\n"

        return StreamingResponse(lines(), media_type="text/event-stream")

    app = Starlette(routes=[Route("/x", stream, methods=["POST"])])
    app.add_middleware(RefusedStreams)
    answer = asgi.request(app, "POST", "/x")
    assert answer.status_code == status
    assert heard in answer.text
    assert (status == 200) == answer.text.endswith("data: [DONE]\n\n")
    assert answer.headers.get("Retry-After") == ("1" if status == 429 else None)


@pytest.fixture
def get_max_tokens(monkeypatch):
    """vLLM's function as its chat endpoint calls it, limited."""
    for name in request_limits._COUNTING:
        module = importlib.import_module(name)
        monkeypatch.setattr(module, "get_max_tokens", module.get_max_tokens)
    request_limits.refuse_longer_answers()
    request_limits.refuse_longer_answers()
    modules = [importlib.import_module(name) for name in request_limits._COUNTING]
    return [module.get_max_tokens for module in modules]


def test_an_answer_that_fits_may_be_as_long_as_asked_or_as_there_is_room(get_max_tokens):
    for limited in get_max_tokens:
        assert limited(1000, 300, 700, {}) == 300
        assert limited(1000, None, 700, {}) == 300
        assert limited(1000, None, 700, {}, 50) == 50
        assert limited(1000, 600, 700, {}, None, truncate_prompt_tokens=400) == 600


def test_a_completion_that_says_nothing_of_its_length_gets_the_room_there_is(get_max_tokens):
    """vLLM fills in 16 before it asks."""
    *_, of_completions = get_max_tokens
    assert of_completions(1000, 16, 992, {}) == 8


@pytest.mark.parametrize(("longest", "room"), [(None, 300), (50, 50)])
def test_an_answer_that_vllm_would_cut_is_refused_with_the_room_there_is(get_max_tokens, longest, room):
    from vllm.exceptions import VLLMValidationError

    for limited in get_max_tokens:
        with pytest.raises(VLLMValidationError, match=rf"max_tokens=301 .* at most {room} .* prompt of 700"):
            limited(1000, 301, 700, {}, longest)


def test_what_could_not_be_sent_to_the_engine_is_forgotten_and_refused(monkeypatch):
    from vllm.exceptions import VLLMValidationError
    from vllm.v1.engine.async_llm import AsyncLLM

    async def fails(self, request, prompt, parent_req, index, queue):
        raise OverflowError("can't serialize ints > 2**64 - 1")

    async def add_request(self, request_id):
        await self._add_request(SimpleNamespace(request_id=request_id), None, None, 0, None)

    forgotten = []

    async def abort(self, request_id, internal):
        forgotten.append((request_id, internal))

    monkeypatch.setattr(AsyncLLM, "_add_request", fails)
    monkeypatch.setattr(AsyncLLM, "add_request", add_request)
    monkeypatch.setattr(AsyncLLM, "abort", abort)
    request_limits.forget_unsent_requests()
    request_limits.forget_unsent_requests()
    engine = AsyncLLM.__new__(AsyncLLM)
    engine.output_processor = SimpleNamespace(has_request={"registered"}.__contains__)
    for request_id in ("registered", "refused before"):
        with pytest.raises(VLLMValidationError, match="out of range: can't serialize"):
            asyncio.run(engine.add_request(request_id))
    assert forgotten == [("registered", True)]


def test_log_probabilities_of_chosen_tokens_are_refused_where_there_are_drafts(monkeypatch):
    from vllm import SamplingParams
    from vllm.exceptions import VLLMValidationError

    def verify(self, model_config, speculative_config, structured_outputs_config, tokenizer):
        if self.top_k == 7:
            raise VLLMValidationError("vLLM's own refusal")

    vllms_own = getattr(SamplingParams.verify, "__wrapped__", SamplingParams.verify)
    assert inspect.signature(verify).parameters.keys() == inspect.signature(vllms_own).parameters.keys()
    monkeypatch.setattr(SamplingParams, "verify", verify)
    request_limits.refuse_chosen_logprobs_of_drafts()
    request_limits.refuse_chosen_logprobs_of_drafts()
    drafts, chosen = SimpleNamespace(), SamplingParams(logprobs=2, logprob_token_ids=[1, 2])
    with pytest.raises(VLLMValidationError, match="logprob_token_ids"):
        chosen.verify(None, drafts, None, None)
    chosen.verify(None, None, None, None)
    SamplingParams(logprobs=2).verify(None, drafts, None, None)
    with pytest.raises(VLLMValidationError, match="own refusal"):
        SamplingParams(top_k=7).verify(None, drafts, None, None)
