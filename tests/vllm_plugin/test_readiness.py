"""The gate before vLLM's application, around a bare one."""

import asyncio
import json
import logging
import os
import subprocess
import sys
import threading
from contextlib import asynccontextmanager
from types import SimpleNamespace

import httpx
import pytest
from starlette.applications import Starlette
from starlette.responses import PlainTextResponse, StreamingResponse
from starlette.routing import Route
from vllm.exceptions import RetryableRequestError
from vllm.v1.engine.exceptions import EngineDeadError, EngineGenerateError

from slimqwen.vllm_plugin import engine_facts, policy
from slimqwen.vllm_plugin.engine_facts import PlanExpectation
from slimqwen.vllm_plugin.patches.serving.engine_paths import guard_engine_paths
from slimqwen.vllm_plugin.readiness import Readiness

pytestmark = [pytest.mark.anyio, pytest.mark.timeout(120)]


class Server:
    """A bare application behind the gate, its lifespan running: what vLLM's own server does with it."""

    def __init__(self, warm):
        self.shut_down = []
        self.go_on = asyncio.Event()
        self.app = Starlette(
            routes=[
                Route(path, self._answer, methods=["GET", "POST"]) for path in ("/health", "/ping", "/v1/x")
            ]
            + [Route("/metrics", self._answer), Route("/slow", self._stream)]
            + [Route(f"/{way}", self._fails) for way in ("500", "503", "501", "raises", "hangs")]
            + [Route("/broken", self._broken_stream)]
        )
        self.unfinished = asyncio.get_running_loop().create_future()
        self.processor = SimpleNamespace(propagate_error=self._fail_unfinished)
        self.engine = SimpleNamespace(
            shutdown=self._shutdown, errored=False, generate=self._generate, output_processor=self.processor
        )
        self.app.state.engine_client = self.engine
        config = SimpleNamespace(timeout_graceful_shutdown=None)
        self.app.state.server = SimpleNamespace(config=config, should_exit=False)
        self.app.add_middleware(Readiness, warm=warm)
        transport = httpx.ASGITransport(app=self.app, raise_app_exceptions=False)
        self.client = httpx.AsyncClient(transport=transport, base_url="http://server")

    async def _answer(self, request):
        return PlainTextResponse("yes")

    async def _stream(self, request):
        async def words():
            yield "one "
            await self.go_on.wait()
            yield "two"

        return StreamingResponse(words())

    async def _fails(self, request):
        await self.go_on.wait()
        way = request.url.path[1:]
        if way == "raises":
            raise RuntimeError("no engine")
        if way == "hangs":
            await asyncio.sleep(1000)
        return PlainTextResponse("vLLM's own", int(way))

    async def _broken_stream(self, request):
        async def events():
            yield "data: one\n\n"
            await self.go_on.wait()
            raise RuntimeError("no engine")

        return StreamingResponse(events(), media_type="text/event-stream")

    async def _generate(self, *outputs):
        for output in outputs:
            if isinstance(output, Exception):
                raise output
            yield output

    def _fail_unfinished(self, error):
        self.unfinished.set_result(error)

    def _shutdown(self, timeout=None):
        self.shut_down.append(timeout)
        self.engine.errored = True

    async def status(self, path):
        return (await self.client.get(path)).status_code

    async def statuses(self):
        return [await self.status(path) for path in ("/health", "/ping", "/v1/x")]


@asynccontextmanager
async def started(warm):
    server = Server(warm)
    told, heard = asyncio.Queue(), asyncio.Queue()
    life = asyncio.create_task(server.app({"type": "lifespan"}, told.get, heard.put))
    await told.put({"type": "lifespan.startup"})
    assert (await heard.get())["type"] == "lifespan.startup.complete"
    try:
        yield server
    finally:
        server.engine.errored = False  # a server whose engine died ends its process
        await told.put({"type": "lifespan.shutdown"})
        await life


async def no_time(app):
    pass


async def turns():
    for _ in range(5):
        await asyncio.sleep(0)


