"""The streaming client of all timed requests: vLLM's own benchmark client, for one request or for a whole load.

TTFT is the time from sending a request to the first streamed chunk that has a token, TPOT the time per output token
after it, ITL the time between two such chunks, E2EL the time from sending a request to its last token; all in
milliseconds, measured by the client over HTTP.
"""

import asyncio
import contextlib
import math
import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from slimqwen.bench import BenchError
from slimqwen.captured_log import capture_output
from slimqwen.host_load import Watch
from slimqwen.serving import metrics
from slimqwen.serving.server import RunningServer
from slimqwen.serving.shared_server import ServerLostError, get, server_lost
from slimqwen.text.prompts import Tokens
from slimqwen.vllm_plugin.api_key import authorization

Prompt = str | Tokens | list[dict[str, str]]
"""Text, token IDs, or the messages of a chat."""

_WITH_PROGRESS = "openai-counted"
"""Our entry in the benchmark's table of request functions: it reports each answer to the caller."""

_TIMEOUT_S = 600
_DRAIN_TIMEOUT_S = 60
"""Longest wait for unfinished requests, seconds."""


@dataclass(frozen=True)
class Answer:
    """Times of one streamed answer, and the lengths of prompt and answer as the server counts them."""

    ttft_ms: float
    e2el_ms: float
    prompt_tokens: int
    output_tokens: int

    @property
    def tpot_ms(self) -> float:
        """Time per output token after the first, milliseconds."""
        return (self.e2el_ms - self.ttft_ms) / max(1, self.output_tokens - 1)


class StreamingClient(AbstractContextManager["StreamingClient"]):
    """A client that sends one request at a time over a connection that is open before the first one.

    The watch receives the delays of its event loop while it waits for answers.
    """

    def __init__(self, server: RunningServer, watch: Watch) -> None:
        self._server, self._watch = server, watch
        self._runner = asyncio.Runner()
        self._session: Any = None

    def __enter__(self) -> Self:
        """Open the connection; where that fails, close everything."""
        try:
            self._runner.run(self._open())
        except BaseException:
            self._close()
            raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Close the connection."""
        self._close()

    def _close(self) -> None:
        if self._session is not None:
            self._runner.run(self._session.close())
        self._runner.close()

    def ask(self, prompt: Prompt, output_tokens: int, **fields: Any) -> Answer:
        """Send a request and wait for its whole answer.

        Args:
            prompt: the messages of a chat go to /v1/chat/completions, others to /v1/completions.
            output_tokens: length of the answer; the model's end of text is ignored.

        Raises:
            BenchError: the server refused the request, or the answer has another length.
        """
        from vllm.benchmarks.lib.endpoint_request_func import ASYNC_REQUEST_FUNCS, RequestFuncInput

        is_chat = isinstance(prompt, list) and isinstance(prompt[0], dict)
        request = RequestFuncInput(
            prompt=prompt,
            api_url=f"{self._server.base_url}/v1/{'chat/' if is_chat else ''}completions",
            prompt_len=0,
            output_len=output_tokens,
            model=self._server.model,
            ignore_eos=True,
            extra_headers=authorization(),
            extra_body={"temperature": 0, **fields},
        )
        request_function = ASYNC_REQUEST_FUNCS["openai-chat" if is_chat else "openai"]
        output = self._runner.run(self._await_answer(request_function(request, self._session)))
        if not output.success:
            raise self._failure(f"did not answer ({last_line(output.error)})")
        if output.output_tokens != output_tokens:
            raise self._failure(f"answered {output.output_tokens} of {output_tokens} tokens")
        return Answer(
            ttft_ms=round(output.ttft * 1e3, 3),
            e2el_ms=round(output.latency * 1e3, 3),
            prompt_tokens=output.prompt_len,
            output_tokens=output.output_tokens,
        )

    def counters(self) -> Mapping[str, float]:
        """The server's counters by name."""
        return counters(self._server.base_url)

    async def _await_answer(self, answer: Awaitable[Any]) -> Any:
        async with self._watch.client():
            return await answer

    async def _open(self) -> None:
        import aiohttp

        # Without trust_env, which is off by default, aiohttp ignores the shell's proxy.
        self._session = aiohttp.ClientSession(
            timeout=aiohttp.ClientTimeout(total=_TIMEOUT_S), connector=aiohttp.TCPConnector(ssl=False)
        )
        try:
            async with self._session.get(f"{self._server.base_url}/health") as answer:
                await answer.read()
        except aiohttp.ClientError as error:
            raise self._failure(f"did not answer ({error})") from error

    def _failure(self, reason: str) -> BenchError:
        return BenchError(f"{self._server.base_url} {reason}; its log: {self._server.log}")


