"""Removal of secrets from text: values of variables and flags with secret names, credentials in URLs."""

import re
from collections.abc import Iterator, Sequence

REDACTED = "<redacted>"

_VARIABLE = re.compile(r"KEY|TOKEN|SECRET|PASSWORD|CREDENTIAL", re.IGNORECASE)
_FLAG = re.compile(r"(?:^|-)(?:key|token|secret|password)$")
_GIVEN = re.compile(r"(?:--(?P<flag>[\w-]+)|(?P<variable>[A-Z_][A-Z0-9_]*))=")
_IN_ADDRESS = re.compile(
    r"(?<=://)[^/?#\s]+(?=@)|(?P<query>[?&][\w.-]*(?:key|token|secret|password)=)[^&\s]+", re.IGNORECASE
)


def names_variable(name: str) -> bool:
    """Whether an environment variable of this name holds a secret."""
    return _VARIABLE.search(name) is not None


def names_flag(name: str) -> bool:
    """Whether a flag of this name, without dashes, holds a secret (max-num-batched-tokens and ssl-keyfile do not)."""
    return _FLAG.search(name) is not None


def text(original: str) -> str:
    """Remove credentials from URLs: http://name:password@host, …?password=…."""
    return _IN_ADDRESS.sub(lambda match: f"{match['query'] or ''}{REDACTED}", original)


def command(words: Sequence[str]) -> list[str]:
    """Replace the secrets in the words of a command; the number of words stays."""
    return list(_command(words))


def _command(words: Sequence[str]) -> Iterator[str]:
    before = ""
    for word in words:
        given = _GIVEN.match(word)
        if before.startswith("--") and names_flag(before[2:]) and not word.startswith("--"):
            yield REDACTED
        elif given and (names_flag(given["flag"] or "") or names_variable(given["variable"] or "")):
            yield f"{given[0]}{REDACTED}"
        else:
            yield text(word)
        before = word
