"""Secrets out of what is written down or shown: values by the names they are given under, credentials in addresses."""

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
    """Whether an environment variable of that name holds a secret."""
    return _VARIABLE.search(name) is not None


def names_flag(name: str) -> bool:
    """Whether a flag of that name, without its dashes, holds a secret: not max-num-batched-tokens, nor ssl-keyfile."""
    return _FLAG.search(name) is not None


def text(said: str) -> str:
    """The same without the credentials in addresses: http://name:password@host, …?password=…."""
    return _IN_ADDRESS.sub(lambda found: f"{found['query'] or ''}{REDACTED}", said)


def command(words: Sequence[str]) -> list[str]:
    """A command's words without secrets, as many as there were."""
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
