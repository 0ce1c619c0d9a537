"""A tokenizer with a token a byte: made at once, where learning merges takes half a minute."""

import transformers
from tinyworld.tokenizer import ADDED_TOKENS, END_OF_TEXT
from tokenizers import Tokenizer, decoders, models, pre_tokenizers


def byte_tokenizer() -> transformers.PreTrainedTokenizerFast:
    """The added tokens of Qwen, then one token for each byte."""
    names = [*ADDED_TOKENS, *sorted(pre_tokenizers.ByteLevel.alphabet())]
    tokenizer = Tokenizer(models.BPE({name: number for number, name in enumerate(names)}, []))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(list(ADDED_TOKENS))
    return transformers.PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token=END_OF_TEXT)
