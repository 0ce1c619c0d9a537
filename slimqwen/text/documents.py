"""Documents in files that a user names: texts, chats and prompts, with the place of each, counted by style."""

import json
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO, Any, Final, Literal, get_args

from slimqwen.text import chat_styles
from slimqwen.text.files import CorpusError, file_format, list_files, not_utf8, open_bytes, read_lines
from slimqwen.text.tables import Faults, TextRow, read_rows

Division = Literal["blocks", "paragraphs", "lines", "whole"]
"""What a document of a .txt file is: 8 KiB to the end of a line; what empty lines divide; a line; the file."""

DIVISIONS: Final = get_args(Division)
_BLOCK_BYTES = 2**13
_BYTES_AFTER_FAULT = 2**24
"""How far a file is searched for further faults after its first."""


@dataclass(frozen=True)
class Document:
    """One document: a text, a chat or a prompt.

    Attributes:
        location: file and line, for messages.
        style: what it was understood as, such as "ShareGPT chat".
        position: approximate bytes of the file before it; for a parquet file, rows.
        messages, tools: a chat and its tools, in the form that chat templates take.
        prompt: text to be continued.
    """

    location: str
    style: str = "text"
    position: int = 0
    id: str | None = None
    text: str | None = None
    messages: list[Any] | None = None
    tools: Any = None
    prompt: str | None = None

    @property
    def is_blank(self) -> bool:
        """Whether the document holds nothing but white space."""
        return not (self.messages or (self.text or "").strip() or (self.prompt or "").strip())


@dataclass
class Understanding:
    """Counts of what a file or folder holds, made while it is read, so that a user sees how it was understood.

    Attributes:
        styles: number of documents by style, such as "ShareGPT chat".
        empty: number of documents that hold nothing.
        first_empty: locations of the first of them.
        files: number of files that are read.
        left_out: names of a folder's files that are not read.
        division: how .txt files are divided; None if there is none.
    """

    styles: Counter[str] = field(default_factory=Counter)
    empty: int = 0
    first_empty: list[str] = field(default_factory=list)
    files: int = 1
    left_out: list[str] = field(default_factory=list)
    division: Division | None = None
    example: str = ""

    def add(self, document: Document) -> None:
        """Count a document."""
        if document.is_blank:
            self.empty += 1
            self.first_empty += [document.location] if len(self.first_empty) < 3 else []
        else:
            self.styles[document.style] += 1

    def describe(self) -> str:
        """One line for a user, such as "1,000 ShareGPT chats, 500 OpenAI chats; 3 left out, for they are empty: …"."""
        found = [f"{count:,} {style}{'s' if count != 1 else ''}" for style, count in self.styles.items()]
        line = ", ".join(found) or "nothing"
        line += f" in {self.files:,} files" if self.files > 1 else ""
        if self.division:
            line += f" (.txt divided by {_DIVISION_WORDS[self.division]})"
        if self.empty:
            names = [
                Path(place.rpartition(", ")[0]).name + ", " + place.rpartition(", ")[2]
                for place in self.first_empty
            ]
            more = "; …" if self.empty > len(names) else ""
            line += f"; {self.empty:,} left out, for {'they are' if self.empty > 1 else 'it is'} empty: "
            line += "; ".join(names) + more
        if self.left_out:
            more = ", …" if len(self.left_out) > 3 else ""
            line += f"; {len(self.left_out):,} files not read: {', '.join(self.left_out[:3])}{more}"
        return line


_DIVISION_WORDS: Final = {
    "blocks": "blocks of 8 KiB to the end of a line",
    "paragraphs": "empty lines",
    "lines": "lines",
    "whole": "files",
}


