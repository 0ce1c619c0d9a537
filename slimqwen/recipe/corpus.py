"""The text that a stage reads: of the embedded world, or of a file; and what decides it."""

from pathlib import Path
from typing import Annotated, Literal

from pydantic import Field, ValidationInfo, field_validator, model_validator

from slimqwen import checkpoint
from slimqwen.errors import SlimqwenError
from slimqwen.recipe.stage import Parameters, source_digest

_TINYWORLD = tuple(
    f"slimqwen.tinyworld.{module}"
    for module in ("documents", "instructions", "prose", "tasks", "tokenizer", "world")
)


class CorpusError(SlimqwenError):
    """A text is missing, malformed or too short."""


class TextSource(Parameters):
    """Where a stage's text comes from.

    Attributes:
        source: tinyworld generates documents of the embedded world's training distribution; file reads `path`.
        path: a .txt or .jsonl file, relative to the recipe.
        seed: of the generator.
    """

    source: Literal["tinyworld", "file"] = "tinyworld"
    # What the file holds enters the content key, not where it lies.
    path: Annotated[Path | None, Field(exclude=True)] = None
    seed: int = 0

    @field_validator("path")
    @classmethod
    def _relative_to_recipe(cls, path: Path | None, info: ValidationInfo) -> Path | None:
        return path and (info.context or {}).get("folder", Path()) / path

    @model_validator(mode="after")
    def _path_goes_with_file(self) -> "TextSource":
        if (self.source == "file") != (self.path is not None):
            raise ValueError("path goes with source: file, and only with it")
        return self


def digests(text: TextSource, name: str = "corpus") -> dict[str, str]:
    """The digest of the file, or of the code that with the seed decides the tiny world's text.

    Raises:
        CorpusError: the file cannot be read.
    """
    if text.path is None:
        return {f"{name}.{module}": source_digest(module) for module in _TINYWORLD}
    return {name: file_digest(text.path, name)}


def file_digest(path: Path, name: str) -> str:
    """SHA-256 of an outside input.

    Raises:
        CorpusError: it cannot be read.
    """
    try:
        return checkpoint.sha256(path)
    except OSError as error:
        raise CorpusError(f"{path}: cannot be read ({error.strerror}); put the {name} there") from None
