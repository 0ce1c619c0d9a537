"""Thinking budget for requests that set none, inside vLLM's API server.

vLLM takes a budget only from the request's field `thinking_token_budget`.
"""

from collections.abc import Callable
from typing import Any

from slimqwen.vllm_plugin.engine_fixes.upstream import replace


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

    def with_budget(to_sampling_params: Callable[..., Any], *arguments: Any, **keywords: Any) -> Any:
        parameters = to_sampling_params(*arguments, **keywords)
        if parameters.thinking_token_budget is None:
            parameters.thinking_token_budget = budget
        return parameters

    for request, length_parameter in (
        (ChatCompletionRequest, "max_tokens"),
        (CompletionRequest, "max_tokens"),
        (ResponsesRequest, "default_max_tokens"),
    ):
        names = ("self", length_parameter, "default_sampling_params")
        replace("thinking_budget", request, "to_sampling_params", with_budget, names)
