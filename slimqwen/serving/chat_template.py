"""Check of a server's chat templates before the start, because vLLM finds their faults only at the first request."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from slimqwen.serving.errors import ServingError
from slimqwen.text.chats import ChatTemplate, read_chat_templates
from slimqwen.variant import Variant

_MESSAGES = ("What is the first?", "It is this.", "And the second?")


def served_templates(variant: Variant, flags: Mapping[str, Any]) -> dict[str, ChatTemplate]:
    """Chat templates that a variant's server uses, by name: the file of --chat-template, or those of the checkpoint.

    Raises:
        ServingError: the file of --chat-template cannot be read.
        CorpusError: a file of the checkpoint cannot be read.
    """
    if "chat-template" not in flags:
        return read_chat_templates(variant.weights)
    file = variant.root / flags["chat-template"]
    try:
        return {"default": ChatTemplate(file.read_text(encoding="utf-8"), file)}
    except (OSError, UnicodeDecodeError) as error:
        raise ServingError(f"chat template {file} cannot be read ({error}); correct its path") from None


def check_templates(
    templates: Mapping[str, ChatTemplate], weights: Path, arguments: Mapping[str, Any]
) -> None:
    """Render a chat of three messages, with thinking on and off, by the template that vLLM uses without tools.

    Args:
        weights: the checkpoint folder, whose tokenizer_config.json names the special tokens.
        arguments: template variables that the server sets if a request does not.

    Raises:
        ServingError: the special tokens are unreadable, or a template does not render or leaves out a message.
    """
    file = weights / "tokenizer_config.json"
    try:
        settings = json.loads(file.read_text(encoding="utf-8"))
        tokens = {name: value for name, value in settings.items() if name.endswith("_token")}
    except (OSError, ValueError, AttributeError) as error:
        raise ServingError(f"{file} cannot be read ({error}); make that checkpoint again") from None
    if template := templates.get("default"):
        for thinking in (True, False):
            _check_template(template, {**tokens, "enable_thinking": thinking, **arguments})


def _check_template(template: ChatTemplate, variables: Mapping[str, Any]) -> None:
    # Slow to import, and only needed here.
    from transformers.utils.chat_template_utils import render_jinja_template

    roles = ("user", "assistant", "user")
    chat = [{"role": role, "content": message} for role, message in zip(roles, _MESSAGES, strict=True)]
    try:
        (text,), _ = render_jinja_template(
            [chat], chat_template=template.text, add_generation_prompt=True, **variables
        )
    # Templates raise exceptions of any type.
    except Exception as error:
        line = getattr(error, "lineno", None)
        location = f"{template.file}, line {line}" if line else str(template.file)
        raise ServingError(f"chat template {location} does not render: {error}; correct it") from None
    missing = [message for message in _MESSAGES if message not in text]
    if missing:
        raise ServingError(
            f"chat template {template.file} leaves out the message {missing[0]!r} of a test chat; correct the template"
        )
