"""Chats are rendered as vLLM's server renders them, by the template that it chooses, or refused."""

import json
import shutil
from pathlib import Path
from types import SimpleNamespace

import pytest
import transformers
from vllm.entrypoints.openai.chat_completion.protocol import ChatCompletionRequest
from vllm.renderers.chat_utils import parse_chat_messages
from vllm.renderers.hf import (
    resolve_chat_template,
    resolve_chat_template_content_format,
    safe_apply_chat_template,
)

from slimqwen.errors import SlimqwenError
from slimqwen.text.chats import TEMPLATE_DATE, ChatRenderer, read_chat_templates, read_texts
from slimqwen.text.documents import read_documents
from slimqwen.text.files import CorpusError
from slimqwen.variant import repository_root
from tests.zoo.editable_checkpoint import PROCESSORS

TINY = repository_root() / "weights" / "tiny"
HEAD = (
    "{%- for tool in tools or [] %}TOOL {{ tool | tojson }}\n{% endfor %}"
    "{%- for message in messages %}[{{ message.role }}]"
    "{%- if message.reasoning_content %}({{ message.reasoning_content }}){% endif %}"
)
TAIL = (
    "{%- for call in message.tool_calls or [] %}CALL {{ call.function.name }}"
    "{%- for key, value in call.function.arguments | items %} {{ key }}={{ value | tojson }}{% endfor %}{% endfor %}"
    "\n{% endfor %}"
)
STRINGS = HEAD + "{{ message.content or '' }}" + TAIL
# vLLM gives the content of a tool's message as text all the same.
PARTS = (
    HEAD + "{%- if message.content is string %}<{{ message.content }}>{% else %}"
    "{%- for part in message.content %}<{{ part.text }}>{% endfor %}{% endif %}" + TAIL
)

CALL = {
    "id": "1",
    "type": "function",
    "function": {"name": "find_boat", "arguments": '{"colour": "red", "n": [1]}'},
}
TOOL = {
    "type": "function",
    "function": {
        "name": "find_boat",
        "parameters": {"type": "object", "properties": {"colour": {"default": None}}},
    },
}
CHAT = [
    {"role": "system", "content": "Be brief."},
    {
        "role": "user",
        "content": [{"type": "text", "text": "Which boat"}, {"type": "text", "text": "is red?"}],
    },
    {"role": "assistant", "reasoning_content": "I look.", "content": None, "tool_calls": [CALL]},
    {"role": "tool", "content": [{"type": "text", "text": "the third"}], "tool_call_id": "1"},
    {"role": "assistant", "content": "The third.", "name": "captain"},
]


@pytest.fixture
def weights(tmp_path) -> Path:
    """The tokenizer of the embedded model, without a template."""
    folder = tmp_path / "weights"
    folder.mkdir()
    for name in ("config.json", "tokenizer.json", "tokenizer_config.json"):
        shutil.copy(TINY / name, folder / name)
    return folder


def renderer(weights, template=None):
    if template:
        (weights / "chat_template.jinja").write_text(template)
    return ChatRenderer(weights)


def model_config(weights):
    """What the server's renderer reads of its ModelConfig."""
    return SimpleNamespace(
        tokenizer=str(weights),
        model=str(weights),
        tokenizer_revision=None,
        revision=None,
        code_revision=None,
        trust_remote_code=False,
        hf_config=SimpleNamespace(model_type="qwen3_5"),
        enable_prompt_embeds=False,
        multimodal_config=None,
    )


def serve(weights, messages, tools=None):
    """The prompt that vLLM's server makes of a request, without the beginning of a response."""
    request = ChatCompletionRequest(messages=messages, **({"tools": tools} if tools else {}))
    dumped = [tool.model_dump() for tool in request.tools] if request.tools else None
    tokenizer, config = transformers.AutoTokenizer.from_pretrained(weights), model_config(weights)
    form = resolve_chat_template_content_format(None, dumped, "auto", tokenizer, model_config=config)
    conversation, _, _ = parse_chat_messages(request.messages, config, form)
    return safe_apply_chat_template(
        config, tokenizer, conversation, tools=dumped, tokenize=False, add_generation_prompt=False
    )


@pytest.mark.parametrize("template", [STRINGS, PARTS], ids=["content as text", "content as parts"])
@pytest.mark.parametrize("tools", [None, [TOOL]], ids=["no tools", "tools"])
def test_a_chat_is_rendered_as_the_server_renders_it(weights, template, tools):
    rendered = renderer(weights, template).render(CHAT, tools)
    assert rendered == serve(weights, json.loads(json.dumps(CHAT)), tools)
    assert 'CALL find_boat colour="red" n=[1]' in rendered
    assert "(I look.)" in rendered
    assert ("TOOL" in rendered) == bool(tools)
    assert rendered == renderer(weights).render(CHAT, json.dumps(tools) if tools else "")


