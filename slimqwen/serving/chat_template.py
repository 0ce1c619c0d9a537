"""Check of a chat template before the start: vLLM would find its faults only at the first request."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from slimqwen.serving.errors import ServingError

_MESSAGES = ("What is the first?", "It is this.", "And the second?")


def check(file: Path, weights: Path, arguments: Mapping[str, Any]) -> None:
    """Render a chat of three turns by a template, with thinking on and off.

    Args:
        weights: the checkpoint folder, whose tokenizer_config.json names the special tokens.
        arguments: template variables that the server sets where a request does not.

    Raises:
        ServingError: a file is unreadable, or the template does not render or leaves out a message.
    """
    # Heavy, and only needed here.
    from jinja2 import TemplateError
    from transformers.utils.chat_template_utils import render_jinja_template

    try:
        template = file.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ServingError(f"chat template {file} cannot be read ({error}); correct its path") from None
    try:
        settings = json.loads((weights / "tokenizer_config.json").read_text(encoding="utf-8"))
        tokens = {name: value for name, value in settings.items() if name.endswith("_token")}
    except (OSError, ValueError, AttributeError) as error:
        raise ServingError(
            f"{weights / 'tokenizer_config.json'} cannot be read ({error}); make or download the checkpoint anew"
        ) from None
    roles = ("user", "assistant", "user")
    chat = [{"role": role, "content": message} for role, message in zip(roles, _MESSAGES, strict=True)]
    for thinking in (True, False):
        variables = {**tokens, "enable_thinking": thinking, **arguments}
        try:
            (text,), _ = render_jinja_template(
                [chat], chat_template=template, add_generation_prompt=True, **variables
            )
        except (TemplateError, TypeError, ValueError) as error:
            line = getattr(error, "lineno", None)
            location = f"{file}, line {line}" if line else str(file)
            raise ServingError(f"chat template {location} does not render: {error}; correct it") from None
        missing = [message for message in _MESSAGES if message not in text]
        if missing:
            raise ServingError(f"chat template {file} leaves out the message {missing[0]!r}; correct it")
