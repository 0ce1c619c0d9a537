"""A variant named without its option: `slimqwen serve mine` is `slimqwen serve --variant mine`."""

from collections.abc import Sequence
from typing import Any


def with_variant_option(command: Any, arguments: Sequence[str]) -> list[str]:
    """Words of a command line, with `--variant` before the first that is no option where the verb takes a variant.

    Args:
        command: the group of all verbs, as typer builds it.
    """
    words, at = list(arguments), 0
    while hasattr(command, "commands") and at < len(words) and words[at] in command.commands:
        command = command.commands[words[at]]
        at += 1
    options = {name: parameter for parameter in command.params for name in parameter.opts}
    takes_words = any(parameter.param_type_name == "argument" for parameter in command.params)
    if takes_words or "--variant" not in options or any(word.startswith("--variant") for word in words):
        return words
    while at < len(words):
        option = options.get(words[at])
        if not words[at].startswith("-"):
            return [*words[:at], "--variant", *words[at:]]
        at += 1 if option is None or option.is_flag else 2
    return words
