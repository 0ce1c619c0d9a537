"""Log of the starts that had a plan: .cache/starts.jsonl, a JSON object per line with planned and actual facts."""

from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from slimqwen.errors import SlimqwenError

FILE = Path(".cache") / "starts.jsonl"
"""Relative to the repository, in which servers run; an image's user may write there."""


class StartLogError(SlimqwenError):
    """The log of starts cannot be read."""


class Start(BaseModel):
    """One start of a server that had a plan."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    time: str = Field(description="UTC, to the second")
    variant: str
    plan: str = Field(description="the plan's vLLM and device")
    required: bool = Field(description="whether the server ends where a fact differs")
    planned: dict[str, Any] = Field(description="value of each fact by name")
    actual: dict[str, Any] = Field(description="of the started engine; empty where it could not be asked")
    differences: list[str]


def utc_now() -> str:
    """The present time as in records."""
    return datetime.now(UTC).strftime("%Y-%m-%dT%H:%M:%SZ")


def append(start: Start, file: Path = FILE) -> None:
    """Add a start to the log, by one write, so that servers that start at the same time do not mix their lines.

    Raises:
        OSError: the file cannot be written.
    """
    file.parent.mkdir(parents=True, exist_ok=True)
    with file.open("ab", buffering=0) as log:
        log.write(start.model_dump_json().encode() + b"\n")


def read(file: Path) -> list[Start]:
    """The starts of a log, oldest first; none where there is no log.

    Raises:
        StartLogError: a line is damaged; the message names it.
    """
    if not file.is_file():
        return []
    starts = []
    for number, line in enumerate(file.read_text(encoding="utf-8").splitlines(), 1):
        try:
            starts.append(Start.model_validate_json(line))
        except ValidationError as error:
            reason = error.errors()[0]["msg"]
            raise StartLogError(f"{file}, line {number}: {reason}; remove that line") from None
    return starts
