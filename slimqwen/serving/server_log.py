"""Finds in a log of vLLM why it failed."""

import re
from pathlib import Path

_PREFIX = re.compile(r"^\(\w+(?: pid=\d+)?\) [A-Z]+ \S+ \S+ \[[^\]]*\] ?")
"""Beginning of a log line: process, level, time and source line."""

_ERROR = re.compile(
    r"(?:[\w.]+\.)?\w*(?:Error|Exception)(?:: .*)?$|error: (?P<refusal>.*)$|.* died unexpectedly"
)
"""Text of an error: the last line of a traceback, a refusal by this package, or the death of a worker."""

_CONSEQUENCE = re.compile(
    r"Engine(?:Dead|Died)Error|CancelledError|Worker failed with error|root cause|the engine died"
)
"""Error that another error caused: vLLM's processes, and the warm-up, log that a process on which they rely failed."""


def find_last_cause(log: Path) -> str | None:
    """Find the last root cause among the errors in a log of vLLM, as one line; None if the log has no error."""
    errors = []
    for line in log.read_text(encoding="utf-8", errors="replace").splitlines():
        text = _PREFIX.sub("", line).strip()
        if found := _ERROR.match(text):
            errors.append(found["refusal"] or text)
    causes = [error for error in errors if not _CONSEQUENCE.search(error)]
    return (causes or errors or [None])[-1]
