"""Corpora and what a document is, the same for every reader.

A document is one text of the embedded tiny world; one line of a .jsonl file; one row of a data set folder; or, of a
.txt file, 8 KiB up to the end of the line.
"""

import json
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import IO, TYPE_CHECKING, Annotated, Any, Literal

from pydantic import AfterValidator, BaseModel, ConfigDict, Field, ValidationInfo, model_validator

from slimqwen import tinyworld
from slimqwen.checkpoint.files import sha256
from slimqwen.errors import SlimqwenError

if TYPE_CHECKING:
    from slimqwen.tinyworld.documents import Document as TinyworldDocument

END_OF_TEXT = "<|endoftext|>"

_TINYWORLD_MODULES = ("documents", "instructions", "prose", "tasks", "tokenizer", "world")
"""The modules of slimqwen.tinyworld that decide its texts."""

_TXT_DOCUMENT_BYTES = 2**13
_FORM = 'give {"text": …} or {"messages": […]}'


class CorpusError(SlimqwenError):
    """A text is missing, malformed or too short."""


@dataclass(frozen=True)
class Document:
    """One document of a file or a data set; the reader takes the field that it can use.

    Attributes:
        position: where the document begins, for `TextFile.at` or `DataSet.at`.
        text: plain text.
        messages: a chat, in the form of chat templates.
        prompt: text to be continued.
    """

    position: int
    text: str | None = None
    messages: list[Any] | None = None
    prompt: str | None = None


def _relative_to_recipe(path: Path, info: ValidationInfo) -> Path:
    return Path((info.context or {}).get("folder", Path())) / path


RecipePath = Annotated[Path, AfterValidator(_relative_to_recipe)]
"""A path relative to the recipe. The file's content enters the content key, not its path: exclude the field."""


class TextSource(BaseModel):
    """The part of a stage's parameters that says where its text comes from.

    Attributes:
        source: tinyworld for documents of the embedded world's training distribution; file for `path`.
        path: .txt or .jsonl file, relative to the recipe.
        seed: seed of the generator.
    """

    model_config = ConfigDict(extra="forbid", frozen=True, validate_default=True)

    source: Literal["tinyworld", "file"] = "tinyworld"
    path: Annotated[RecipePath | None, Field(exclude=True)] = None
    seed: int = 0

    @model_validator(mode="after")
    def _path_goes_with_file(self) -> "TextSource":
        if (self.source == "file") != (self.path is not None):
            raise ValueError("path goes with source: file, and only with it")
        return self


def digests(source: TextSource, name: str = "corpus") -> dict[str, str]:
    """The digest of the file, or of the code that with the seed decides the tiny world's texts.

    Raises:
        CorpusError: the file cannot be read.
    """
    if source.path is not None:
        return {name: file_digest(source.path, name)}
    folder = Path(tinyworld.__file__).parent
    return {
        f"{name}.{tinyworld.__name__}.{module}": sha256(folder / f"{module}.py")
        for module in _TINYWORLD_MODULES
    }


def file_digest(path: Path, name: str) -> str:
    """SHA-256 of an input file that a recipe calls `name`.

    Raises:
        CorpusError: it cannot be read.
    """
    try:
        return sha256(path)
    except OSError as error:
        raise CorpusError(f"{path}: cannot be read ({error.strerror}); put the {name} there") from None


def texts(source: TextSource) -> Iterator[str]:
    """The texts of a source in their order; those of the tiny world never end.

    Raises:
        CorpusError: the file is missing or malformed.
    """
    if source.path is None:
        return (document.text for document in tinyworld_documents(source.seed))
    return file_texts(source.path)


def file_texts(path: Path) -> Iterator[str]:
    """The texts of a .txt or .jsonl file.

    Raises:
        CorpusError: the file is missing or malformed, or a document is a chat or a prompt.
    """
    file = TextFile(path)
    for document in file:
        if document.text is None:
            raise CorpusError(f'{file.location(document.position)}: no text in it; give {{"text": …}} a line')
        yield document.text


def tinyworld_documents(seed: int, mix: Mapping[str, float] | None = None) -> "Iterator[TinyworldDocument]":
    """Documents of the embedded world without end, none of them a test item.

    Args:
        seed: seed of the generator.
        mix: share of each kind of document; by default that of training on long sequences.
    """
    # The tokenizer module of the tiny world imports transformers.
    from slimqwen.tinyworld.documents import LONG_MIX, DocumentSampler
    from slimqwen.tinyworld.tasks import left_out_texts
    from slimqwen.tinyworld.world import World

    world = World()
    return DocumentSampler(world, left_out_texts(world), mix or LONG_MIX).stream(seed)


