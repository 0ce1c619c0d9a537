"""The text on which stages measure activations."""

import random
from pathlib import Path
from typing import Annotated, Any

from pydantic import Field

from slimqwen.text.chats import read_texts
from slimqwen.text.corpus import END_OF_TEXT, TextSource
from slimqwen.text.files import CorpusError


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
        """Number of tokens to read of text that the model itself writes; 0 for any other text."""
        return self.sequences * self.length if self.is_own else 0


def unread(corpus: Any) -> Any:
    """Make the fields of a text valid although a recipe names no path, for a stage that will not read the text.

    Args:
        corpus: the fields as a mapping. It gets the path "unread" if it has none; anything else is returned unchanged.
    """
    return {**corpus, "path": corpus.get("path") or "unread"} if isinstance(corpus, dict) else corpus


def calibration_documents(corpus: CalibrationText, source: Path) -> list[str]:
    """Documents of the calibration text, in a seeded random order, each with the end-of-text token behind it.

    Args:
        source: checkpoint whose templates render chats, and beside which the model's own text lies.

    Raises:
        CorpusError: the file cannot be read, a document is neither text nor chat, or a chat cannot be rendered.
    """
    documents = [text + END_OF_TEXT for text in read_texts(corpus.file(source), source)]
    random.Random(corpus.seed).shuffle(documents)
    return documents


def calibration_sequences(corpus: CalibrationText, source: Path, tokenizer: Any) -> list[list[int]]:
    """The calibration text's documents, joined and cut into sequences of equal length: token ids of each.

    Args:
        source: checkpoint whose templates render chats, and beside which the model's own text lies.
        tokenizer: the checkpoint's tokenizer.

    Raises:
        CorpusError: the text is missing, malformed or too short.
    """
    needed = corpus.sequences * corpus.length
    tokens: list[int] = []
    for document in calibration_documents(corpus, source):
        tokens += tokenizer(document, add_special_tokens=False)["input_ids"]
        if len(tokens) >= needed:
            starts = range(0, needed, corpus.length)
            return [tokens[start : start + corpus.length] for start in starts]
    raise CorpusError(
        f"the calibration text {corpus.path} has {len(tokens)} tokens, but {corpus.sequences} sequences of "
        f"{corpus.length} need {needed}; add text or ask for fewer sequences"
    )
