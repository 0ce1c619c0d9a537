"""What a run has found out that has not ended yet: the same command goes on from there."""

import fcntl
import hashlib
import io
import json
import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from slimqwen import checkpoint
from slimqwen.errors import SlimqwenError
from slimqwen.records import provenance
from slimqwen.serving.launch import ServerCommand


class RunInProgressError(SlimqwenError):
    """Another process is making the same run."""


class Answers:
    """Answers by request, each appended to a file the moment it comes."""

    def __init__(self, file: Path, stream: io.FileIO, answers: Mapping[str, Any]) -> None:
        self._file, self._stream, self._answers = file, stream, answers
        self._count = len(answers)
        self._taken: set[str] = set()

    def __len__(self) -> int:
        """How many are in the file."""
        return self._count

    @property
    def taken_over(self) -> int:
        """How many of an earlier run's were used."""
        return len(self._taken)

    def get(self, request: Any) -> Any | None:
        """What an earlier run was answered; None where it was not."""
        key = _key(request)
        if key in self._answers:
            self._taken.add(key)
        return self._answers.get(key)

    def keep(self, request: Any, answer: Any) -> None:
        """Add an answer; from here on it outlives this process.

        Args:
            request: all that decides the answer, as JSON.
            answer: what `get` shall return, as JSON.
        """
        line = json.dumps([_key(request), answer], ensure_ascii=False) + "\n"
        self._stream.write(line.encode())
        self._count += 1

    def discard(self) -> None:
        """Delete the file: the run has its record."""
        self._file.unlink(missing_ok=True)


def unfinished(kind: str, command: ServerCommand, *decides: Any) -> Path:
    """Where the answers of a run are until it ends: one file for each checkpoint, flags, versions, hardware and extent.

    Args:
        kind: of the record that it will make.
        command: what serves the variant; its port does not matter.
        decides: what else decides an answer, as JSON.
    """
    one = command.variant
    flags = {name: value for name, value in command.flags.items() if name not in ("host", "port")}
    everything = [
        decides,
        checkpoint.digest(one.weights),
        provenance.portable(flags, one.root),
        provenance.redacted(command.environment),
        provenance.package_versions(),
        provenance.hardware(),
    ]
    return one.root / ".cache" / kind / f"{one.name}_{_key(everything)[:16]}.jsonl"


@contextmanager
def kept(file: Path) -> Iterator[Answers]:
    """The answers in a file, which is this process's alone for the length of a `with` block.

    Args:
        file: made if missing; a last line that a dying process left incomplete is dropped.

    Raises:
        RunInProgressError: another process has it.
    """
    file.parent.mkdir(parents=True, exist_ok=True)
    file.touch()
    with io.FileIO(file, "r+") as stream:
        try:
            fcntl.flock(stream, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise RunInProgressError(
                f"another process is making the same run ({file.parent.name}/{file.name}); wait for its end"
            ) from None
        if not file.exists() or file.stat().st_ino != os.fstat(stream.fileno()).st_ino:
            raise RunInProgressError(
                f"another process has just ended the same run ({file.name}); look for its record"
            )
        content = stream.readall()
        whole = content[: content.rfind(b"\n") + 1]
        stream.seek(len(whole))
        stream.truncate()
        yield Answers(file, stream, dict(json.loads(line) for line in whole.splitlines()))


def _key(request: Any) -> str:
    return hashlib.sha256(
        json.dumps(request, sort_keys=True, ensure_ascii=False, default=str).encode()
    ).hexdigest()
