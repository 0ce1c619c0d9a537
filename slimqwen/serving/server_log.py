"""Why vLLM failed, by its log."""

import re
from pathlib import Path

_PREFIX = re.compile(r"^\(\w+(?: pid=\d+)?\) [A-Z]+ \S+ \S+ \[[^\]]*\] ?")
"""Process, level, time and place of a line."""

_ERROR = re.compile(
    r"(?:[\w.]+\.)?\w*(?:Error|Exception)(?:: .*)?$|error: (?P<refusal>.*)$|.* died unexpectedly"
)
"""The last line of a traceback, a refusal of this package, a killed worker."""

_CONSEQUENCE = re.compile(
    r"Engine(?:Dead|Died)Error|CancelledError|Worker failed with error|root cause|the engine died"
)
"""An error that another one caused: each process of vLLM logs that the one below it failed, and so does the warm-up."""


def find_last_cause(log: Path) -> str | None:
    """The last error in a log of vLLM that no other error caused, in one line; None without an error."""
    errors = []
    for line in log.read_text(encoding="utf-8", errors="replace").splitlines():
        text = _PREFIX.sub("", line).strip()
        if found := _ERROR.match(text):
            errors.append(found["refusal"] or text)
    causes = [error for error in errors if not _CONSEQUENCE.search(error)]
    return (causes or errors or [None])[-1]