def counters(base_url: str) -> Mapping[str, float]:
    """A server's counters, gauges and sums of histograms by sample name, summed over engines.

    Raises:
        ServerLostError: the server does not answer.
    """
    return metrics.read(get(f"{base_url}/metrics").text)


def unfinished_requests(base_url: str) -> float:
    """Number of requests that a server has not finished, after waiting up to a minute for it to become 0."""
    deadline = time.monotonic() + _DRAIN_TIMEOUT_S
    while True:
        values = counters(base_url)
        unfinished = sum(values.get(f"vllm:num_requests_{state}", 0.0) for state in ("running", "waiting"))
        if not unfinished or time.monotonic() > deadline:
            return unfinished
        time.sleep(0.2)


def send(
    server: RunningServer,
    requests: Sequence[tuple[Tokens, int]],
    *,
    rate_per_s: float | None,
    fixed_gap: bool,
    concurrency: int | None,
    sampling: Mapping[str, float],
    seed: int,
    name: str,
    log: Path,
    answered: Callable[[], None],
    watch: Watch,
) -> dict[str, Any]:
    """Send requests to /v1/completions by vLLM's benchmark client and wait for all answers.

    Args:
        requests: token IDs of each prompt and the length of its answer in tokens.
        rate_per_s: requests a second; None sends each as soon as `concurrency` allows.
        fixed_gap: requests arrive at equal distances instead of as a Poisson process.
        concurrency: most requests in flight; None without a limit.
        sampling: further fields of each request.
        seed: seed of the arrivals.
        name: name of the requests in the error.
        log: file for the output of the benchmark client.
        answered: called after each answer.
        watch: receives the load of the host during the requests.

    Returns:
        The result of `vllm.benchmarks.serve.benchmark`. Its lists are in the order of the requests: `ttfts`, `itls` (a
        list for each request) and `latencies` in seconds, `output_lens` in tokens, `errors` as text, empty without one.

    Raises:
        ServerLostError: no request was answered.
    """
    # Outside capture_output: vLLM's log handler keeps the stream that it finds when it is imported.
    import numpy as np
    from vllm.benchmarks.datasets import SampleRequest
    from vllm.benchmarks.lib.endpoint_request_func import ASYNC_REQUEST_FUNCS
    from vllm.benchmarks.serve import TaskType, benchmark

    async def counted_request(*arguments: Any, **keywords: Any) -> Any:
        output = await ASYNC_REQUEST_FUNCS["openai"](*arguments, **keywords)
        answered()
        return output

    def server_counters() -> Mapping[str, float]:
        # The error for a lost server is raised below, with its log.
        with contextlib.suppress(ServerLostError):
            return counters(server.base_url)
        return {}

    async def run_benchmark() -> dict[str, Any]:
        async with watch.client():
            answers: dict[str, Any] = await benchmark(
                task_type=TaskType.GENERATION,
                endpoint_type=_WITH_PROGRESS,
                api_url=f"{server.base_url}/v1/completions",
                base_url=server.base_url,
                model_id=server.model,
                model_name=server.model,
                tokenizer=None,  # the server counts tokens
                input_requests=[
                    SampleRequest(prompt=prompt, prompt_len=len(prompt), expected_output_len=output_tokens)
                    for prompt, output_tokens in requests
                ],
                logprobs=None,
                request_rate=rate_per_s or math.inf,
                burstiness=math.inf if fixed_gap else 1.0,  # 1: a Poisson process
                disable_tqdm=True,
                num_warmups=0,  # vLLM's warm-up and readiness check would repeat the first prompt
                ready_check_timeout_sec=0,
                profile=False,
                selected_percentile_metrics=[],
                selected_percentiles=[],
                ignore_eos=True,
                goodput_config_dict={},
                max_concurrency=concurrency,
                lora_modules=None,
                extra_headers=authorization(),
                extra_body=dict(sampling),
                ssl_context=False,  # see `serving.http_client`
            )
            return answers

    ASYNC_REQUEST_FUNCS[_WITH_PROGRESS] = counted_request
    # The client draws arrivals from numpy's global generator: every variant gets the same ones.
    np.random.seed(seed)
    with watch.section(server.pid, server_counters), capture_output(log):
        try:
            result = asyncio.run(run_benchmark())
        except OSError as error:
            raise server_lost(f"measuring {name}", error, log) from error
    if result["completed"] == 0:
        cause = ConnectionError(last_line(result["errors"][0]))
        raise server_lost(f"measuring {name}", cause, log)
    return result


def last_line(error: str) -> str:
    """The last line of a traceback, which names the cause."""
    return (error.strip().splitlines() or ["no answer"])[-1]
