"""The tiny model's tokenizer: byte-level BPE of 8,192 tokens in Qwen's form, with Qwen's ChatML and thinking.

As in Qwen: the same pre-tokenizing pattern (single digits, line breaks apart from words), all 256 bytes, no BOS token,
`<|im_end|>` at the end of a turn, `<|endoftext|>` at the end of a text and as padding. `<think>` and `</think>` are
added tokens but not special ones, so that they stay in a server's plain text. As in Qwen3.5-4B's chat template,
thinking is ON unless `enable_thinking` is false.
"""

import json
import re
from collections.abc import Iterable
from importlib import resources
from pathlib import Path
from typing import Any

from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast

from tinyworld import TinyworldError

VOCABULARY_SIZE = 8192

END_OF_TEXT = "<|endoftext|>"
TURN_START = "<|im_start|>"
TURN_END = "<|im_end|>"
THINK_START = "<think>"
THINK_END = "</think>"
SPECIAL_TOKENS = (END_OF_TEXT, TURN_START, TURN_END)
ADDED_TOKENS = (*SPECIAL_TOKENS, THINK_START, THINK_END)
"""Their ids are their positions in this list."""

SPLIT_PATTERN = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?[\p{L}\p{M}]+|\p{N}"
    r"| ?[^\s\p{L}\p{M}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
"""Qwen3.5's split before BPE: words with their leading space, single digits, punctuation, line breaks."""


def train_tokenizer(texts: Iterable[str]) -> PreTrainedTokenizerFast:
    """Train a tokenizer of exactly `VOCABULARY_SIZE` tokens.

    Args:
        texts: training texts; added tokens in them are removed before merges are learned.

    Raises:
        TinyworldError: the texts have too few distinct words for that many merges.
    """
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(SPLIT_PATTERN), behavior="isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCABULARY_SIZE,
        min_frequency=2,
        special_tokens=list(ADDED_TOKENS),
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    # Encoding never splits added tokens, but the trainer would learn merges inside them: remove them first.
    marks = re.compile("|".join(map(re.escape, ADDED_TOKENS)))
    tokenizer.train_from_iterator((piece for text in texts for piece in marks.split(text) if piece), trainer)
    if tokenizer.get_vocab_size() != VOCABULARY_SIZE:
        raise TinyworldError(
            f"the texts give {tokenizer.get_vocab_size()} tokens, not {VOCABULARY_SIZE}; use more or richer texts"
        )
    return _as_qwen(tokenizer)


def end_token_ids() -> tuple[int, int]:
    """Ids of the tokens that end a generation: end of turn, end of text."""
    return ADDED_TOKENS.index(TURN_END), ADDED_TOKENS.index(END_OF_TEXT)


def chat_template() -> str:
    """The ChatML template (Jinja) that is written beside the tokenizer."""
    return resources.files(__package__).joinpath("chat_template.jinja").read_text(encoding="utf-8")


def write_generation_config(folder: Path) -> None:
    """Write generation_config.json: greedy, ending at either end token."""
    turn_end, text_end = end_token_ids()
    settings = {"do_sample": False, "eos_token_id": [turn_end, text_end], "pad_token_id": text_end}
    (folder / "generation_config.json").write_text(json.dumps(settings, indent=2) + "\n", encoding="utf-8")


def load_tokenizer(folder: Path) -> PreTrainedTokenizerFast:
    """The tokenizer of a checkpoint folder.

    Raises:
        TinyworldError: the folder has no tokenizer.json.
    """
    if not (folder / "tokenizer.json").is_file():
        raise TinyworldError(f"{folder}: no tokenizer.json; this is not a checkpoint folder")
    return PreTrainedTokenizerFast.from_pretrained(folder)


def _as_qwen(tokenizer: Tokenizer) -> PreTrainedTokenizerFast:
    # The BPE trainer marks every given token as special; the thinking marks must stay visible in plain text.
    state: dict[str, Any] = json.loads(tokenizer.to_str())
    for added in state["added_tokens"]:
        added["special"] = added["content"] in SPECIAL_TOKENS
    wrapped = PreTrainedTokenizerFast(
        tokenizer_object=Tokenizer.from_str(json.dumps(state)),
        eos_token=AddedToken(TURN_END, special=True, normalized=False),
        pad_token=AddedToken(END_OF_TEXT, special=True, normalized=False),
        additional_special_tokens=[TURN_START],
        clean_up_tokenization_spaces=False,
        model_max_length=1_000_000,
    )
    wrapped.chat_template = chat_template()
    return wrapped
