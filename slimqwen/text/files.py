"""Readers of the text files that a user names: .jsonl, .txt, and folders of parquet or JSON files.

Only a line feed ends a line, because JSON strings may hold the other characters at which str.splitlines ends one
(U+2028, form feed). A byte order mark at the beginning is skipped. Text that is not UTF-8 is refused with its line.
"""

import contextlib
import json
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

from slimqwen.errors import SlimqwenError

_TXT_DOCUMENT_BYTES = 2**13
_FORM = 'give {"text": …} or {"messages": […]}'


class CorpusError(SlimqwenError):
    """A text is missing, malformed or too short."""


@dataclass(frozen=True)
class Document:
    """One document of a file or a data set: a text, a chat or a prompt.

    Attributes:
        position: where the document begins: byte of a `TextFile`, row of a `DataSet`.
        messages, tools: a chat and its tools, in the form that chat templates take.
        prompt: text to be continued.
    """

    position: int
    id: str | None = None
    text: str | None = None
    messages: list[Any] | None = None
    tools: Any = None
    prompt: str | None = None

    @property
    def is_blank(self) -> bool:
        """Whether the document holds nothing but white space."""
        return not (self.messages or (self.text or "").strip() or (self.prompt or "").strip())


def read_json_lines(lines: Iterable[bytes], name: object) -> Iterator[tuple[int, Any]]:
    """Yield the byte position and the value of each line that is not blank; `name` names the file in errors.

    Raises:
        CorpusError: a line is not UTF-8 or not JSON.
    """
    position = 0
    for number, line in enumerate(lines, start=1):
        if line.strip():
            try:
                value = json.loads(line.decode("utf-8-sig" if position == 0 else "utf-8"))
                if b"\\u" in line:
                    json.dumps(value, ensure_ascii=False).encode()  # fails for a surrogate without its pair
            except UnicodeDecodeError as error:
                raise _not_utf8(name, number, error) from None
            except (ValueError, RecursionError) as error:
                raise CorpusError(
                    f"{name}, line {number}: not JSON ({error}); write one JSON object per line"
                ) from None
            yield position, value
        position += len(line)


class TextFile:
    """Reader of a .txt file (a document is 8 KiB, to the end of a line) or a .jsonl file (a document is a line).

    Iterating yields all documents, blank ones too.

    Raises:
        CorpusError: the file is neither; or, while iterating, it cannot be read or a document is malformed.
    """

    def __init__(self, path: Path) -> None:
        if path.suffix not in (".jsonl", ".txt"):
            raise CorpusError(f"{path}: neither .txt nor .jsonl; decompress or convert it")
        self.path = path

    def __iter__(self) -> Iterator[Document]:
        with reading(self.path), self.path.open("rb") as stream:
            yield from self._documents(stream, 0)

    def at(self, position: int) -> Document:
        """The document that begins at byte `position`."""
        with reading(self.path), self.path.open("rb") as stream:
            stream.seek(position)
            return next(self._documents(stream, position))

    def location(self, position: int) -> str:
        """File and line of a document, for an error message."""
        with self.path.open("rb") as stream:
            number = stream.read(position).count(b"\n") + 1
        return f"{self.path}, line {number}"

    def _documents(self, stream: IO[bytes], position: int) -> Iterator[Document]:
        if self.path.suffix == ".jsonl":
            for offset, content in read_json_lines(stream, self.path):
                yield _checked_document(content, position + offset, self)
            return
        line = 1
        while block := b"".join(stream.readlines(_TXT_DOCUMENT_BYTES)):
            text = _decode_text(block, self.path, is_first=position == 0, line=line)
            yield Document(position, text=text)
            position += len(block)
            line += block.count(b"\n")


class DataSet:
    """Reader of a folder of parquet or JSON files (the split `train` if file names give splits), by `datasets`.

    Iterating yields all documents, blank ones too. The library caches in the folder `cache`, not in the user's cache.

    Raises:
        CorpusError: the folder is not a data set; or, while iterating, a row is malformed.
    """

    def __init__(self, path: Path, cache: Path) -> None:
        import datasets

        datasets.disable_progress_bars()
        try:
            rows = datasets.load_dataset(str(path), split="train", cache_dir=str(cache))
        # The library raises whatever its readers raise.
        except Exception as error:
            reason = " ".join(str(error).split())[:300]
            raise CorpusError(
                f"{path}: not a data set ({reason}); put parquet or .jsonl files there"
            ) from None
        columns = [name for name in ("messages", "text") if name in rows.column_names][:1]
        if not columns:
            raise CorpusError(f"{path} has only the columns {', '.join(rows.column_names)}; {_FORM}")
        if columns == ["messages"] and "tools" in rows.column_names:
            columns.append("tools")
        self._path, self._rows = path, rows.select_columns(columns)

    def __iter__(self) -> Iterator[Document]:
        return (_checked_document(without_nulls(row), n, self) for n, row in enumerate(self._rows))

    def at(self, position: int) -> Document:
        """The document in row `position`."""
        return _checked_document(without_nulls(self._rows[position]), position, self)

    def location(self, position: int) -> str:
        """Folder and row of a document, for an error message."""
        return f"{self._path}, row {position}"


def without_nulls(value: Any) -> Any:
    """The same JSON without the keys whose value is null.

    In a parquet file every row has all keys, with null for those that the row lacks, such as other tools' arguments.
    """
    if isinstance(value, Mapping):
        return {key: without_nulls(part) for key, part in value.items() if part is not None}
    return [without_nulls(part) for part in value] if isinstance(value, list) else value


def _checked_document(content: Any, position: int, reader: TextFile | DataSet) -> Document:
    fields: dict[str, Any] = {}
    for name, kind in (("text", str), ("messages", list), ("prompt", str)):
        if isinstance(content, dict) and isinstance(content.get(name), kind):
            fields[name] = content[name]
    if not fields:
        raise CorpusError(f"{reader.location(position)}: neither a text nor a chat; {_FORM}")
    id_ = content.get("id")
    return Document(position, None if id_ is None else str(id_), tools=content.get("tools"), **fields)


def _decode_text(block: bytes, path: Path, *, is_first: bool, line: int) -> str:
    """Decode a block of a .txt file that begins at line number `line`."""
    try:
        if (nul := block.find(b"\0")) >= 0:  # as in UTF-16 without a byte order mark
            raise UnicodeDecodeError("utf-8", block, nul, nul + 1, "a NUL character")
        text = block.decode("utf-8-sig" if is_first else "utf-8")
    except UnicodeDecodeError as error:
        raise _not_utf8(path, line + block.count(b"\n", 0, error.start), error) from None
    with contextlib.suppress(ValueError, RecursionError):
        if is_first and isinstance(json.loads(text.lstrip().partition("\n")[0]), dict):
            raise CorpusError(f"{path}, line 1: a JSON object instead of text; name the file .jsonl")
    return text.replace("\r\n", "\n").replace("\r", "\n")


def _not_utf8(name: object, line: int, error: UnicodeDecodeError) -> CorpusError:
    return CorpusError(
        f"{name}, line {line}: not UTF-8 ({error.reason}); decompress it or convert it to UTF-8"
    )


@contextlib.contextmanager
def reading(path: Path) -> Iterator[None]:
    """Turn an OSError in the `with` block into a CorpusError about the file."""
    try:
        yield
    except OSError as error:
        raise CorpusError(
            f"{path}: cannot be read ({error.strerror or error}); put a readable file there"
        ) from None
