"""Journal of an unfinished measurement: its results so far, from which the same command continues."""

import io
import json
import os
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from slimqwen.errors import SlimqwenError
from slimqwen.file_lock import describe_holders, take_lock
from slimqwen.identity import digest_of
from slimqwen.records import provenance
from slimqwen.records.record import Provenance
from slimqwen.records.reuse import inputs_of
from slimqwen.serving.command import ServerCommand
from slimqwen.text.files import read_json_lines


class RunInProgressError(SlimqwenError):
    """Another process is running the same measurement."""


class Journal:
    """Results of an unfinished measurement ("answers") by what was measured ("request").

    Each answer is appended to a file at once, so that a later run reuses it. Use `locked` to open a journal; the
    constructor is for `locked` alone.
    """

    def __init__(self, file: Path, stream: io.FileIO, answers: Mapping[str, Any]) -> None:
        self._file, self._stream, self._answers = file, stream, answers
        self._added: dict[str, Any] = {}
        self._reused: set[str] = set()

    def __len__(self) -> int:
        return len(self._answers) + len(self._added)

    @property
    def reused(self) -> int:
        """Number of answers that this run took from an earlier, interrupted run."""
        return len(self._reused)

    def get(self, request: Any) -> Any | None:
        """The answer to a request, from an earlier run or this one; None if there is none.

        Args:
            request: everything that affects the answer, as a value that JSON can hold.
        """
        key = digest_of(request)
        if key in self._answers:
            self._reused.add(key)
        return self._answers.get(key, self._added.get(key))

    def add(self, request: Any, answer: Any) -> None:
        """Append the answer to a request, both values that JSON can hold; from now on `get` returns it."""
        key = digest_of(request)
        line = json.dumps([key, answer], ensure_ascii=False) + "\n"
        self._stream.write(line.encode())
        self._added[key] = answer

    def answer(self, request: Any, make: Callable[[], Any]) -> Any:
        """Return the journal's answer to a request; if there is none, call `make` and add its result."""
        answer = self.get(request)
        if answer is None:
            answer = make()
            self.add(request, answer)
        return answer

    def discard(self) -> None:
        """Delete the file; to be called when the run has written its record."""
        self._file.unlink(missing_ok=True)


def journal_file(kind: str, command: ServerCommand, *inputs: Any) -> Path:
    """Path of a run's journal, named by a digest of checkpoint, flags, versions, hardware and inputs.

    Args:
        kind: name of the folder in .cache/ that holds such journals.
        command: command that serves the variant; its port does not matter.
        inputs: everything else that affects an answer, as values that JSON can hold.
    """
    variant = command.variant
    present = Provenance.model_construct(**provenance.of_present(command))
    return (
        variant.root
        / ".cache"
        / kind
        / f"{variant.name}_{digest_of([inputs, inputs_of(present)])[:16]}.jsonl"
    )


@contextmanager
def locked(file: Path) -> Iterator[Journal]:
    """Open a journal, locked for this process, for a `with` block.

    Args:
        file: made if missing; an incomplete last line, left by a process that died, is dropped.

    Raises:
        RunInProgressError: another process has the journal open.
    """
    file.parent.mkdir(parents=True, exist_ok=True)
    file.touch()
    with io.FileIO(file, "r+") as stream:
        if not take_lock(stream, file):
            raise RunInProgressError(
                f"another process{describe_holders(file)} runs the same measurement ({file.parent.name}/{file.name}); "
                "wait until it ends"
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