def test_arguments_are_an_object_or_its_json_and_null_is_none(weights):
    render = renderer(weights, STRINGS).render
    forms = [{"colour": "red", "unit": None}, '{"unit": null, "colour": "red"}', None, ""]
    rendered = []
    for arguments in forms:
        call = {"function": {"name": "find_boat", "arguments": arguments}}
        rendered.append(render([{"role": "assistant", "content": None, "tool_calls": [call]}]))
    assert rendered == ['[assistant]CALL find_boat colour="red"'] * 2 + ["[assistant]CALL find_boat"] * 2


@pytest.mark.parametrize(
    ("template", "message", "tools", "reason"),
    [
        (STRINGS, {"tool_calls": [{"function": {"name": "f", "arguments": "{"}}]}, None, "of a call of f are not JSON"),
        (STRINGS, {"tool_calls": [{"function": {"name": "f", "arguments": [1]}}]}, None, "are not a JSON object"),
        (STRINGS, {"tool_calls": [{"name": "f", "arguments": {}}]}, None, "a tool call has no function"),
        (STRINGS, {"content": [{"type": "image_url", "image_url": {"url": "x"}}]}, None, "not text"),
        (STRINGS, {"content": {"text": "a"}}, None, "not text"),
        (STRINGS, {"role": None}, None, "has no role"),
        (STRINGS, {}, [{"name": "f"}], "function"),
        (STRINGS, {}, "[{", "Expecting"),
        ("{{ messages[0].content }}", {}, [TOOL], "leaves out the tools"),
        ("{{ messages[0].content }}", {"tool_calls": [CALL]}, None, "leaves out the tool calls"),
        ("{{ raise_exception('never') }}", {}, None, "never"),
        (None, {}, None, "has no chat_template"),
    ],
)  # fmt: skip
def test_a_chat_that_the_server_would_refuse_or_cut_is_refused(weights, template, message, tools, reason):
    with pytest.raises(Exception, match=reason):
        renderer(weights, template).render([{"role": "assistant", "content": "a", **message}], tools)


NAMED = [{"name": "default", "template": "config"}, {"name": "tool_use", "template": "config for tools"}]
FORMS = {
    "jinja": {"chat_template.jinja": "jinja"},
    "config": {"tokenizer_config.json": "config"},
    "named": {"tokenizer_config.json": NAMED},
    "jinja and named": {"chat_template.jinja": "jinja", "tokenizer_config.json": NAMED},
    "additional": {
        "chat_template.jinja": "jinja",
        "additional_chat_templates/tool_use.jinja": "jinja for tools",
    },
    "json": {"chat_template.json": "json"},
    "json and jinja": {"chat_template.json": "json", "chat_template.jinja": "jinja"},
    "json and named": {"chat_template.json": "json", "tokenizer_config.json": NAMED},
    "none": {},
}


def write_templates(weights, files):
    (weights / "additional_chat_templates").mkdir()
    for name, template in files.items():
        file = weights / name
        if name == "tokenizer_config.json":
            file.write_text(json.dumps({**json.loads(file.read_text()), "chat_template": template}))
        else:
            file.write_text(json.dumps({"chat_template": template}) if name.endswith(".json") else template)


@pytest.mark.parametrize("with_processor", [False, True], ids=["text", "multimodal"])
@pytest.mark.parametrize("form", FORMS)
def test_the_template_is_the_one_that_the_server_chooses(weights, form, with_processor):
    write_templates(weights, FORMS[form])
    if with_processor:
        transformers.Qwen3_5Config().save_pretrained(weights)
        for name, processor in PROCESSORS.items():
            (weights / name).write_text(json.dumps(processor))
    templates = {name: template.text for name, template in read_chat_templates(weights).items()}
    tokenizer, config = transformers.AutoTokenizer.from_pretrained(weights), model_config(weights)
    chosen = resolve_chat_template(tokenizer, None, None, model_config=config)
    if isinstance(chosen, dict):  # of a processor; the server ends such a request with an error of its own
        chosen = chosen["default"]
    assert templates.get("default") == chosen
    # Without a template for tools, vLLM has none for them where the processor has one for chats.
    for_tools = resolve_chat_template(tokenizer, None, [TOOL], model_config=config) or chosen
    assert templates.get("tool_use", templates.get("default")) == for_tools