def read_documents(
    path: Path,
    division: Division = "blocks",
    understanding: Understanding | None = None,
    *,
    goes_on: bool = False,
) -> Iterator[Document]:
    """Yield the documents of a file or of a folder's files, blank ones too.

    Files are .jsonl, .json, .csv, .tsv, .parquet or .txt. After the first fault no document is yielded (unless
    `goes_on`), but the rest is read to find all faults.

    Args:
        path: a file or a folder.
        division: how .txt files are divided: into blocks of 8 KiB, paragraphs (at empty lines), lines, or not (whole).
        understanding: counts to fill while reading; None for none.
        goes_on: whether to yield the valid documents after a fault, too, so that they can be counted.

    Raises:
        CorpusError: a file cannot be read, or documents are malformed; the message lists all faults with their lines.
    """
    understanding = Understanding() if understanding is None else understanding
    files, left_out = list_files(path)
    understanding.files, understanding.left_out = len(files), [each.name for each in left_out]
    if any(file_format(file) == ".txt" for file in files):
        understanding.division = division
    faults = Faults()
    for file in files:
        for document in _documents_of(file, division, faults, goes_on=goes_on):
            understanding.add(document)
            yield document
        if faults.is_full:
            break
    if faults:
        raise faults.error()


def _documents_of(file: Path, division: Division, faults: Faults, *, goes_on: bool) -> Iterator[Document]:
    """The documents of a file before the first fault, or all sound ones."""
    if file_format(file) == ".txt":
        if not faults:
            with open_bytes(file) as stream:
                yield from _divide(stream, file, division)
        return
    first_fault: int | None = None
    for row in read_rows(file, chat_styles.COLUMNS):
        try:
            if row.fault is not None:
                raise ValueError(row.fault)
            document = _document(row)
        except ValueError as error:
            faults.add(row, str(error))
            first_fault = row.position if first_fault is None else first_fault
        else:
            if goes_on or not faults:
                yield document
        if faults.is_full or (first_fault is not None and row.position > first_fault + _BYTES_AFTER_FAULT):
            return


def _document(row: TextRow) -> Document:
    if row.unit == "row" and not set(row.content) - {"id", "tools"}:
        return Document(row.location, position=row.position, text="")  # its columns are null
    content = chat_styles.read_content(row.content)
    id_ = row.content.get("id")
    return Document(
        row.location,
        content.style,
        row.position,
        None if id_ is None else str(id_),
        text=content.text,
        messages=content.messages,
        tools=content.tools,
        prompt=content.prompt,
    )


def _divide(stream: IO[bytes], file: Path, division: Division) -> Iterator[Document]:
    """The documents of a .txt file."""
    held: list[bytes] = []
    size, line, position = 0, 1, 0

    def document() -> Document:
        text = _decode_text(b"".join(held), file, is_first=position == 0, line=line)
        return Document(f"{file}, line {line}", position=position, text=text)

    for each in read_lines(stream, file):
        held.append(each)
        size += len(each)
        is_end = {
            "blocks": size > _BLOCK_BYTES,
            "paragraphs": not each.strip(),
            "lines": True,
            "whole": False,
        }[division]
        if size > 2**26:
            raise CorpusError(
                f"{file}: a document is longer than {2**26:,} bytes; divide it by empty lines or lines"
            )
        if is_end:
            if division == "blocks" or b"".join(held).strip():
                yield document()
            line += len(held)
            position, size = position + size, 0
            held.clear()
    if held:
        yield document()


def _decode_text(block: bytes, file: Path, *, is_first: bool, line: int) -> str:
    """Decode a block of a .txt file that begins at line number `line`."""
    try:
        if (nul := block.find(b"\0")) >= 0:  # as in UTF-16 without a byte order mark
            raise UnicodeDecodeError("utf-8", block, nul, nul + 1, "a NUL character")
        text = block.decode("utf-8-sig" if is_first else "utf-8")
    except UnicodeDecodeError as error:
        number = line + block.count(b"\n", 0, error.start)
        raise CorpusError(f"{file}, line {number}: {not_utf8(error)}") from None
    if is_first:
        try:
            is_json = isinstance(json.loads(text.lstrip().partition("\n")[0]), dict)
        except (ValueError, RecursionError):
            is_json = False
        if is_json:
            raise CorpusError(f"{file}, line 1: a JSON object instead of text; name the file .jsonl")
    return text.replace("\r\n", "\n").replace("\r", "\n")
