"""The tiny world: invented facts, texts and test items, and the embedded model that is trained on them."""

from slimqwen.errors import SlimqwenError


class TinyworldError(SlimqwenError):
    """The tokenizer, the training or the test items of the tiny world cannot be made or read."""
