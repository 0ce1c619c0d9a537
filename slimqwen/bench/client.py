"""The streaming client for all timed requests: vLLM's own benchmark client.

TTFT is the time from sending a request to the first streamed chunk that has a token, TPOT the time per output token
after it, ITL the time between two such chunks, E2EL the time from sending a request to its last token; all in
milliseconds, measured by the client over HTTP.
"""

import asyncio
import contextlib
import itertools
import math
from collections.abc import Callable, Coroutine, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import httpx

from slimqwen.captured_log import capture_output
from slimqwen.host_load import Watch
from slimqwen.serving import metrics
from slimqwen.serving.http_client import open_async_client
from slimqwen.serving.server import RunningServer
from slimqwen.serving.shared_server import ServerLostError, get_response, server_lost
from slimqwen.text.prompts import Tokens
from slimqwen.vllm_plugin.api_key import authorization

_WITH_PROGRESS = "openai-counted"
"""Name of our entry in the benchmark's table of request functions, which reports each response to the caller."""

_READ_LINES = (0, 3)
"""Lines of a streamed response that abandoning clients read: none, or two chunks with the empty line between them."""


def counters(base_url: str) -> Mapping[str, float]:
    """Read a server's Prometheus metrics: counters, gauges and sums of histograms, each summed over engines.

    Args:
        base_url: URL of the server, without /metrics.

    Returns:
        Name of the metric, such as vllm:prefix_cache_hits_total -> its value.

    Raises:
        ServerLostError: the server does not answer.
    """
    return metrics.read_metrics(get_response(f"{base_url}/metrics").text)


@dataclass(frozen=True)
class Batch:
    """Requests to /v1/completions, and how they are sent.

    Attributes:
        name: what error messages call these requests.
        requests: token IDs of each prompt, and the length of its response in tokens; the model's end of text is
            ignored.
        abandoned: further requests, all sent at the beginning, whose clients close the connection: alternately before
            the first token and after two chunks. They are not measured.
        rate_per_s: requests a second; None sends each as soon as `concurrency` allows.
        fixed_gap: whether requests arrive at equal intervals instead of as a Poisson process.
        concurrency: most requests in flight; None for no limit.
        sampling: further fields of each request, such as temperature.
        seed: seed of the arrival times.
    """

    name: str
    requests: Sequence[tuple[Tokens, int]]
    abandoned: Sequence[tuple[Tokens, int]] = ()
    rate_per_s: float | None = None
    fixed_gap: bool = False
    concurrency: int | None = None
    sampling: Mapping[str, float] = field(default_factory=dict)
    seed: int = 0


def send_requests(
    server: RunningServer, batch: Batch, *, log: Path, answered: Callable[[], None], watch: Watch
) -> dict[str, Any]:
    """Send requests by vLLM's benchmark client and wait for all responses.

    Args:
        server: server that gets the requests.
        batch: the requests, and how they are sent.
        log: file for the output of the benchmark client.
        answered: called once after each response, to count progress.
        watch: measures the load of the host during the requests.

    Returns:
        The result of `vllm.benchmarks.serve.benchmark`. Its lists are in the order of the requests: `ttfts`, `itls` (a
        list for each request) and `latencies` in seconds, `output_lens` in tokens, `generated_texts`, and `errors` as
        text, empty for a success.

    Raises:
        ServerLostError: no request got a response, or the server refused an abandoned request. Single failed requests
            raise nothing: they are in `errors`.
    """
    # Imported outside capture_output, because vLLM's log handler keeps the stream that it finds at import.
    run_benchmark = _prepare_benchmark(server, batch, answered)

    async def send_all() -> dict[str, Any]:
        # An interrupted vLLM client leaves its session open, which aiohttp reports to the loop, and that prints it.
        asyncio.get_running_loop().set_exception_handler(_report_but_open_sessions)
        pairs = zip(batch.abandoned, itertools.cycle(_READ_LINES), strict=False)
        async with watch.client():
            leaving = asyncio.gather(*(_abandon_request(server, batch, *pair) for pair in pairs))
            answers, _ = await asyncio.gather(run_benchmark(), leaving)
        result: dict[str, Any] = answers
        return result

    def server_counters() -> Mapping[str, float]:
        # The error for a lost server, with the server's log, is raised below.
        with contextlib.suppress(ServerLostError):
            return counters(server.base_url)
        return {}

    with watch.section(server.pid, server_counters), capture_output(log):
        try:
            result = asyncio.run(send_all())
        except (OSError, httpx.TransportError) as error:
            raise server_lost(server, f"measuring {batch.name}", error) from error
    if result["completed"] == 0:
        raise server_lost(server, f"measuring {batch.name}", last_line(result["errors"][0]))
    return result


