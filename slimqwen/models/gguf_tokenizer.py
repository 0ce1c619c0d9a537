"""The tokenizer of a GGUF file as tokenizer.json: a byte-level BPE whose splitting rule has a name in the file.

The rules are those of llama.cpp's llama-vocab.cpp, and of the tokenizer.json of the models that each name stands for.
"""

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from tokenizers import Tokenizer

from slimqwen.errors import SlimqwenError

_WORDS = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|"
_REST = r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
_CONTROL, _USER_DEFINED, _UNUSED = 3, 4, 5
"""Values of tokenizer.ggml.token_type."""


class TokenizerError(SlimqwenError):
    """The tokenizer of a GGUF file cannot be converted; the message is the end of a sentence about the file."""


@dataclass(frozen=True)
class _Rule:
    """How a tokenizer splits text into words.

    Attributes:
        split: regular expression of a word; None for GPT-2's own, which the library knows.
        digits: whether each digit is a word.
        normalizer: of tokenizer.json.
        takes_whole_words: whether a word that is a token needs no merges.
        begins: whether a text begins with the token bos where the file does not say it.
    """

    split: str | None = None
    digits: bool = False
    normalizer: Mapping[str, Any] | None = None
    takes_whole_words: bool = False
    begins: bool = False


_LLAMA_3 = _Rule(_WORDS + r"\p{N}{1,3}" + _REST, takes_whole_words=True, begins=True)
_RULES: Mapping[str, _Rule] = {
    **dict.fromkeys(("llama-bpe", "llama3", "llama-v3"), _LLAMA_3),
    "qwen2": _Rule(_WORDS + r"\p{N}" + _REST, normalizer={"type": "NFC"}),
    "smollm": _Rule(digits=True),
    "gpt-2": _Rule(),
}


@dataclass(frozen=True)
class TokenizerFiles:
    """A tokenizer as files of a checkpoint.

    Attributes:
        state: content of tokenizer.json.
        specials: bos, eos, pad and unk token -> its text.
        chat_template: Jinja; None without one.
    """

    state: Mapping[str, Any]
    specials: Mapping[str, str]
    chat_template: str | None

    def files(self, context: int) -> dict[str, str]:
        """Name of each file -> its content; `context` is the longest text in tokens."""
        settings = {
            "tokenizer_class": "PreTrainedTokenizerFast",
            "model_max_length": context,
            "clean_up_tokenization_spaces": False,
            **self.specials,
        }
        template = {"chat_template.jinja": self.chat_template} if self.chat_template else {}
        return {
            "tokenizer.json": json.dumps(self.state, indent=2, ensure_ascii=False) + "\n",
            "tokenizer_config.json": json.dumps(settings, indent=2, ensure_ascii=False) + "\n",
            **template,
        }


def build_tokenizer(get: Callable[..., Any]) -> TokenizerFiles:
    """The tokenizer of a GGUF file.

    Args:
        get: (key, default) -> value of a key of the file's metadata.

    Raises:
        TokenizerError: it is of another kind, its rule is not known, or ids would change.
    """
    kind, name = get("tokenizer.ggml.model"), get("tokenizer.ggml.pre")
    if kind != "gpt2":
        what = "a SentencePiece tokenizer" if kind == "llama" else f"a tokenizer of the kind {kind}"
        raise TokenizerError(f"has {what}, not a byte-level BPE")
    if name not in _RULES:
        raise TokenizerError(f"splits text by the rule {name} (tokenizer.ggml.pre), not {', '.join(_RULES)}")
    rule = _RULES[name]
    tokens, types = get("tokenizer.ggml.tokens"), get("tokenizer.ggml.token_type")
    while types[len(tokens) - 1] == _UNUSED:  # rows of the embedding without a token
        tokens.pop()
    specials = {
        f"{end}_token": tokens[number]
        for end, key in (("bos", "bos"), ("eos", "eos"), ("pad", "padding"), ("unk", "unknown"))
        if (number := get(f"tokenizer.ggml.{key}_token_id")) is not None
    }
    begins = get("tokenizer.ggml.add_bos_token", rule.begins) and "bos_token" in specials
    state = {
        "version": "1.0",
        "truncation": None,
        "padding": None,
        "added_tokens": [
            {
                "id": number,
                "content": token,
                **dict.fromkeys(("single_word", "lstrip", "rstrip", "normalized"), False),
                "special": types[number] == _CONTROL,
            }
            for number, token in enumerate(tokens)
            if types[number] in (_CONTROL, _USER_DEFINED)
        ],
        "normalizer": rule.normalizer,
        "pre_tokenizer": _pre_tokenizer(rule),
        "post_processor": _post_processor(specials["bos_token"], tokens) if begins else _byte_level(False),
        "decoder": _byte_level(True),
        "model": {
            "type": "BPE",
            "dropout": None,
            "unk_token": specials.get("unk_token"),
            "continuing_subword_prefix": None,
            "end_of_word_suffix": None,
            "fuse_unk": False,
            "byte_fallback": False,
            "ignore_merges": rule.takes_whole_words,
            "vocab": {token: number for number, token in enumerate(tokens)},
            "merges": [merge.split(" ") for merge in get("tokenizer.ggml.merges")],
        },
    }
    try:
        ids = Tokenizer.from_str(json.dumps(state)).get_vocab()
    # The tokenizers library raises plain Exception.
    except Exception as error:
        raise TokenizerError(f"has a tokenizer that cannot be built ({error})") from None
    if ids != {token: number for number, token in enumerate(tokens)} or len(ids) != len(tokens):
        raise TokenizerError("has a tokenizer in which two ids have the same token")
    return TokenizerFiles(state, specials, get("tokenizer.chat_template"))


def _byte_level(add_prefix_space: bool, *, use_regex: bool = True) -> dict[str, Any]:
    return {
        "type": "ByteLevel",
        "add_prefix_space": add_prefix_space,
        "trim_offsets": False,
        "use_regex": use_regex,
    }


def _pre_tokenizer(rule: _Rule) -> dict[str, Any]:
    parts: list[dict[str, Any]] = []
    if rule.digits:
        parts.append({"type": "Digits", "individual_digits": True})
    if rule.split:
        pattern = {"Regex": rule.split}
        parts.append({"type": "Split", "pattern": pattern, "behavior": "Isolated", "invert": False})
    parts.append(_byte_level(False, use_regex=rule.split is None))
    return {"type": "Sequence", "pretokenizers": parts}


def _post_processor(bos: str, tokens: list[str]) -> dict[str, Any]:
    """What adds the token bos before each text."""

    def special(part: int) -> dict[str, Any]:
        return {"SpecialToken": {"id": bos, "type_id": part}}

    def sequence(name: str, part: int) -> dict[str, Any]:
        return {"Sequence": {"id": name, "type_id": part}}

    template = {
        "type": "TemplateProcessing",
        "single": [special(0), sequence("A", 0)],
        "pair": [special(0), sequence("A", 0), special(1), sequence("B", 1)],
        "special_tokens": {bos: {"id": bos, "ids": [tokens.index(bos)], "tokens": [bos]}},
    }
    return {"type": "Sequence", "processors": [_byte_level(False), template]}
