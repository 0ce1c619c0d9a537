"""The file of sampled outputs beside a checkpoint: the stage `sample_outputs` writes it, later stages read it."""

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from slimqwen.text.files import CorpusError, read_json_lines

OUTPUTS = "sampled_outputs.jsonl"


@dataclass(frozen=True)
class Output:
    """A prompt and its continuation by the checkpoint's own model, in token ids; held-out ones are for measuring."""

    prompt: tuple[int, ...]
    continuation: tuple[int, ...]
    held_out: bool


def read_outputs(folder: Path) -> Iterator[Output]:
    """Read the continuations beside a checkpoint, the held-out ones first.

    Raises:
        CorpusError: the checkpoint has none.
    """
    file = folder / OUTPUTS
    if not file.is_file():
        raise CorpusError(f"{folder} has no {OUTPUTS}; put the stage sample_outputs before this one")
    with file.open("rb") as lines:
        for _, row in read_json_lines(lines, file):
            yield Output(tuple(row["prompt"]), tuple(row["continuation"]), row["held_out"])
