"""Templates are tried out before anything starts."""

import json

import pytest

from slimqwen import variant
from slimqwen.errors import SlimqwenError
from slimqwen.serving import chat_template
from slimqwen.serving.errors import ServingError
from slimqwen.text.chats import ChatTemplate

VARIANT = variant.load("tiny")
TINY = VARIANT.weights


def check(tmp_path, text, **arguments):
    file = tmp_path / "chat.jinja"
    file.write_text(text)
    templates = chat_template.served_templates(VARIANT, {"chat-template": str(file)})
    chat_template.check_templates(templates, TINY, arguments)


def test_the_embedded_models_template_renders():
    templates = chat_template.served_templates(VARIANT, {})
    assert templates["default"].file == TINY / "chat_template.jinja"
    chat_template.check_templates(templates, TINY, {})


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("{% for m in messages %}", r"chat\.jinja, line 1 does not render"),
        ("{{ messages[7].content }}", "does not render .*: .*has no element 7"),
        (
            "{{ raise_exception('no thinking') if enable_thinking }}",
            "does not render a chat of user, .* with enable_thinking=True: no thinking; .* VLLM_CHAT_TEMPLATE or",
        ),
        ("{{ 1 // 0 if enable_thinking }}", "does not render .*: .*zero"),
        ("<|im_start|>assistant", "leaves out the message 'What is the first"),
        ("{{ messages[-1].content }}", "leaves out"),
    ],
)
def test_a_template_that_is_none_for_chats_is_refused_with_the_reason(tmp_path, text, said):
    with pytest.raises(ServingError, match=said):
        check(tmp_path, text)


PARTS = "{% for m in messages %}{% for part in m.content %}{{ part.text }}{% endfor %}{% endfor %}"
FIRST_PART = "{% for m in messages %}{{ m.content[0].text }}{% endfor %}"
TURNS = (
    "{% for m in messages %}{% if (m.role == 'user') != (loop.index0 % 2 == 0) %}{{ raise_exception('no') }}{% endif %}"
    "{{ m.content }}{% endfor %}"
)
TODAY = "{{ strftime_now('%d') }}{% for m in messages %}{{ m.content }}{% endfor %}"
GENERATION = "{% for m in messages %}{% generation %}{{ m.content }}{% endgeneration %}{% endfor %}"


@pytest.mark.parametrize("text", [PARTS, TURNS, TODAY, GENERATION])
def test_templates_of_other_families_pass(tmp_path, text):
    check(tmp_path, text)


def test_a_template_of_parts_to_which_vllm_gives_text_is_refused(tmp_path):
    with pytest.raises(ServingError, match=r"does not render|leaves out"):
        check(tmp_path, FIRST_PART)
    chat_template.check_templates({"default": ChatTemplate(FIRST_PART, tmp_path)}, TINY, {}, "openai")


def test_a_template_behind_a_byte_order_mark_is_refused(tmp_path):
    with pytest.raises(SlimqwenError, match=r"chat\.jinja begins with a byte order mark; remove it with"):
        check(tmp_path, "\ufeff" + TODAY)


@pytest.mark.parametrize("name", ["tokenizer_config.json", "special_tokens_map.json"])
@pytest.mark.parametrize(
    "token", ["<|im_end|>", {"content": "<|im_end|>", "lstrip": True, "__type": "AddedToken"}]
)
def test_a_special_token_is_its_content_however_it_is_stored(tmp_path, name, token):
    (tmp_path / "tokenizer_config.json").write_text("{}")
    (tmp_path / name).write_text(json.dumps({"eos_token": token, "bos_token": None}))
    text = (
        "{{ 1 // 0 if bos_token is defined }}{% for m in messages %}{{ m.content + eos_token }}{% endfor %}"
    )
    templates = {"default": ChatTemplate(text, tmp_path / "chat.jinja")}
    chat_template.check_templates(templates, tmp_path, {})


def test_the_variants_default_arguments_are_given(tmp_path):
    text = "{{ eos_token }}{{ messages | map(attribute='content') | join(tone.upper()) }}"
    check(tmp_path, text, tone="kind")
    with pytest.raises(ServingError):
        check(tmp_path, text)


@pytest.mark.parametrize("content", ["", "{", "[]", "version https://git-lfs.github.com/spec/v1"])
def test_a_damaged_tokenizer_config_is_told(tmp_path, content):
    (tmp_path / "tokenizer_config.json").write_text(content)
    with pytest.raises(ServingError, match=r"tokenizer_config\.json cannot be read"):
        chat_template.check_templates({}, tmp_path, {})


def test_a_missing_template_is_refused(tmp_path):
    with pytest.raises(ServingError, match="cannot be read"):
        chat_template.served_templates(VARIANT, {"chat-template": str(tmp_path / "none.jinja")})


@pytest.mark.parametrize(
    ("ending", "thinks"),
    [
        ("<think>\n{% if enable_thinking is false %}\n</think>\n{% endif %}", True),
        ("<think>\n{% if enable_thinking is not true %}\n</think>\n{% endif %}", False),
        ("{% if enable_thinking is false %}<think>\n\n</think>{% endif %}", True),
        ("", False),
    ],
)
def test_a_template_that_leaves_thinking_to_the_request_says_what_it_does_without(tmp_path, ending, thinks):
    text = "{% for m in messages %}<think>{{ m.content }}</think>{% endfor %}" + ending
    template = ChatTemplate(text, tmp_path / "chat.jinja")
    assert chat_template.thinks_by_default(template, TINY) is thinks
