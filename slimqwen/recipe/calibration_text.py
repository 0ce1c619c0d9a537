"""The text on which stages measure activations."""

import random
from pathlib import Path
from typing import Annotated, Any

from pydantic import Field

from slimqwen.text.chats import read_texts
from slimqwen.text.corpus import END_OF_TEXT, TextSource


class CalibrationText(TextSource):
    """The text on which activations are measured.

    Attributes:
        sequences: number of sequences.
        length: tokens per sequence, without padding.
    """

    sequences: Annotated[int, Field(ge=1)] = 64
    length: Annotated[int, Field(ge=16)] = 256

    @property
    def own_tokens(self) -> int:
        """Tokens that are read of the model's own text."""
        return self.sequences * self.length if self.is_own else 0


def unread(corpus: Any) -> Any:
    """The given fields of a text that a stage will not read, with a path in place of one that is not filled in."""
    return {**corpus, "path": corpus.get("path") or "unread"} if isinstance(corpus, dict) else corpus


def calibration_documents(corpus: CalibrationText, source: Path) -> list[str]:
    """Documents of the calibration text, in a seeded random order; raises as `read_texts`."""
    documents = [text + END_OF_TEXT for text in read_texts(corpus.file(source), source)]
    random.Random(corpus.seed).shuffle(documents)
    return documents
