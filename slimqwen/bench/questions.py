"""Questions to fresh servers: chats and completions of new text, each of another length."""

from collections.abc import Mapping
from types import MappingProxyType
from typing import Literal

from slimqwen.bench.client import Prompt
from slimqwen.text.prompts import PromptCutter
from slimqwen.variant import Variant

Kind = Literal["chat", "completion"]
KINDS: tuple[Kind, ...] = ("chat", "completion")

QUESTION_TOKENS: Mapping[Kind, int] = MappingProxyType({"chat": 64, "completion": 32})
"""Length of the first question of each kind, tokens. Later ones have close lengths, each length once, and the two kinds
share no length: a repeated length is faster, because its kernels are already chosen."""

_SEED = 20260131


class Questions:
    """Prompts of new text, cut to length by the variant's own tokenizer."""

    def __init__(self, variant: Variant) -> None:
        """Load the tokenizer of a variant."""
        from transformers import AutoTokenizer

        self._tokenizer = AutoTokenizer.from_pretrained(variant.weights, local_files_only=True)
        self._cutter = PromptCutter.for_checkpoint(variant.weights, "tinyworld_passages", _SEED, variant.root)

    def text(self, tokens: int) -> str:
        """New text of a length in tokens."""
        return str(self._tokenizer.decode(self._cutter.cut(1, tokens)[0]))

    def prompt(self, kind: Kind, index: int) -> Prompt:
        """A new question; its length is that of the first one plus 0, +1, -1, +2, … by its index on a server."""
        tokens = QUESTION_TOKENS[kind] + (index + 1) // 2 * (1 if index % 2 else -1)
        if kind == "chat":
            return [{"role": "user", "content": self.text(tokens)}]
        return self._cutter.cut(1, tokens)[0]
