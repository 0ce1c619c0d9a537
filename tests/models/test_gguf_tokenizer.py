"""Tokenizers of GGUF files give the ids of the original."""

from pathlib import Path

import pytest
from transformers import AutoTokenizer

from tests.models.gguf_files import TEXTS, converted, original_tokenizer, write_gguf
from tests.models.test_vocabulary import END, START
from tests.zoo.published_forms import PUBLISHED_FORMS


@pytest.mark.parametrize(
    ("family", "rule"),
    [("llama", "llama-bpe"), ("llama", "smollm"), ("llama", "gpt-2"), ("qwen2", "qwen2"), ("qwen3", "qwen2")],
)
def test_a_thousand_texts_have_the_ids_of_the_original(family: str, rule: str, tmp_path: Path) -> None:
    published = PUBLISHED_FORMS[family].build(tmp_path / "published")
    original = original_tokenizer(rule)
    made = AutoTokenizer.from_pretrained(
        converted(write_gguf(published, tmp_path / "m.gguf", original, rule, "Q8_0"))
    )
    for text in TEXTS:
        assert made(text)["input_ids"] == original.encode(text).ids
        assert made.decode(made(text)["input_ids"]) == original.decode(
            original.encode(text).ids, skip_special_tokens=False
        )
    assert (made.bos_token, made.eos_token) == (START, END)
    assert made.apply_chat_template([{"role": "user", "content": "hi"}], tokenize=False) == "hi"