def test_the_templates_of_a_checkpoint_may_be_an_object_by_name(weights):
    write_templates(weights, {"tokenizer_config.json": {"default": "chats", "tool_use": "tools"}})
    assert {name: each.text for name, each in read_chat_templates(weights).items()} == {
        "default": "chats",
        "tool_use": "tools",
    }


@pytest.mark.parametrize("name", ["chat_template.jinja", "additional_chat_templates/rag.jinja"])
def test_a_template_behind_a_byte_order_mark_is_refused(weights, name):
    write_templates(weights, {name: "\ufeff" + STRINGS})
    with pytest.raises(
        SlimqwenError, match=rf"{Path(name).name} begins with a byte order mark; remove it with `sed"
    ):
        ChatRenderer(weights)


def test_a_template_behind_a_mark_inside_json_is_refused(weights):
    write_templates(weights, {"tokenizer_config.json": "\ufeff" + STRINGS})
    with pytest.raises(
        CorpusError, match=r"tokenizer_config\.json begins with a byte order mark; remove .ufeff"
    ):
        ChatRenderer(weights)


KNOWN_ROLES = (
    "{%- for message in messages %}{%- if message.role in ('user', 'system', 'assistant') %}"
    "[{{ message.role }}]{{ message.content | trim }}{%- endif %}{%- endfor %}"
)
FIRST_SYSTEM = (
    "{%- if messages[0].role == 'system' %}{{ messages[0].content }}{% endif %}"
    "{%- for message in messages if message.role != 'system' %}{{ message.content }}{% endfor %}"
)
CALLS_ALONE = (
    "{%- for message in messages %}{%- if message.tool_calls %}{{ message.tool_calls | tojson }}"
    "{%- else %}{{ message.content }}{% endif %}{% endfor %}"
)
STRIPS_THOUGHTS = (
    "{%- for message in messages %}{{ message.content.split('</think>') | last | trim }}{% endfor %}"
)
LAST_ALONE = "{{ messages[-1].content }}"
LOWER = "{%- for message in messages %}{{ message.content | lower | tojson }}{% endfor %}"
GENERATION = (
    "{%- for message in messages %}{% generation %}{{ message.content }}{% endgeneration %}{% endfor %}"
)


@pytest.mark.parametrize(
    ("template", "roles", "left_out"),
    [
        (KNOWN_ROLES, ("system", "user", "assistant"), None),
        (KNOWN_ROLES, ("human", "gpt"), "message 1, of the role 'human'"),
        (KNOWN_ROLES, ("user", "function", "assistant"), "message 2, of the role 'function'"),
        (KNOWN_ROLES, ("user", "tool", "assistant"), "message 2, of the role 'tool'"),
        (KNOWN_ROLES, ("user", "model"), "message 2, of the role 'model'"),
        (KNOWN_ROLES, ("developer", "user"), None),  # vLLM makes a system message of it
        (KNOWN_ROLES, ("User", "user"), "message 1, of the role 'User'"),
        (FIRST_SYSTEM, ("system", "user"), None),
        (FIRST_SYSTEM, ("user", "system", "user"), "message 2, of the role 'system'"),
        (CALLS_ALONE, ("user", "assistant with calls"), "message 2, of the role 'assistant'"),
        (LAST_ALONE, ("user", "assistant"), "message 1, of the role 'user'"),
        (STRIPS_THOUGHTS, ("user", "assistant"), None),
        (LOWER, ("user", "assistant"), None),
        (GENERATION, ("user", "assistant"), None),
        (PARTS, ("user", "assistant"), None),
    ],
)
def test_a_template_that_leaves_out_a_message_is_refused_with_its_role(weights, template, roles, left_out):
    render = renderer(weights, template).render
    chat = [
        {"role": role.removesuffix(" with calls"), "content": "<think>Hm.</think> Yes. "} for role in roles
    ]
    if roles[-1].endswith("calls"):
        chat[-1]["tool_calls"] = [CALL]
    if left_out is None:
        assert "es." in render(chat)
        return
    with pytest.raises(ValueError, match=f"the template leaves out {left_out}"):
        render(chat)


def test_file_line_and_role_of_what_a_template_leaves_out_are_named(weights, tmp_path):
    (weights / "chat_template.jinja").write_text(KNOWN_ROLES)
    file = tmp_path / "chats.jsonl"
    chats = [[{"role": role, "content": "Yes."}] for role in ("user", "gpt")]
    file.write_text("".join(json.dumps({"messages": chat}) + "\n" for chat in chats))
    with pytest.raises(
        CorpusError, match=r"chats\.jsonl, line 2: .*message 1, of the role 'gpt'.*correct or remove"
    ):
        list(read_texts(file, weights))


