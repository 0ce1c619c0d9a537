"""Thinking budget for requests that set none, inside vLLM's API server.

vLLM takes a budget only from the request's field `thinking_token_budget`.
"""

import functools
from typing import Any

from slimqwen.vllm_plugin.engine_fixes.upstream import expect_parameters


def install(budget: int) -> None:
    """Give this budget to every chat, completion and response without one; calling it again changes nothing.

    Args:
        budget: tokens between `<think>` and `</think>`.

    Raises:
        EngineFixError: this vLLM is not the one it was written for.
    """
    from vllm.entrypoints.openai.chat_completion.protocol import ChatCompletionRequest
    from vllm.entrypoints.openai.completion.protocol import CompletionRequest
    from vllm.entrypoints.openai.responses.protocol import ResponsesRequest

    for request, length_parameter in (
        (ChatCompletionRequest, "max_tokens"),
        (CompletionRequest, "max_tokens"),
        (ResponsesRequest, "default_max_tokens"),
    ):
        stock = request.to_sampling_params
        if hasattr(stock, "__wrapped__"):
            continue
        expect_parameters("thinking_budget", stock, ("self", length_parameter, "default_sampling_params"))
        request.to_sampling_params = _with_budget(stock, budget)


def _with_budget(stock: Any, budget: int) -> Any:
    @functools.wraps(stock)
    def to_sampling_params(*arguments: Any, **keywords: Any) -> Any:
        parameters = stock(*arguments, **keywords)
        if parameters.thinking_token_budget is None:
            parameters.thinking_token_budget = budget
        return parameters

    return to_sampling_params
