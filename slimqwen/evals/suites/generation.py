"""A generated response: its text without thoughts, how it ended, and the tool calls that the server found in it."""

from collections.abc import Mapping
from typing import Any

from slimqwen.errors import SlimqwenError
from slimqwen.evals.suites.scorer import response_text

THOUGHTS_START, THOUGHTS_END = "<think>", "</think>"
"""Tags around Qwen3.5's thoughts."""

TIMEOUT_S = 300
SLOWEST_TOKEN_S = 0.25
"""A server slower than that counts as hung."""


class PromptTooLongError(SlimqwenError):
    """A prompt is longer than the served context; cutting it would change the question."""

    @classmethod
    def of(cls, tokens: int, max_model_len: int) -> "PromptTooLongError":
        """The error for a prompt of `tokens` tokens and a server that accepts `max_model_len`."""
        return cls(
            f"a prompt has {tokens} tokens and the server takes {max_model_len}, output included; "
            "raise VLLM_MAX_MODEL_LEN in the variant's config.env"
        )


class Generation(str):
    """A generated text with its finish reason and length.

    Attributes:
        finish_reason: "stop", or "length" if the token limit cut it.
        tokens: generated tokens, thoughts included; None if the server reports no usage.
    """

    finish_reason: str | None
    tokens: int | None

    def __new__(cls, text: str, finish_reason: str | None = None, tokens: int | None = None) -> "Generation":
        """Create the text with its attributes."""
        generation = super().__new__(cls, text)
        generation.finish_reason, generation.tokens = finish_reason, tokens
        return generation

    @classmethod
    def of_choice(
        cls, choice: Mapping[str, Any], usage: Mapping[str, Any], thinking: bool | None
    ) -> "Generation":
        """Read one choice of a response of /v1/completions or /v1/chat/completions.

        Args:
            choice: element of the response's list `choices`.
            usage: the response's `usage`; empty if the server reports none.
            thinking: whether the model thinks before it responds: thoughts are then removed, and a response with
                unfinished thoughts is empty; None leaves the response as it is.
        """
        message = choice.get("message") or {"content": choice.get("text")}
        text = message["content"] or ""
        # A server with a reasoning parser has already separated the thoughts from the content.
        if thinking is not None and not message.get("reasoning"):
            is_thinking = thinking or text.lstrip().startswith(THOUGHTS_START)
            _, end, response = text.rpartition(THOUGHTS_END)
            text = response if end or not is_thinking else ""
        text = response_text(text, [call["function"] for call in message.get("tool_calls") or ()])
        return cls(text, choice["finish_reason"], usage.get("completion_tokens"))

    def as_json(self) -> list[Any]:
        """The generation as a JSON list: text, finish reason and number of tokens; `Generation(*list)` restores it."""
        return [str(self), self.finish_reason, self.tokens]
