"""Readiness middleware of vLLM's API server: not ready before the warm-up, while draining, or without an engine.

`slimqwen.serving.command` passes `Readiness` to vLLM with `--middleware`. The middleware decides only by a request's
path. Bodies of requests pass unchanged, and so do all responses that shutdown or engine death does not cut
(`cut_answers`).
"""

import asyncio
import contextlib
import logging
from collections.abc import Awaitable, Callable, Coroutine
from http import HTTPStatus
from typing import Any

from prometheus_client import Summary
from starlette.responses import JSONResponse
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from slimqwen import host_load
from slimqwen.vllm_plugin import api_key, engine_facts, policy, vllm_log, warm_up
from slimqwen.vllm_plugin.patches import upstream
from slimqwen.vllm_plugin.patches.serving import cut_answers, engine_paths
from slimqwen.vllm_plugin.refusal import refusal

logger = logging.getLogger(__name__)

_PATCHES = ("Readiness", "cut_outputs", "fail_unfinished", "guard_engine_paths")
_PROBES = frozenset({"/health", "/ping"})
_SHUTS_DOWN = "the server is shutting down"
_UNAVAILABLE = HTTPStatus.SERVICE_UNAVAILABLE
_POLL_S = 0.5
"""Interval of the checks whether the engine is alive, seconds; vLLM's own interval is 5 s."""

_ENGINE_END_S = 5
"""How long an engine may take to end, seconds. Without a drain vLLM kills it at once and leaves its shared memory."""

_LAST_WORDS_S = 3
"""How long clients may take to read the rest of their responses after the engine has ended, seconds."""


_DELAYS = Summary(host_load.SERVER_DELAYS, "Delay of a timer in the server's event loop, seconds.")


async def _observe_delays() -> None:
    async for delay in host_load.timer_delays():
        _DELAYS.observe(delay)


class Readiness:
    """Returns 503 for /health and /ping until the warm-up has run, and for every new request while the server drains.

    A request that shutdown or engine death interrupts gets 503 with Retry-After too, or an error event in its stream.

    The paths that say what the server does (/metrics, /load, /version) need the API key, except from this machine.

    Before the warm-up the engine is compared with its plan. Under REQUIRE_PLAN=1 an engine that differs is never ready.

    A server whose engine dies ends with exit code 1. vLLM itself would end with 0, after which an orchestrator that
    restarts on failure does nothing, and would wait for ever for a client that does not read. Remove this part when
    `run_server` in vllm/entrypoints/launchers/api_server/entry.py raises after an engine's death and `serve_http` gives
    uvicorn a `timeout_graceful_shutdown`.

    Args:
        app: the application.
        warm: sends the warm-up requests to vLLM's application.
    """

    def __init__(self, app: ASGIApp, warm: Callable[[Any], Awaitable[None]] = warm_up.send_warm_up) -> None:
        vllm_log.join()
        upstream.require(*_PATCHES, of="API server")
        engine_paths.guard_engine_paths()
        self._app = app
        self._warm = warm
        self._is_warm = False
        self._is_draining = False
        self._engine: Any = None
        self._tasks: list[asyncio.Task[None]] = []

    def __call__(self, scope: Scope, receive: Receive, send: Send) -> Awaitable[None]:
        """Refuse a request with 503, or pass it to the application."""
        if scope["type"] == "lifespan":
            return self._app(scope, receive, self._follow_lifespan(scope["app"], send))
        if scope["type"] != "http":
            return self._app(scope, receive, send)
        if api_key.lacks_key(scope):
            return JSONResponse({"error": "Unauthorized"}, HTTPStatus.UNAUTHORIZED)(scope, receive, send)
        path = scope["path"].removeprefix(scope.get("root_path", ""))
        if self._is_draining and path != "/metrics":
            return cut_answers.end_refusal(_SHUTS_DOWN)(scope, receive, send)
        if not (self._is_draining or self._is_warm) and path in _PROBES:
            return refusal(_UNAVAILABLE, "the server is warming up", cut_answers.RETRY_AFTER_S)(
                scope, receive, send
            )
        return cut_answers.answer(self._app, scope, receive, send, self._end_reason)

    def _end_reason(self) -> str | None:
        if self._is_draining:
            return _SHUTS_DOWN
        return "the engine died" if self._engine is not None and self._engine.errored else None

    def _follow_lifespan(self, app: Any, send: Send) -> Send:
        async def send_and_follow(message: Message) -> None:
            if message["type"] == "lifespan.startup.complete":
                # Remember them now: at the end vLLM has removed its state from the application.
                engine, server = app.state.engine_client, app.state.server
                self._engine = engine
                server.config.timeout_graceful_shutdown = _LAST_WORDS_S
                self._follow_shutdown(engine)
                await send(message)
                self._begin(self._warm_up(app))
                self._begin(self._watch(server, engine))
                self._begin(_observe_delays())
                return
            # Every response has been sent or given up by now. A drain ends the engine too.
            if self._engine is not None and self._engine.errored and not self._is_draining:
                logger.error("EngineDiedError: the engine died; the server ends with exit code 1")
                self._begin(self._fail())
            await send(message)

        return send_and_follow

    def _begin(self, work: Coroutine[Any, Any, None]) -> None:
        self._tasks.append(asyncio.create_task(work))

    async def _watch(self, server: Any, engine: Any) -> None:
        from vllm import envs

        while not (server.should_exit or self._is_draining or envs.VLLM_KEEP_ALIVE_ON_ENGINE_DEATH):
            if engine.errored:
                server.should_exit = True
            await asyncio.sleep(_POLL_S)

    def _follow_shutdown(self, engine: Any) -> None:
        # After a SIGTERM vLLM first calls this function, which returns when the last response has been sent.
        stock = engine.shutdown
        loop = asyncio.get_running_loop()

        def shutdown(timeout: float | None = None) -> None:
            self._is_draining = True
            try:
                stock(timeout=timeout if timeout is None else max(timeout, _ENGINE_END_S))
            finally:
                with contextlib.suppress(RuntimeError):  # the loop has ended, so no response is open
                    loop.call_soon_threadsafe(cut_answers.fail_unfinished, engine)

        engine.shutdown = shutdown
        engine.generate = cut_answers.cut_outputs(engine.generate, self._end_reason)

    async def _warm_up(self, app: Any) -> None:
        if not await engine_facts.compare_with_plan(app) and not self._is_draining:
            await self._fail()
        try:
            await self._warm(app)
        except Exception as error:
            if self._is_draining:
                return
            if policy.read_policy().require_warmup:
                logger.error("%s, and REQUIRE_WARMUP=1: %s", warm_up.FAILED, error)
                await self._fail()
            logger.error("%s, the first requests will be slow: %s", warm_up.FAILED, error)
        self._is_warm = True

    async def _fail(self) -> None:
        # An engine that ends with its server has not died by itself.
        self._is_draining = True
        # Raised in a task, this exception ends the event loop, and with it the engine and the process.
        raise SystemExit(1)
