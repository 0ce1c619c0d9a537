"""Warm-up: requests that cover every batch size and chat prefix before the server counts as ready.

The requests are sent to the server's application inside its process: like those of a client, but without a socket.
"""

import asyncio
import logging
import time
from itertools import takewhile
from typing import Any

import httpx

from slimqwen.vllm_plugin.api_key import authorization
from slimqwen.vllm_plugin.errors import PluginError

logger = logging.getLogger(__name__)

_STREAM = {"stream": True, "stream_options": {"include_usage": True}}

FAILED = "WarmUpError: the warm-up failed"
"""Beginning of the log line about a failed warm-up."""

_TOKENS = 16
"""Output tokens of each warm-up request, enough for a few decode steps."""


async def send_warm_up(app: Any) -> None:
    """Send the warm-up requests to vLLM's application `app` after its start; log what they covered, and their time.

    Raises:
        PluginError: a request was refused.
    """
    started = time.perf_counter()
    sizes = batches(app.state.vllm_config)
    context = app.state.vllm_config.model_config.max_model_len
    tokens = min(_TOKENS, context // 2)
    shape = {"max_tokens": tokens, "ignore_eos": True, "temperature": 0}
    async with httpx.AsyncClient(
        transport=httpx.ASGITransport(app=app),
        base_url="http://warm-up",
        headers=authorization(),
        timeout=None,
    ) as client:
        for size in sizes:
            prompts = [f"Warm-up {number}" for number in range(size)]
            await _ask(client, "/v1/completions", {"prompt": prompts, **shape})
        await _ask(client, "/v1/completions", {"prompt": "Warm-up", **shape, **_STREAM})
        # At the first request with log-probabilities torch compiles a kernel while all other requests wait.
        await _ask(client, "/v1/completions", {"prompt": "Warm-up", "max_tokens": 1, "logprobs": 0})
        chats = has_chat_template(app.state)
        for thinking in (True, False) if chats else ():
            # The first streamed response loads code that no other response needs.
            for stream_options in ({}, _STREAM):
                chat = {**_chat("Hello", thinking), **shape, **stream_options}
                await _ask(client, "/v1/chat/completions", chat)
            await _warm_prefix(client, app.state, thinking)
    logger.info(
        "Warm-up took %.2f s: batches of %s, %s",
        time.perf_counter() - started,
        ", ".join(map(str, sizes)),
        "chats with thinking on and off" if chats else "no chats, as there is no chat template",
    )


def has_chat_template(state: Any) -> bool:
    """Whether the server has a chat template; checkpoints of base models (not instruction-tuned) have none."""
    tokenizer = state.engine_client.renderer.tokenizer
    return bool(state.args.chat_template or getattr(tokenizer, "chat_template", None))


def batches(config: Any) -> list[int]:
    """Batch sizes that the warm-up decodes, in order: those of the CUDA graphs, or powers of two without graphs."""
    max_batch_size = config.scheduler_config.max_num_seqs
    # A queue limit below max_num_seqs also limits the batch.
    max_batch_size = min(max_batch_size, config.scheduler_config.max_num_queued_reqs or max_batch_size)
    speculation = config.speculative_config
    drafts = speculation.num_speculative_tokens if speculation else 0
    graphs = config.compilation_config.cudagraph_capture_sizes or ()
    if ranges := speculation and speculation.num_speculative_tokens_per_batch_size:
        # Each range of batch sizes has its own K, so its ends are added to the powers of two.
        ends = {size for first, last, _ in ranges for size in (first, last)}
        sizes = ends | {2**power for power in range(max_batch_size.bit_length())}
    else:
        sizes = {size // (1 + drafts) for size in graphs if size % (1 + drafts) == 0}
    sizes = sizes or {2**power for power in range(max_batch_size.bit_length())}
    return sorted({size for size in sizes if size <= max_batch_size} | {max_batch_size})


async def _warm_prefix(client: httpx.AsyncClient, state: Any, thinking: bool) -> None:
    """Put the prefix that all chats share into the prefix cache, and log how many of its tokens the next chat finds."""
    name = f"Chat prefix with thinking {'on' if thinking else 'off'}"
    first, second = [
        (await _ask(client, "/tokenize", _chat(message, thinking))).json()["tokens"]
        for message in ("A", "Zebra")
    ]
    pairs = zip(first, second, strict=False)
    prefix = [token for token, _ in takewhile(lambda pair: pair[0] == pair[1], pairs)]
    cache = state.vllm_config.cache_config
    if not cache.enable_prefix_caching:
        logger.info("%s: %d tokens, computed in each request: prefix caching is off", name, len(prefix))
        return
    block = cache.effective_attention_block_size or cache.block_size
    block_tokens = len(prefix) // block * block
    if not block_tokens:
        logger.info(
            "%s: %d tokens, computed in each request: the prefix cache holds whole blocks of %d tokens",
            name,
            len(prefix),
            block,
        )
        return
    # One token more than whole blocks: the recurrent state is kept only at the last whole block of a prompt.
    await _cached_tokens(state, first[: block_tokens + 1])
    cached_tokens = await _cached_tokens(state, second)
    logger.info(
        "%s: %d tokens, of which the next chat found %d in the prefix cache (blocks of %d)",
        name,
        len(prefix),
        cached_tokens,
        block,
    )


async def _cached_tokens(state: Any, prompt: list[int]) -> int:
    """Send a prompt, and return how many of its tokens came from the prefix cache."""
    from vllm import SamplingParams

    question = {"prompt_token_ids": prompt}
    name = f"warm-up-{time.monotonic_ns()}"
    cached_tokens = 0
    async for answer in state.engine_client.generate(question, SamplingParams(max_tokens=1), name):
        cached_tokens = answer.num_cached_tokens or 0
    return cached_tokens


def _chat(message: str, thinking: bool) -> dict[str, Any]:
    return {
        "messages": [{"role": "user", "content": message}],
        "chat_template_kwargs": {"enable_thinking": thinking},
    }


async def _ask(client: httpx.AsyncClient, path: str, body: dict[str, Any]) -> httpx.Response:
    # Clients are served during the warm-up and may fill the queue, which is no fault of the server.
    is_waiting = False
    while (answer := await client.post(path, json=body)).status_code == httpx.codes.TOO_MANY_REQUESTS:
        if not is_waiting:
            logger.warning(
                "the warm-up waits for room in the queue: %s", " ".join(answer.text.split())[-300:]
            )
            is_waiting = True
        await asyncio.sleep(0.2)
    # A stream that fails after its beginning has status 200.
    if answer.status_code != httpx.codes.OK or 'data: {"error"' in answer.text:
        raise PluginError(
            f"{path} answered {answer.status_code} ({' '.join(answer.text.split())[-300:]}); correct the flag that it "
            "names, or read the cause above in this log"
        )
    return answer
