"""Inside vLLM's API server, before all else: ready once warmed up, no longer once told to stop, failed with its engine.

`launch` names `Readiness` by vLLM's `--middleware`. It decides by a request's path alone; bodies and answers pass it
untouched.
"""

import asyncio
import logging
from collections.abc import Awaitable, Callable, Coroutine
from http import HTTPStatus
from typing import Any

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from slimqwen.serving import policy, vllm_log, warm_up
from slimqwen.serving.refusal import refusal

logger = logging.getLogger(__name__)

_PROBES = frozenset({"/health", "/ping"})
_ENGINE_PATHS = ("/invocations", "/generative_scoring", "/scale_elastic_ep", "/tokenize", "/detokenize")
"""What vLLM leaves open and whose work holds up everybody: tokenizing has one thread for all requests."""

_UNAVAILABLE = HTTPStatus.SERVICE_UNAVAILABLE
_RETRY_AFTER_S = 5
_LOOK_S = 0.5
"""How often to look whether the engine lives; vLLM looks every 5 s."""

_LAST_WORDS_S = 3
"""How long clients may take to read the rest of their answers once there is no engine any more."""


class Readiness:
    """503 for /health and /ping until the warm-up has run; 503 for every new request while the server drains.

    A server whose engine dies ends with exit code 1. vLLM ends it with 0, so that an orchestrator that restarts on
    failure would not, and waits without end for a client that does not read. Goes away when `run_server` in
    vllm/entrypoints/launchers/api_server/entry.py raises after an engine's death, and `serve_http` gives uvicorn a
    `timeout_graceful_shutdown`.
    """

    def __init__(self, app: ASGIApp, warm: Callable[[Any], Awaitable[None]] = warm_up.run) -> None:
        """Wrap an application.

        Args:
            app: what answers behind this.
            warm: asks the started application what it is to be warm for.
        """
        vllm_log.join()
        extend_key_guard()
        self._app = app
        self._warm = warm
        self._is_warm = False
        self._drains = False
        self._tasks: list[asyncio.Task[None]] = []

    def __call__(self, scope: Scope, receive: Receive, send: Send) -> Awaitable[None]:
        """Answer, or let the application answer."""
        if scope["type"] == "lifespan":
            return self._app(scope, receive, self._following(scope["app"], send))
        if scope["type"] == "http" and (self._drains or not self._is_warm):
            path = scope["path"].removeprefix(scope.get("root_path", ""))
            if self._drains and path != "/metrics":
                return refusal(_UNAVAILABLE, "the server is shutting down", _RETRY_AFTER_S)(
                    scope, receive, send
                )
            if not self._drains and path in _PROBES:
                return refusal(_UNAVAILABLE, "the server is warming up", _RETRY_AFTER_S)(scope, receive, send)
        return self._app(scope, receive, send)

    def _following(self, app: Any, send: Send) -> Send:
        engine: Any = None

        async def send_and_follow(message: Message) -> None:
            nonlocal engine
            if message["type"] == "lifespan.startup.complete":
                # At the end vLLM has taken its state off the application.
                engine, server = app.state.engine_client, app.state.server
                server.config.timeout_graceful_shutdown = _LAST_WORDS_S
                self._notice_the_end(engine)
                await send(message)
                self._begin(self._warm_up(app))
                self._begin(self._watch(server, engine))
                return
            # Every answer has been given, or given up. A drain ends the engine too.
            if engine is not None and engine.errored and not self._drains:
                logger.error("EngineDiedError: the engine died; the server ends with exit code 1")
                self._begin(_fail())
            await send(message)

        return send_and_follow

    def _begin(self, work: Coroutine[Any, Any, None]) -> None:
        self._tasks.append(asyncio.create_task(work))

    async def _watch(self, server: Any, engine: Any) -> None:
        from vllm import envs

        while not (server.should_exit or self._drains or envs.VLLM_KEEP_ALIVE_ON_ENGINE_DEATH):
            if engine.errored:
                server.should_exit = True
            await asyncio.sleep(_LOOK_S)

    def _notice_the_end(self, engine: Any) -> None:
        # The first thing that vLLM does about a SIGTERM is this call, which returns when the last answer is given.
        stock = engine.shutdown

        def shutdown(*arguments: Any, **keywords: Any) -> Any:
            self._drains = True
            return stock(*arguments, **keywords)

        engine.shutdown = shutdown

    async def _warm_up(self, app: Any) -> None:
        try:
            await self._warm(app)
        except Exception as error:
            if self._drains:
                return
            if policy.read().require_warmup:
                logger.error("WarmUpError: the warm-up failed, and REQUIRE_WARMUP=1: %s", error)
                await _fail()
            logger.error("WarmUpError: the warm-up failed, the first requests will be slow: %s", error)
        self._is_warm = True


async def _fail() -> None:
    # Out of a task this ends the event loop, and with it the engine and the process.
    raise SystemExit(1)


def extend_key_guard() -> None:
    """Have vLLM ask for the API key wherever the engine is put to work, not only under /v1 and its like.

    Goes away when `GUARDED_PREFIX` in vllm/entrypoints/serve/middleware/authenticate.py holds these paths.
    """
    from vllm.entrypoints.serve.middleware import authenticate

    missing = [path for path in _ENGINE_PATHS if path not in authenticate.GUARDED_PREFIX]
    authenticate.GUARDED_PREFIX = (*authenticate.GUARDED_PREFIX, *missing)
