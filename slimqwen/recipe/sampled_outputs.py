"""Outputs of a checkpoint's own model, in a file beside it: `sample_outputs` writes them, later stages read them."""

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from slimqwen.text.files import CorpusError, read_json_lines

OUTPUTS = "sampled_outputs.jsonl"


@dataclass(frozen=True)
class Output:
    """One continuation by the target, in token ids."""

    prompt: tuple[int, ...]
    continuation: tuple[int, ...]
    held_out: bool


def read_outputs(folder: Path) -> Iterator[Output]:
    """The continuations beside a checkpoint, the held-out ones first.

    Raises:
        CorpusError: there are none.
    """
    file = folder / OUTPUTS
    if not file.is_file():
        raise CorpusError(f"{folder} has no {OUTPUTS}; put the stage sample_outputs before this one")
    with file.open("rb") as lines:
        for _, row in read_json_lines(lines, file):
            yield Output(tuple(row["prompt"]), tuple(row["continuation"]), row["held_out"])
