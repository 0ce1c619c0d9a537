"""GGUF files as llama.cpp's convert_hf_to_gguf.py writes them, of small checkpoints."""

import inspect
import json
import random
from pathlib import Path
from typing import Any

import gguf
import numpy as np
from tokenizers import Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, processors, trainers
from transformers.convert_slow_tokenizer import TikTokenConverter
from transformers.models.qwen2.tokenization_qwen2 import PRETOKENIZE_REGEX

from slimqwen.checkpoint import read_config
from slimqwen.models.gguf_file import GgufFile, make_checkpoint
from tests.checkpoints import stored
from tests.models.test_vocabulary import CORPUS, END, START

MARK = "<|mark|>"
LLAMA_3 = inspect.signature(TikTokenConverter).parameters["pattern"].default
RULES = {"llama": "llama-bpe", "qwen2": "qwen2", "qwen3": "qwen2"}
"""Family -> name of the rule by which its newest models split text."""


def original_tokenizer(rule: str) -> Tokenizer:
    """A small tokenizer that splits text as the published ones of a rule do, with rows for 256 bytes and merges."""
    bytes_of_words = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=rule in ("smollm", "gpt-2"))
    before: dict[str, list[Any]] = {
        "smollm": [pre_tokenizers.Digits(individual_digits=True)],
        "gpt-2": [],
        "qwen2": [pre_tokenizers.Split(Regex(PRETOKENIZE_REGEX), "isolated")],
        "llama-bpe": [pre_tokenizers.Split(Regex(LLAMA_3), "isolated")],
    }
    tokenizer = Tokenizer(models.BPE())
    tokenizer.normalizer = normalizers.NFC() if rule == "qwen2" else None
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence([*before[rule], bytes_of_words])
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    tokenizer.train_from_iterator(
        CORPUS, trainers.BpeTrainer(vocab_size=600, initial_alphabet=alphabet, show_progress=False)
    )
    tokenizer.add_special_tokens([END, START])
    tokenizer.add_tokens([MARK])
    if rule == "llama-bpe":
        start = [(START, tokenizer.token_to_id(START))]
        tokenizer.post_processor = processors.TemplateProcessing(single=f"{START} $A", special_tokens=start)
    return tokenizer


def write_gguf(folder: Path, file: Path, tokenizer: Tokenizer, rule: str, kind: str, **settings: Any) -> Path:
    """Write a checkpoint of one shard as GGUF.

    Args:
        kind: type of the matrices, as gguf spells it.
        settings: more keys of the file.
    """
    config, tensors = read_config(folder), stored(folder)
    family = config["model_type"]
    arch = next(arch for arch, name in gguf.MODEL_ARCH_NAMES.items() if name == family)
    names = gguf.get_tensor_name_map(arch, config["num_hidden_layers"])
    writer = gguf.GGUFWriter(file, family)
    writer.add_block_count(config["num_hidden_layers"])
    writer.add_context_length(config["max_position_embeddings"])
    writer.add_embedding_length(config["hidden_size"])
    writer.add_feed_forward_length(config["intermediate_size"])
    writer.add_head_count(config["num_attention_heads"])
    writer.add_head_count_kv(config["num_key_value_heads"])
    writer.add_layer_norm_rms_eps(config["rms_norm_eps"])
    writer.add_rope_freq_base(config["rope_parameters"]["rope_theta"])
    writer.add_key_length(config["head_dim"]) if "head_dim" in config else None
    for key, value in settings.items():
        add = writer.add_string if isinstance(value, str) else writer.add_uint32
        add(key.replace("__", "."), value)
    _add_tokenizer(writer, tokenizer, rule, config["vocab_size"])
    heads = {"q_proj": config["num_attention_heads"], "k_proj": config["num_key_value_heads"]}
    for name, tensor in tensors.items():
        module, _, part = name.rpartition(".")
        numbers = tensor.float().numpy()
        if family == "llama" and (count := heads.get(module.rpartition(".")[2])):
            # As `permute` of convert_hf_to_gguf.py.
            halves = numbers.reshape(count, 2, -1, *numbers.shape[1:])
            numbers = np.ascontiguousarray(halves.swapaxes(1, 2)).reshape(numbers.shape)
        form, content = _quantised(numbers, kind)
        writer.add_tensor(f"{names.get_name(module)}.{part}", content, raw_dtype=form)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return file


def _quantised(numbers: np.ndarray, kind: str) -> tuple[gguf.GGMLQuantizationType, np.ndarray]:
    """A tensor in a type: vectors in float32, rows that no block divides in Q8_0, as llama.cpp does."""
    form = gguf.GGMLQuantizationType["F32" if numbers.ndim == 1 else kind]
    if numbers.shape[-1] % gguf.GGML_QUANT_SIZES[form][0]:
        form = gguf.GGMLQuantizationType.Q8_0
    if form != gguf.GGMLQuantizationType.Q6_K:
        return form, gguf.quantize(numbers, form)
    # gguf cannot make these blocks, so their integers are made up; the last two bytes are the scale.
    size, length = gguf.GGML_QUANT_SIZES[form]
    shape = (len(numbers), numbers.shape[1] // size, length)
    blocks = np.random.default_rng(0).integers(0, 256, shape, dtype=np.uint8)
    blocks[..., -2:] = np.array([1e-5], np.float16).view(np.uint8)
    return form, blocks.reshape(len(numbers), -1)


def _add_tokenizer(writer: gguf.GGUFWriter, tokenizer: Tokenizer, rule: str, rows: int) -> None:
    added = {token["content"]: token["special"] for token in json.loads(tokenizer.to_str())["added_tokens"]}
    tokens = sorted(tokenizer.get_vocab(), key=tokenizer.token_to_id)
    types = [
        gguf.TokenType.NORMAL
        if token not in added
        else gguf.TokenType.CONTROL
        if added[token]
        else gguf.TokenType.USER_DEFINED
        for token in tokens
    ]
    unused = [f"[PAD{number}]" for number in range(len(tokens), rows)]
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre(rule)
    writer.add_token_list(tokens + unused)
    writer.add_token_types(types + [gguf.TokenType.UNUSED] * len(unused))
    merges = json.loads(tokenizer.to_str())["model"]["merges"]
    writer.add_token_merges([" ".join(merge) for merge in merges])
    writer.add_bos_token_id(tokenizer.token_to_id(START))
    writer.add_eos_token_id(tokenizer.token_to_id(END))
    writer.add_chat_template("{{ messages[0].content }}")


def text_of(chance: random.Random) -> str:
    """Words, numbers, marks and characters of many scripts, in any order."""
    pieces = [
        *" ".join(CORPUS).split(" "),
        *("0", "12", "1984", " ", "\n\n", "\t", "'ll", "e\u0301", "\u0930\u094d"),
    ]
    pieces += [
        END,
        START,
        MARK,
        END[:-1],
        chr(chance.randrange(1, 0xD800)),
        chr(chance.randrange(0x10000, 0x1FFFF)),
    ]
    return chance.choice(("", " ")).join(chance.choices(pieces, k=12))


TEXTS = [text_of(random.Random(seed)) for seed in range(1000)]


def converted(file: Path) -> Path:
    """The checkpoint of a GGUF file, beside it."""
    make_checkpoint(GgufFile(file), target := file.with_suffix(""))
    return target
