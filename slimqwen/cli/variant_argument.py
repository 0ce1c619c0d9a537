"""Accepts a variant's name without its option: `slimqwen serve mine` is `slimqwen serve --variant mine`.

Likewise `slimqwen variant new mine --base tiny` is `slimqwen variant new --name mine --base tiny`.
"""

from collections.abc import Sequence
from typing import Any


def with_variant_option(command: Any, arguments: Sequence[str]) -> list[str]:
    """Insert `--variant` or `--name`, whichever the verb has, before the first word that is not an option.

    Args:
        command: the group of all verbs, as typer builds it.
        arguments: words of the command line.
    """
    words, at = list(arguments), 0
    while hasattr(command, "commands") and at < len(words) and words[at] in command.commands:
        command = command.commands[words[at]]
        at += 1
    options = {name: parameter for parameter in command.params for name in parameter.opts}
    takes_words = any(parameter.param_type_name == "argument" for parameter in command.params)
    option_of_name = next((name for name in ("--variant", "--name") if name in options), None)
    if takes_words or option_of_name is None or any(word.startswith(option_of_name) for word in words):
        return words
    while at < len(words):
        option = options.get(words[at])
        if not words[at].startswith("-"):
            return [*words[:at], option_of_name, *words[at:]]
        at += 1 if option is None or option.is_flag else 2
    return words
