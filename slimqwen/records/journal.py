"""Journal of an unfinished run: its answers so far, from which the same command continues."""

import hashlib
import io
import json
import os
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from slimqwen import checkpoint
from slimqwen.errors import SlimqwenError
from slimqwen.file_lock import take_lock
from slimqwen.records import provenance
from slimqwen.serving.command import ServerCommand
from slimqwen.text.files import read_json_lines


class RunInProgressError(SlimqwenError):
    """Another process runs the same measurement."""


class Journal:
    """Answers by request; each is appended to a file at once."""

    def __init__(self, file: Path, stream: io.FileIO, answers: Mapping[str, Any]) -> None:
        self._file, self._stream, self._answers = file, stream, answers
        self._added: dict[str, Any] = {}
        self._reused: set[str] = set()

    def __len__(self) -> int:
        return len(self._answers) + len(self._added)

    @property
    def reused(self) -> int:
        """Number of answers of an earlier run that were used."""
        return len(self._reused)

    def get(self, request: Any) -> Any | None:
        """The answer of an earlier run or of this one; None if there is none.

        Args:
            request: everything that decides the answer, as JSON.
        """
        key = _digest(request)
        if key in self._answers:
            self._reused.add(key)
        return self._answers.get(key, self._added.get(key))

    def add(self, request: Any, answer: Any) -> None:
        """Append an answer, which `get` returns for the same request from now on; both as JSON."""
        key = _digest(request)
        line = json.dumps([key, answer], ensure_ascii=False) + "\n"
        self._stream.write(line.encode())
        self._added[key] = answer

    def answer(self, request: Any, make: Callable[[], Any]) -> Any:
        """The answer of `get`; where there is none, that of `make`, which is added."""
        answer = self.get(request)
        if answer is None:
            answer = make()
            self.add(request, answer)
        return answer

    def discard(self) -> None:
        """Delete the file, once the run has its record."""
        self._file.unlink(missing_ok=True)


def journal_file(kind: str, command: ServerCommand, *inputs: Any) -> Path:
    """The file of a run's journal: one for each checkpoint, flags, versions, hardware and inputs.

    Args:
        command: command that serves the variant; its port does not matter.
        inputs: what else decides an answer, as JSON.
    """
    variant = command.variant
    parts = [
        inputs,
        checkpoint.digest(variant.weights),
        provenance.portable(provenance.deciding(command.flags), variant.root),
        provenance.redacted(command.environment),
        provenance.package_versions(),
        provenance.hardware().as_json(),
    ]
    return variant.root / ".cache" / kind / f"{variant.name}_{_digest(parts)[:16]}.jsonl"


@contextmanager
def locked(file: Path) -> Iterator[Journal]:
    """Open a journal for this process alone.

    Args:
        file: made if missing; an incomplete last line, left by a process that died, is dropped.

    Raises:
        RunInProgressError: another process has it open.
    """
    file.parent.mkdir(parents=True, exist_ok=True)
    file.touch()
    with io.FileIO(file, "r+") as stream:
        if not take_lock(stream, file):
            raise RunInProgressError(
                f"another process runs the same measurement ({file.parent.name}/{file.name}); wait for its end"
            )
        if not file.exists() or file.stat().st_ino != os.fstat(stream.fileno()).st_ino:
            raise RunInProgressError(
                f"another process has just ended the same measurement ({file.name}); look for its record"
            )
        content = stream.readall()
        complete_lines = content[: content.rfind(b"\n") + 1]
        stream.seek(len(complete_lines))
        stream.truncate()
        responses = (pair for _, pair in read_json_lines(io.BytesIO(complete_lines), file))
        yield Journal(file, stream, dict(responses))


def _digest(value: Any) -> str:
    text = json.dumps(value, sort_keys=True, ensure_ascii=False, default=str)
    return hashlib.sha256(text.encode()).hexdigest()