class TextFile:
    """A .txt file (8 KiB a document, to the end of the line) or a .jsonl file (an object a line).

    Iterating yields the documents that are not blank.

    Raises:
        CorpusError: the file is neither, or while iterating: it cannot be read or a document is malformed.
    """

    def __init__(self, path: Path) -> None:
        if path.suffix not in (".jsonl", ".txt"):
            raise CorpusError(f"{path}: neither .txt nor .jsonl nor a folder; convert it to one of them")
        self._path = path
        self._lines = path.suffix == ".jsonl"

    def __iter__(self) -> Iterator[Document]:
        try:
            with self._path.open("rb") as stream:
                position = 0
                while block := self._block(stream):
                    if block.strip() and (document := self._document(block, position)):
                        yield document
                    position += len(block)
        except OSError as error:
            raise CorpusError(
                f"{self._path}: cannot be read ({error.strerror or error}); put the text there"
            ) from None

    def at(self, position: int) -> Document:
        """The document that begins at a byte."""
        with self._path.open("rb") as stream:
            stream.seek(position)
            document = self._document(self._block(stream), position)
        assert document is not None
        return document

    def location(self, position: int) -> str:
        """File, and line of a .jsonl file, of a document for an error message."""
        if not self._lines:
            return str(self._path)
        with self._path.open("rb") as stream:
            number = stream.read(position).count(b"\n") + 1
        return f"{self._path}, line {number}"

    def _block(self, stream: IO[bytes]) -> bytes:
        return stream.readline() if self._lines else b"".join(stream.readlines(_TXT_DOCUMENT_BYTES))

    def _document(self, block: bytes, position: int) -> Document | None:
        try:
            text = block.decode()
            if not self._lines:
                return Document(position, text) if text.strip() else None
            content = json.loads(text)
        except UnicodeDecodeError as error:
            raise CorpusError(f"{self.location(position)}: not UTF-8 ({error.reason}); convert it") from None
        except ValueError as error:
            raise CorpusError(f"{self.location(position)}: not JSON ({error}); {_FORM} a line") from None
        return _checked(content, position, self.location)


class DataSet:
    """A folder of parquet or JSON files, read by the `datasets` library; the split `train` if the files name splits.

    Iterating yields the documents that are not blank.

    Args:
        path: the folder.
        cache: folder for the library's cache, so that the user's own cache does not keep a second copy.

    Raises:
        CorpusError: the folder is not a data set, or while iterating: a row is malformed.
    """

    def __init__(self, path: Path, cache: Path) -> None:
        import datasets

        datasets.disable_progress_bars()
        try:
            rows = datasets.load_dataset(str(path), split="train", cache_dir=str(cache))
        # The library raises whatever its readers raise.
        except Exception as error:
            reason = " ".join(str(error).split())
            raise CorpusError(
                f"{path}: not a data set ({reason}); put parquet or .jsonl files there"
            ) from None
        columns = [name for name in ("messages", "text") if name in rows.column_names]
        if not columns:
            raise CorpusError(f"{path}: its columns are {', '.join(rows.column_names)}; {_FORM}")
        self._path = path
        self._rows = rows.select_columns(columns[:1])

    def __iter__(self) -> Iterator[Document]:
        for number, row in enumerate(self._rows):
            if document := _checked(row, number, self.location):
                yield document

    def at(self, position: int) -> Document:
        """The document of a row."""
        document = _checked(self._rows[position], position, self.location)
        assert document is not None
        return document

    def location(self, position: int) -> str:
        """Folder and row of a document, for an error message."""
        return f"{self._path}, row {position}"


def _checked(content: Any, position: int, location: Callable[[int], str]) -> Document | None:
    """The document of a JSON object or a row; None if it is blank."""
    fields: dict[str, Any] = {}
    for name, kind in (("text", str), ("messages", list), ("prompt", str)):
        if isinstance(content, dict) and isinstance(content.get(name), kind):
            fields[name] = content[name]
    if not fields:
        raise CorpusError(f"{location(position)}: no text in it; {_FORM}")
    try:
        "".join(value for value in fields.values() if isinstance(value, str)).encode()
    except UnicodeEncodeError as error:
        raise CorpusError(f"{location(position)}: not UTF-8 ({error.reason}); mend or remove it") from None
    filled = {name: value for name, value in fields.items() if value and str(value).strip()}
    return Document(position, **filled) if filled else None