def _prepare_benchmark(
    server: RunningServer, batch: Batch, answered: Callable[[], None]
) -> Callable[[], Coroutine[Any, Any, dict[str, Any]]]:
    """Prepare vLLM's benchmark of all requests but the abandoned ones, to be run once."""
    import numpy as np
    from vllm.benchmarks.datasets import SampleRequest
    from vllm.benchmarks.lib.endpoint_request_func import ASYNC_REQUEST_FUNCS
    from vllm.benchmarks.serve import TaskType, benchmark

    async def counted_request(*arguments: Any, **keywords: Any) -> Any:
        output = await ASYNC_REQUEST_FUNCS["openai"](*arguments, **keywords)
        answered()
        return output

    ASYNC_REQUEST_FUNCS[_WITH_PROGRESS] = counted_request
    # The client draws arrivals from numpy's global generator: every variant gets the same ones.
    np.random.seed(batch.seed)
    return partial(
        benchmark,
        task_type=TaskType.GENERATION,
        endpoint_type=_WITH_PROGRESS,
        api_url=f"{server.base_url}/v1/completions",
        base_url=server.base_url,
        model_id=server.model,
        model_name=server.model,
        tokenizer=None,  # the server counts tokens
        input_requests=[
            SampleRequest(prompt=prompt, prompt_len=len(prompt), expected_output_len=output_tokens)
            for prompt, output_tokens in batch.requests
        ],
        logprobs=None,
        request_rate=batch.rate_per_s or math.inf,
        burstiness=math.inf if batch.fixed_gap else 1.0,  # burstiness 1 is a Poisson process
        disable_tqdm=True,
        num_warmups=0,  # vLLM's own warm-up and readiness check would send the first prompt twice
        ready_check_timeout_sec=0,
        profile=False,
        selected_percentile_metrics=[],
        selected_percentiles=[],
        ignore_eos=True,
        goodput_config_dict={},
        max_concurrency=batch.concurrency,
        lora_modules=None,
        extra_headers=authorization(),
        extra_body=dict(batch.sampling),
        ssl_context=False,  # see `serving.http_client`
    )


def _report_but_open_sessions(loop: asyncio.AbstractEventLoop, context: dict[str, Any]) -> None:
    if not context["message"].startswith("Unclosed"):
        loop.default_exception_handler(context)


async def _abandon_request(
    server: RunningServer, batch: Batch, request: tuple[Tokens, int], lines: int
) -> None:
    """Send a request, and close the connection after `lines` lines of the streamed response.

    Raises:
        ServerLostError: the server refuses the request.
    """
    prompt, output_tokens = request
    fields = {"model": server.model, "prompt": prompt, "max_tokens": output_tokens, "ignore_eos": True}
    client = open_async_client(None)  # no time limit, because the request may wait for all others
    url = f"{server.base_url}/v1/completions"
    body = {**fields, "stream": True, **batch.sampling}
    async with client, client.stream("POST", url, json=body) as response:
        if response.is_error:
            raise server_lost(server, f"measuring {batch.name}", f"HTTP {response.status_code}")
        stream = response.aiter_lines()
        for _ in range(lines):
            await anext(stream, None)


def last_line(error: str) -> str:
    """The last line of a traceback, which names the cause; "no answer" for an empty text."""
    return (error.strip().splitlines() or ["no answer"])[-1]