@pytest.fixture
def anyio_backend():
    return "asyncio"


@pytest.fixture
async def server():
    """A server that has been ready."""
    async with started(no_time) as server:
        await turns()
        yield server


async def test_probes_answer_503_until_the_warm_up_has_run_and_other_paths_answer_before():
    warmed = asyncio.Event()

    async def warm(app):
        assert app.state.engine_client
        await warmed.wait()

    async with started(warm) as server:
        answer = await server.client.get("/health")
        assert (answer.status_code, answer.headers["Retry-After"]) == (503, "5")
        assert answer.json()["error"]["message"] == "the server is warming up"
        assert await server.statuses() == [503, 503, 200]
        assert (await server.client.post("/ping")).status_code == 503
        warmed.set()
        await turns()
        assert await server.statuses() == [200, 200, 200]


async def test_a_server_under_a_root_path_has_its_probes_there():
    async with started(lambda app: asyncio.sleep(1000)) as server:
        transport = httpx.ASGITransport(app=server.app, root_path="/one")
        async with httpx.AsyncClient(transport=transport, base_url="http://server") as client:
            assert (await client.get("/one/health")).status_code == 503


async def test_while_the_server_drains_new_requests_are_refused_and_those_under_way_end(server):
    under_way = asyncio.create_task(server.client.get("/slow"))
    await turns()
    engine = server.app.state.engine_client
    # vLLM calls it from a thread.
    thread = threading.Thread(target=engine.shutdown, kwargs={"timeout": 7})
    thread.start()
    thread.join()
    assert server.shut_down == [7]
    assert await server.statuses() == [503, 503, 503]
    refused = await server.client.post("/v1/x")
    assert "shutting down" in refused.text
    assert (refused.headers["Retry-After"], refused.headers["Connection"]) == ("5", "close")
    assert await server.status("/metrics") == 200
    server.go_on.set()
    assert (await under_way).text == "one two"


def shut_down(server):
    server.engine.shutdown()


def lose_the_engine(server):
    server.engine.errored = True


ENDED = pytest.mark.parametrize(
    ("end", "reason"), [(shut_down, "the server is shutting down"), (lose_the_engine, "the engine died")]
)


@ENDED
async def test_server_errors_of_requests_under_way_at_the_end_are_503_with_retry_after(server, end, reason):
    asked = {
        way: asyncio.create_task(server.client.get(f"/{way}"))
        for way in ("500", "raises", "503", "501", "hangs")
    }
    await turns()
    end(server)
    server.go_on.set()
    await turns()
    for way in ("500", "raises"):
        answer = await asked[way]
        assert (answer.status_code, answer.headers["Retry-After"]) == (503, "5")
        assert answer.json()["error"]["message"] == reason
    own = await asked["503"]
    assert (own.text, own.headers["Retry-After"]) == ("vLLM's own", "5")
    assert (await asked["501"]).status_code == 501


@ENDED
async def test_a_request_that_the_http_server_cancels_at_the_end_is_answered_first(server, end, reason):
    sent = []

    async def send(message):
        sent.append(message)

    scope = {"type": "http", "method": "GET", "path": "/hangs", "headers": [], "query_string": b""}
    request = asyncio.create_task(server.app(scope, asyncio.Event().wait, send))
    server.go_on.set()
    await turns()
    end(server)
    request.cancel()
    with pytest.raises(asyncio.CancelledError):
        await request
    assert sent[0]["status"] == 503
    assert reason.encode() in sent[1]["body"]


@ENDED
async def test_a_stream_that_breaks_at_the_end_ends_with_an_error_event(server, end, reason):
    asked = asyncio.create_task(server.client.get("/broken"))
    await turns()
    end(server)
    server.go_on.set()
    answer = await asked
    assert answer.status_code == 200
    first, error, last = answer.text.split("\n\n")[:3]
    assert (first, last) == ("data: one", "data: [DONE]")
    assert json.loads(error.removeprefix("data: "))["error"] == {
        "message": reason,
        "type": "Service Unavailable",
        "param": None,
        "code": 503,
    }


