"""Check of a server's chat templates before the start, because vLLM finds their faults only at the first request."""

import json
import re
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any

from slimqwen.checkpoint.stored_file import refuse_pointer
from slimqwen.serving.errors import ServingError
from slimqwen.text.chats import ChatTemplate, content_form, read_chat_templates, refuse_mark
from slimqwen.variant import Variant

_OFFERS_TOOLS = re.compile(r"\btools\b")
_MESSAGES = ("What is the first?", "It is this.", "And the second?")


def served_templates(variant: Variant, flags: Mapping[str, Any]) -> dict[str, ChatTemplate]:
    """Chat templates that a variant's server uses, by name: the file of --chat-template, or those of the checkpoint.

    Raises:
        ServingError: the file of --chat-template cannot be read.
        CorpusError: a file of the checkpoint cannot be read.
        CorruptCheckpointError: a file is a git-lfs pointer or begins with a byte order mark.
    """
    if "chat-template" not in flags:
        return read_chat_templates(variant.weights)
    file = variant.root / flags["chat-template"]
    try:
        refuse_pointer(file)
        return {"default": ChatTemplate(file.read_text(encoding="utf-8"), file)}
    except (OSError, UnicodeDecodeError) as error:
        raise ServingError(f"chat template {file} cannot be read ({error}); correct its path") from None


def find_tool_parser(templates: Collection[ChatTemplate]) -> str | None:
    """Name of vLLM's tool-call parser for a model with these templates; None if no template renders tools.

    It is qwen3_coder for XML (since Qwen3.5) and hermes for JSON (before).
    """
    if not any(_OFFERS_TOOLS.search(template.text) for template in templates):
        return None
    return "qwen3_coder" if any("<function=" in template.text for template in templates) else "hermes"


def thinks_by_default(template: ChatTemplate, weights: Path) -> bool:
    """Whether the model thinks if a request does not set enable_thinking; False if the template does not render.

    For such a request vLLM's reasoning parser takes everything before `</think>` as thoughts. It therefore suits only
    templates that think by default.
    """
    if "<think>" not in template.text:
        return False
    form = content_form(template.text)
    try:
        tokens = _special_tokens(weights)
        unsaid, off = (
            _render(template, form, {**tokens, **said}) for said in ({}, {"enable_thinking": False})
        )
    except ServingError:
        return False
    return unsaid != off or unsaid.rstrip().endswith("<think>")


def heeds_thinking(template: ChatTemplate, weights: Path) -> bool:
    """Whether setting enable_thinking changes the prompt that a template renders.

    Raises:
        ServingError: the template does not render.
    """
    tokens, form = _special_tokens(weights), content_form(template.text)
    on, off = (_render(template, form, {**tokens, "enable_thinking": said}) for said in (True, False))
    return on != off


def suggest_tool_choice(variant: Variant, flags: Mapping[str, Any]) -> str | None:
    """Say which config.env lines would make a server parse tool calls.

    Args:
        flags: the server's flags by name.

    Returns:
        The lines, as part of a sentence; None if the server parses tool calls already, or its model calls no tools.

    Raises:
        ServingError: the file of --chat-template cannot be read.
        CorpusError: a file of the checkpoint cannot be read.
        CorruptCheckpointError: a file is a git-lfs pointer or begins with a byte order mark.
    """
    if flags.get("enable-auto-tool-choice"):
        return None
    templates = served_templates(variant, flags).values()
    fitting = find_tool_parser(templates)
    if fitting is None:
        return None
    parser = flags.get("tool-call-parser") or fitting
    return f"VLLM_ENABLE_AUTO_TOOL_CHOICE=1 and VLLM_TOOL_CALL_PARSER={parser}"


def check_templates(
    templates: Mapping[str, ChatTemplate],
    weights: Path,
    arguments: Mapping[str, Any],
    given_form: str = "auto",
) -> None:
    """Check that the default template renders a chat of three messages, with thinking on and off.

    Args:
        templates: templates by name, from `served_templates`; without one named "default" nothing is checked.
        weights: the checkpoint folder, whose tokenizer_config.json names the special tokens.
        arguments: template variables that the server sets if a request does not.
        given_form: value of --chat-template-content-format.

    Raises:
        ServingError: the special tokens are unreadable, or a template does not render or leaves out a message.
        CorpusError: a template begins with a byte order mark.
    """
    tokens = _special_tokens(weights)
    if template := templates.get("default"):
        refuse_mark(template)
        for thinking in (True, False):
            _check_template(template, given_form, {**tokens, "enable_thinking": thinking, **arguments})


def _special_tokens(weights: Path) -> dict[str, str]:
    """The special tokens that transformers gives to a template, by name; older saves have objects for them."""
    tokens: dict[str, str] = {}
    for file in (weights / "special_tokens_map.json", weights / "tokenizer_config.json"):
        if file.name == "special_tokens_map.json" and not file.is_file():
            continue
        try:
            settings = json.loads(file.read_text(encoding="utf-8"))
            for name, value in settings.items():
                if name.endswith("_token") and value:
                    tokens[name] = value["content"] if isinstance(value, Mapping) else value
        except (OSError, ValueError, AttributeError, LookupError) as error:
            raise ServingError(
                f"{file} cannot be read ({error}); make or download the checkpoint anew"
            ) from None
    return tokens


def _check_template(template: ChatTemplate, given_form: str, variables: Mapping[str, Any]) -> None:
    try:
        _render(template, "string" if given_form == "auto" else given_form, variables)
    except ServingError:
        # Slow to find out, so only where the form that most templates take does not pass.
        if given_form != "auto" or content_form(template.text) != "openai":
            raise
        _render(template, "openai", variables)


def _render(template: ChatTemplate, form: str, variables: Mapping[str, Any]) -> str:
    # Slow to import, and only needed here.
    from transformers.utils.chat_template_utils import render_jinja_template

    contents = [[{"type": "text", "text": text}] if form == "openai" else text for text in _MESSAGES]
    roles = ("user", "assistant", "user")
    chat = [{"role": role, "content": content} for role, content in zip(roles, contents, strict=True)]
    try:
        (text,), _ = render_jinja_template(
            [chat], chat_template=template.text, add_generation_prompt=True, **variables
        )
    # Templates raise exceptions of any type.
    except Exception as error:
        line = getattr(error, "lineno", None)
        location = f"{template.file}, line {line}" if line else str(template.file)
        raise ServingError(
            f"chat template {location} does not render a chat of user, assistant and user with enable_thinking="
            f"{variables.get('enable_thinking', 'unset')}: {error}; correct the template, or in config.env "
            "VLLM_CHAT_TEMPLATE or VLLM_DEFAULT_CHAT_TEMPLATE_KWARGS"
        ) from None
    missing = [message for message in _MESSAGES if message not in text]
    if missing:
        raise ServingError(
            f"chat template {template.file} leaves out the message {missing[0]!r} of a test chat; correct the template"
        )
    return str(text)
