"""Removal of secrets from text: values of variables and flags with secret names, credentials in URLs."""

import itertools
import re
from collections.abc import Sequence

REDACTED = "<redacted>"

_VARIABLE = re.compile(r"KEY|TOKEN|SECRET|PASSWORD|CREDENTIAL", re.IGNORECASE)
_FLAG = re.compile(r"(?:^|-)(?:key|token|secret|password)$")
_ASSIGNMENT = re.compile(r"(?:--(?P<flag>[\w-]+)|(?P<variable>[A-Z_][A-Z0-9_]*))=")
_URL_SECRET = re.compile(
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
    return _URL_SECRET.sub(lambda match: f"{match['query'] or ''}{REDACTED}", original)


def command(words: Sequence[str]) -> list[str]:
    """Replace secrets in the words of a command line; the number of words stays the same."""
    redacted = []
    for previous, word in itertools.pairwise(["", *words]):
        match = _ASSIGNMENT.match(word)
        if previous.startswith("--") and names_flag(previous[2:]) and not word.startswith("--"):
            redacted.append(REDACTED)
        elif match and (names_flag(match["flag"] or "") or names_variable(match["variable"] or "")):
            redacted.append(f"{match[0]}{REDACTED}")
        else:
            redacted.append(text(word))
    return redacted