async def test_a_healthy_server_answers_its_own_errors(server):
    server.go_on.set()
    for way in ("500", "503"):
        answer = await server.client.get(f"/{way}")
        assert (answer.status_code, answer.text) == (int(way), "vLLM's own")
        assert "Retry-After" not in answer.headers
    assert await server.status("/raises") == 500
    with pytest.raises(EngineGenerateError):
        _ = [one async for one in server.engine.generate(EngineGenerateError())]
    aborted = output("abort")
    assert [one async for one in server.engine.generate(aborted)] == [aborted]


def output(finish_reason):
    return SimpleNamespace(
        finished=finish_reason is not None, outputs=[SimpleNamespace(finish_reason=finish_reason)]
    )


@ENDED
@pytest.mark.parametrize("last", [EngineDeadError(), EngineGenerateError(), output("abort")])
async def test_what_the_end_cuts_is_vllms_retryable_error(server, end, reason, last):
    outputs = server.engine.generate(output(None), last)
    assert (await anext(outputs)).finished is False
    end(server)
    with pytest.raises(RetryableRequestError, match=reason) as error:
        await anext(outputs)
    assert error.value.status_code == 503


async def test_an_answer_that_is_whole_at_the_end_is_given(server):
    whole = output("length")
    outputs = server.engine.generate(whole)
    shut_down(server)
    assert [one async for one in outputs] == [whole]


def test_after_the_shutdown_of_the_engine_no_request_waits_for_it():
    async def scenario():
        async with started(no_time) as server:
            await turns()
            thread = threading.Thread(target=server.engine.shutdown, kwargs={"timeout": 0})
            thread.start()
            assert isinstance(await server.unfinished, EngineDeadError)
            thread.join()
            return server

    server = asyncio.run(scenario())
    # vLLM does so again when it discards the engine, after the event loop has ended.
    server.engine.shutdown()
    # An engine that is not to drain has time to end.
    assert server.shut_down == [5, None]


async def test_a_server_that_is_told_to_stop_while_it_warms_up_is_never_ready(caplog):
    warmed = asyncio.Event()

    async def warm(app):
        await warmed.wait()
        raise RuntimeError("the engine is gone")

    caplog.set_level(logging.ERROR)
    async with started(warm) as server:
        server.engine.shutdown()
        warmed.set()
        await turns()
        assert await server.statuses() == [503, 503, 503]
    assert caplog.text == ""


async def fails(app):
    raise RuntimeError("no such kernel")


async def test_a_failed_warm_up_is_said_and_the_server_serves_all_the_same(caplog):
    async with started(fails) as server:
        await turns()
        assert await server.statuses() == [200, 200, 200]
    assert "the warm-up failed, the first requests will be slow: no such kernel" in caplog.text


ENDS = """
import asyncio, os, sys, types, uvloop
import vllm.entrypoints.launchers.launcher, vllm.v1.engine.async_llm
from starlette.applications import Starlette
from slimqwen.vllm_plugin.readiness import Readiness

engine = types.SimpleNamespace(shutdown=print, generate=print, errored=False)
server = types.SimpleNamespace(config=types.SimpleNamespace(timeout_graceful_shutdown=None), should_exit=False)

async def warm(app):
    if case == "warm-up":
        raise RuntimeError("no such kernel")
    print("warm")
    engine.errored = True

async def end(told):
    while not server.should_exit:
        await asyncio.sleep(0.1)
    told.put_nowait({"type": "lifespan.shutdown"})

async def main():
    app = Starlette()
    app.state.engine_client, app.state.server = engine, server
    app.add_middleware(Readiness, warm=warm)
    told = asyncio.Queue()
    told.put_nowait({"type": "lifespan.startup"})
    ending = asyncio.create_task(end(told))
    try:
        await app({"type": "lifespan"}, told.get, asyncio.Queue().put)
        del app.state.engine_client
        await asyncio.sleep(0.1)
    finally:
        print("the engine is shut down", server.config.timeout_graceful_shutdown, flush=True)

for case in ("warm-up", "engine", "plan"):
    if (child := os.fork()) == 0:
        if case != "plan":
            del os.environ["SLIMQWEN_PLAN"]
        uvloop.run(main())
        os._exit(0)
    print("exit code", os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]), flush=True)
"""