def test_messages_without_text_are_no_loss(weights):
    chat = [{"role": "user", "content": "Go."}, {"role": "assistant", "content": None, "tool_calls": [CALL]}]
    chat += [
        {"role": "tool", "content": ""},
        {"role": "assistant", "content": [{"type": "text", "text": " "}]},
    ]
    assert "CALL" in renderer(weights, STRINGS).render(chat)


def test_a_template_that_refuses_marks_still_renders(weights):
    yes = "{{ messages[0].content if messages[0].content == 'Yes.' else raise_exception('no') }}"
    assert renderer(weights, yes).render([{"role": "user", "content": "Yes."}]) == "Yes."


@pytest.mark.parametrize("form", ["%d %B %Y", "%H:%M"])
def test_a_template_that_asks_for_today_gets_the_same_day_every_day(weights, form, monkeypatch):
    chats = renderer(weights, f"{{{{ strftime_now('{form}') }}}}: {{{{ messages[0].content }}}}")
    assert chats.date == "2026-01-01"
    assert chats.render([{"role": "user", "content": "Go."}]) == f"{TEMPLATE_DATE.strftime(form)}: Go."
    assert renderer(weights, STRINGS).date is None


@pytest.mark.parametrize(
    "content", ["", "{", "[]", '{"chat_template": [{"name": "a"}]}', '{"chat_template": 5}']
)
def test_a_damaged_tokenizer_config_is_told(weights, content):
    (weights / "tokenizer_config.json").write_text(content)
    with pytest.raises(CorpusError, match=r"tokenizer_config\.json cannot be read"):
        read_chat_templates(weights)


@pytest.mark.parametrize("content", ["{}", "[]"])
def test_a_file_for_a_chat_template_without_one_is_told(weights, content):
    (weights / "preprocessor_config.json").write_text("{}")
    (weights / "chat_template.json").write_text(content)
    with pytest.raises(CorpusError, match=r"chat_template\.json has no key chat_template; take the file of"):
        read_chat_templates(weights)


def write_rows(file: Path, *rows: object) -> Path:
    # As an editor on Windows saves them.
    file.write_text("".join(f"{json.dumps(row, ensure_ascii=False)}\r\n" for row in rows), newline="")
    return file


@pytest.fixture
def templated(weights: Path) -> Path:
    """The same with a template that renders tools, reasoning and the beginning of a response."""
    template = STRINGS + "{% if add_generation_prompt %}[assistant]{% endif %}"
    (weights / "chat_template.jinja").write_text(template)
    return weights


def test_texts_and_chats_of_one_file_are_read_in_its_order(templated: Path, tmp_path: Path) -> None:
    chat = [{"role": "user", "content": "船?"}, {"role": "assistant", "content": "好", "reasoning": "r"}]
    rows = [{"text": "a"}, {"text": " "}, {"messages": chat}, {"messages": chat, "tools": [TOOL]}]
    plain, rendered, with_tools = read_texts(write_rows(tmp_path / "t.jsonl", *rows), templated)
    assert plain == "a"
    assert rendered == "[user]船?[assistant](r)好"
    assert with_tools.startswith("TOOL")
    assert with_tools.endswith(rendered)


@pytest.mark.parametrize("row", [{"prompt": "a"}, {"messages": [{"content": "a"}]}, {"messages": ["a"]}])
def test_what_is_neither_a_text_nor_a_chat_has_one_error(
    templated: Path, tmp_path: Path, row: object
) -> None:
    file = write_rows(tmp_path / "t.jsonl", {"text": "a"}, row)
    with pytest.raises(CorpusError, match=r"line 2: neither a text nor a chat; give .*text.* or .*messages"):
        list(read_texts(file, templated))


def test_a_chat_to_be_continued_ends_where_its_last_response_would_begin(
    templated: Path, tmp_path: Path
) -> None:
    [document] = read_documents(write_rows(tmp_path / "t.jsonl", {"messages": CHAT, "tools": [TOOL]}))
    whole = ChatRenderer(templated).text_of(document)
    prompt = ChatRenderer(templated).text_of(document, to_continue=True)
    assert prompt.endswith("the third[assistant]")
    assert whole.startswith(prompt.removesuffix("[assistant]"))
    assert prompt.startswith("TOOL")
