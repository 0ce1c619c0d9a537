"""Check of a chat template before the start: vLLM would only find its faults with the first request."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from slimqwen.serving.errors import ServingError

_CHAT = ("What is the first?", "It is this.", "And the second?")


def check(file: Path, weights: Path, arguments: Mapping[str, Any]) -> None:
    """Render a chat of three turns, with thinking on and off.

    Args:
        file: the template.
        weights: the checkpoint folder, whose tokenizer_config.json names the special tokens.
        arguments: that the server gives to the template where a request does not.

    Raises:
        ServingError: it is no template for chats.
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
    chat = [{"role": role, "content": said} for role, said in zip(roles, _CHAT, strict=True)]
    for thinking in (True, False):
        given = {**tokens, "enable_thinking": thinking, **arguments}
        try:
            (text,), _ = render_jinja_template(
                [chat], chat_template=template, add_generation_prompt=True, **given
            )
        except (TemplateError, TypeError, ValueError) as error:
            line = getattr(error, "lineno", None)
            where = f"{file}, line {line}" if line else str(file)
            raise ServingError(f"chat template {where} does not render: {error}; mend it") from None
        missing = [said for said in _CHAT if said not in text]
        if missing:
            raise ServingError(f"chat template {file} leaves out what was said ({missing[0]!r}); mend it")