@pytest.mark.timeout(660)  # a process that imports vLLM takes minutes on a busy host
def test_a_dead_engine_and_a_required_warm_up_or_plan_that_fails_end_the_process_with_a_failure():
    plan = PlanExpectation(plan="a plan", facts={"block_size": 17}, required=True)
    required = {
        policy.VARIABLE: policy.Policy(require_warmup=True).model_dump_json(),
        engine_facts.VARIABLE: plan.model_dump_json(),
    }
    # Processes of their own, as vLLM's: their event loops are ended from within.
    ended = subprocess.run(
        [sys.executable, "-c", ENDS],
        env={**os.environ, **required},
        capture_output=True,
        text=True,
        timeout=600,
    )
    for said in (
        "REQUIRE_WARMUP=1: no such kernel",
        "EngineDiedError: the engine died",
        "PlanError: REQUIRE_PLAN=1",
    ):
        assert said in ended.stderr
    # Nobody's reading can keep it from ending.
    ends = ["the engine is shut down 3", "exit code 1"]
    assert ended.stdout.splitlines() == [*ends, "warm", *ends, *ends]


@pytest.mark.parametrize("path", ["/invocations", "/generative_scoring", "/tokenize", "/detokenize", "/v1/x"])
async def test_vllm_asks_for_the_key_wherever_the_engine_is_put_to_work(path):
    from vllm.entrypoints.serve.middleware import authenticate

    guard_engine_paths()
    guard_engine_paths()
    assert authenticate.GUARDED_PREFIX.count("/invocations") == 1

    app = authenticate.AuthenticationMiddleware(PlainTextResponse("yes"), tokens=["sesame"])
    async with httpx.AsyncClient(transport=httpx.ASGITransport(app=app), base_url="http://x") as client:
        assert (await client.post(path)).status_code == 401
        assert (await client.post(path, headers={"Authorization": "Bearer no"})).status_code == 401
        assert (await client.post(path, headers={"Authorization": "Bearer sesame"})).status_code == 200
        assert (await client.get("/health")).status_code == 200


@pytest.mark.parametrize(
    ("path", "client", "key", "given", "status"),
    [
        ("/metrics", "10.0.0.7", "sesame", None, 401),
        ("/metrics/", "10.0.0.7", "sesame", "Bearer no", 401),
        ("/load", "10.0.0.7", "sesame", "sesame", 401),
        ("/version", "fe80::1", "sesame", "Bearer sesames", 401),
        ("/metrics", "10.0.0.7", "sesame", "Bearer sesame", 200),
        ("/version", "127.0.0.1", "sesame", None, 200),
        ("/load", "::ffff:127.0.0.1", "sesame", None, 200),
        ("/load", "::1", "sesame", None, 200),
        ("/metrics", "proxy", "sesame", None, 401),
        ("/metrics", "10.0.0.7", None, None, 200),
        ("/other", "10.0.0.7", "sesame", None, 200),
    ],
)
async def test_the_state_of_a_server_is_for_this_machine_or_the_key(
    monkeypatch, path, client, key, given, status
):
    monkeypatch.delenv("VLLM_API_KEY", raising=False)
    if key:
        monkeypatch.setenv("VLLM_API_KEY", key)
    transport = httpx.ASGITransport(Readiness(PlainTextResponse("yes")), client=(client, 123))
    headers = {"Authorization": given} if given else {}
    async with httpx.AsyncClient(transport=transport, base_url="http://x", headers=headers) as asking:
        assert (await asking.get(path)).status_code == status
