"""The tiny model's tokenizer: byte-level BPE of 8,192 tokens in Qwen's form, with Qwen's ChatML and thinking.

As in Qwen: the same pre-tokenizing pattern (digits one by one, line breaks apart from words), all 256 bytes, no BOS,
`<|im_end|>` ends a turn, `<|endoftext|>` ends a text and pads. `<think>` and `</think>` are added tokens but not
special ones, so that a server's plain text keeps them. The chat template's default is Qwen3.5-4B's: thinking is ON
unless `enable_thinking` is false.
"""

import json
import re
from collections.abc import Iterable
from importlib import resources
from pathlib import Path
from typing import Any

from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast

from slimqwen.errors import SlimqwenError

VOCABULARY_SIZE = 8192

END_OF_TEXT = "<|endoftext|>"
TURN_START = "<|im_start|>"
TURN_END = "<|im_end|>"
THINK_START = "<think>"
THINK_END = "</think>"
SPECIAL_TOKENS = (END_OF_TEXT, TURN_START, TURN_END)
ADDED_TOKENS = (*SPECIAL_TOKENS, THINK_START, THINK_END)
"""Their ids are their places in this list."""

SPLIT_PATTERN = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?[\p{L}\p{M}]+|\p{N}"
    r"| ?[^\s\p{L}\p{M}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
"""How Qwen3.5 cuts text before BPE: words with their leading space, single digits, punctuation, line breaks."""


class TokenizerError(SlimqwenError):
    """The training text cannot fill the vocabulary."""


def train_tokenizer(texts: Iterable[str]) -> PreTrainedTokenizerFast:
    """A tokenizer of exactly `VOCABULARY_SIZE` tokens, merges learned from the texts.

    Args:
        texts: training texts; the added tokens in them are cut out before merges are learned.

    Raises:
        TokenizerError: the texts have too few distinct words for that many merges.
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
    # The trainer would learn merges inside the added tokens, which encoding never sees: cut them out first.
    marks = re.compile("|".join(map(re.escape, ADDED_TOKENS)))
    tokenizer.train_from_iterator((piece for text in texts for piece in marks.split(text) if piece), trainer)
    if tokenizer.get_vocab_size() != VOCABULARY_SIZE:
        raise TokenizerError(
            f"the texts give {tokenizer.get_vocab_size()} tokens, not {VOCABULARY_SIZE}; use more or richer texts"
        )
    return _as_qwen(tokenizer)


def end_token_ids() -> tuple[int, int]:
    """Ids of the tokens that end a generation: end of turn, end of text."""
    return ADDED_TOKENS.index(TURN_END), ADDED_TOKENS.index(END_OF_TEXT)


def chat_template() -> str:
    """The ChatML template (Jinja) that is written beside the tokenizer."""
    return resources.files(__package__).joinpath("chat_template.jinja").read_text(encoding="utf-8")


def write_tokenizer(tokenizer: PreTrainedTokenizerFast, folder: Path) -> None:
    """Writes tokenizer.json, tokenizer_config.json and chat_template.jinja into a checkpoint folder."""
    tokenizer.save_pretrained(folder)


def write_generation_config(folder: Path) -> None:
    """Writes generation_config.json: both end tokens stop a generation, greedy by default."""
    turn_end, text_end = end_token_ids()
    settings = {"do_sample": False, "eos_token_id": [turn_end, text_end], "pad_token_id": text_end}
    (folder / "generation_config.json").write_text(json.dumps(settings, indent=2) + "\n", encoding="utf-8")


def load_tokenizer(folder: Path) -> PreTrainedTokenizerFast:
    """The tokenizer of a checkpoint folder.

    Raises:
        TokenizerError: the folder has no tokenizer.json.
    """
    if not (folder / "tokenizer.json").is_file():
        raise TokenizerError(f"{folder}: no tokenizer.json; this is not a checkpoint folder")
    return PreTrainedTokenizerFast.from_pretrained(folder)


def _as_qwen(tokenizer: Tokenizer) -> PreTrainedTokenizerFast:
    # The BPE trainer marks every token it is handed as special; the thinking marks must stay visible in plain text.
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
