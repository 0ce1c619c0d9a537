from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tinyworld import TinyworldError
from tinyworld.documents import Turn, render_completion, render_prompt
from tinyworld.tokenizer import (
    ADDED_TOKENS,
    VOCABULARY_SIZE,
    chat_template,
    end_token_ids,
    load_tokenizer,
    train_tokenizer,
)

TINY = Path(__file__).parents[2] / "weights" / "tiny"
TOKENIZER = load_tokenizer(TINY)


def rendered(messages, **options):
    return TOKENIZER.apply_chat_template(messages, tokenize=False, add_generation_prompt=True, **options)


def test_it_has_exactly_8192_tokens_with_dense_ids():
    assert sorted(TOKENIZER.get_vocab().values()) == list(range(VOCABULARY_SIZE))


@settings(max_examples=150, deadline=None)
@given(st.text())
def test_every_text_round_trips(text):
    tokens = TOKENIZER(text, add_special_tokens=False)["input_ids"]
    assert TOKENIZER.decode(tokens, skip_special_tokens=False) == text


def test_every_byte_is_a_token():
    single = [token for token, index in TOKENIZER.get_vocab().items() if len(token) == 1]
    assert len(single) >= 256
    # Bytes that are no UTF-8 by themselves are met inside longer characters.
    text = "".join(chr(code) for code in (*range(256), 0x20AC, 0x1F600, 0x10FFFF))
    tokens = TOKENIZER(text, add_special_tokens=False)["input_ids"]
    assert TOKENIZER.decode(tokens) == text


def test_plain_text_never_contains_an_end_token():
    tokens = TOKENIZER("im_end endoftext <| |> <think <|im_en d|>", add_special_tokens=False)["input_ids"]
    assert set(tokens).isdisjoint(range(len(ADDED_TOKENS)))


def test_thinking_marks_stay_visible_when_special_tokens_are_skipped():
    tokens = TOKENIZER("<think>\na\n</think>\n\nb<|im_end|>", add_special_tokens=False)["input_ids"]
    assert TOKENIZER.decode(tokens, skip_special_tokens=True) == "<think>\na\n</think>\n\nb"


def test_digits_are_read_one_by_one_as_in_qwen():
    assert TOKENIZER.tokenize("1234") == ["1", "2", "3", "4"]


def test_turn_end_is_eos_and_text_end_is_padding():
    assert TOKENIZER.eos_token == "<|im_end|>"
    assert TOKENIZER.pad_token == "<|endoftext|>"
    assert end_token_ids() == (TOKENIZER.eos_token_id, TOKENIZER.pad_token_id)


def test_thinking_is_on_by_default_and_opens_the_thought():
    question = [{"role": "user", "content": "Where?"}]
    assert (
        rendered(question)
        == rendered(question, enable_thinking=True)
        == render_prompt("Where?", thinking=True)
    )
    assert rendered(question).endswith("<|im_start|>assistant\n<think>\n")


def test_thinking_off_closes_an_empty_thought():
    question = [{"role": "user", "content": "Where?"}]
    assert rendered(question, enable_thinking=False) == render_prompt("Where?", thinking=False)
    assert rendered(question, enable_thinking=False).endswith("<think>\n\n</think>\n\n")


def test_earlier_thoughts_are_not_shown_again():
    messages = [
        {"role": "user", "content": "One?"},
        {"role": "assistant", "content": "<think>\nhm\n</think>\n\n1"},
        {"role": "user", "content": "Two?"},
    ]
    assert rendered(messages) == render_prompt("Two?", thinking=True, history=(Turn("One?", "1"),))


def test_a_finished_answer_is_rendered_as_training_has_it():
    messages = [
        {"role": "user", "content": "One?"},
        {"role": "assistant", "content": "1", "reasoning_content": "hm"},
    ]
    whole = TOKENIZER.apply_chat_template(messages, tokenize=False)
    assert whole == render_prompt("One?", thinking=True) + render_completion("1", "hm") + "\n"


def test_content_in_parts_and_a_system_message_are_rendered():
    messages = [
        {"role": "system", "content": "Be kind."},
        {"role": "user", "content": [{"type": "text", "text": "One?"}]},
    ]
    assert rendered(messages).startswith(
        "<|im_start|>system\nBe kind.<|im_end|>\n<|im_start|>user\nOne?<|im_end|>\n"
    )


def test_an_image_is_refused_in_words():
    messages = [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "x"}}]}]
    with pytest.raises(Exception, match="reads text only"):
        rendered(messages)


def test_the_committed_template_is_the_packages_own():
    assert (TINY / "chat_template.jinja").read_text() == chat_template()


def test_too_few_texts_are_an_error_that_says_so():
    with pytest.raises(TinyworldError, match="richer texts"):
        train_tokenizer(["one two three"])
