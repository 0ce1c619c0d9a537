"""Rows of .jsonl, .json, .csv, .tsv and .parquet files, each with its place; a faulty row hides none after it."""

import codecs
import csv
import json
import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import IO, Any, NamedTuple

from slimqwen.text.files import (
    MOST_LINE_BYTES,
    CorpusError,
    file_format,
    not_utf8,
    open_bytes,
    parse_json,
    read_lines,
    without_nulls,
)

_MOST_FAULTS = 20
_MORE_BYTES = 2**20
_SEPARATORS = ",;\t|"
_SPACE = " \t\r\n"


class TextRow(NamedTuple):
    """A row of a file.

    Attributes:
        unit: "line", or "row" of a parquet file.
        number: line at which the row begins, or number of the row, from 1.
        position: bytes of the unpacked file before it; rows of a parquet file.
        content: the JSON value, or a cell by the name of its column.
        fault: cause and cure if the row cannot be read.
    """

    file: Path
    unit: str
    number: int
    position: int
    content: Any
    fault: str | None = None

    @property
    def location(self) -> str:
        """File and line, for an error message."""
        return f"{self.file}, {self.unit} {self.number}"


class Faults:
    """Faults of rows, gathered so that a user sees all of them at once; equal ones share a message."""

    def __init__(self) -> None:
        self._rows: dict[tuple[Path, str, str], list[int]] = {}

    def add(self, row: TextRow, fault: str) -> None:
        """Note the fault of a row."""
        self._rows.setdefault((row.file, row.unit, fault), []).append(row.number)

    @property
    def is_full(self) -> bool:
        """Whether there are 20 messages already, so that further ones would not help."""
        return len(self._rows) >= _MOST_FAULTS

    def __bool__(self) -> bool:
        return bool(self._rows)

    def error(self) -> CorpusError:
        """Make the error that lists all faults, a line each."""
        lines = [
            f"{file}, {name_numbers(unit, numbers)}: {fault}"
            for (file, unit, fault), numbers in self._rows.items()
        ]
        return CorpusError(*lines)


def name_numbers(unit: str, numbers: Sequence[int]) -> str:
    """Name the first three of these lines or rows in words, and how many more there are."""
    more = f" and {len(numbers) - 3:,} more" if len(numbers) > 3 else ""
    return f"{unit}{'s' if len(numbers) > 1 else ''} {', '.join(map(str, numbers[:3]))}{more}"


def find_table(folder: Path, name: str, is_wanted: Callable[[Path], bool] | None = None) -> Path:
    """Find the table called `name` in a folder, in any format; if there is none, the path of `name`.jsonl.

    Args:
        is_wanted: function that decides by its name whether a file counts; None for `is_table`.

    Raises:
        CorpusError: the folder has several such files.
    """
    is_wanted = is_wanted or is_table
    found = [file for file in sorted(folder.glob(f"{name}.*")) if file.is_file() and is_wanted(file)]
    if len(found) > 1:
        names = " and ".join(file.name for file in found)
        raise CorpusError(
            f"{folder} has {names}; keep the one that holds the {name}, and move the other away"
        )
    return found[0] if found else folder / f"{name}.jsonl"


def is_table(file: Path) -> bool:
    """Whether a file ends in one of the formats that have rows: all but .txt."""
    return is_text(file) and file_format(file) != ".txt"


def is_text(file: Path) -> bool:
    """Whether a file's name ends in a format from which texts can be read."""
    try:
        file_format(file)
    except CorpusError:
        return False
    return True


def read_rows(file: Path, columns: Iterable[str]) -> Iterator[TextRow]:
    """Yield the rows of a file; those that cannot be parsed have a `fault`.

    Args:
        file: a file of any format but .txt.
        columns: names of the columns that a reader may want. Of a parquet file only these are read; without names, all.
            The separator of a .csv file is the one by which most of these names are found.

    Raises:
        CorpusError: the file cannot be read at all.
    """
    read: dict[str, Callable[[IO[bytes], Path, Sequence[str]], Iterator[TextRow]]] = {
        ".json": _json_values,
        ".csv": _csv_rows,
        ".tsv": _csv_rows,
        ".parquet": _parquet_rows,
    }
    form = file_format(file)
    with open_bytes(file) as stream:
        yield from read.get(form, _json_lines)(stream, file, tuple(columns))


def _json_lines(stream: IO[bytes], file: Path, _: Sequence[str]) -> Iterator[TextRow]:
    position = 0
    for number, line in enumerate(read_lines(stream, file), start=1):
        if line.strip():
            try:
                yield TextRow(file, "line", number, position, parse_json(line, is_first=position == 0))
            except ValueError as error:
                if position == 0 and line.lstrip(b"\xef\xbb\xbf \t")[:2].rstrip() in (b"{", b"[", b"[{"):
                    fault = (
                        "not JSON by itself, as if the file were one list or object; end its name in .json"
                    )
                    yield TextRow(file, "line", number, position, None, fault)
                    return
                yield TextRow(file, "line", number, position, None, str(error))
        position += len(line)


class _Buffer:
    """Text of a stream, decoded as far as it is needed."""

    def __init__(self, stream: IO[bytes]) -> None:
        self._stream, self._decode = stream, codecs.getincrementaldecoder("utf-8-sig")().decode
        self.text, self.at, self.line, self.bytes, self.is_whole = "", 0, 1, 0, False

    def grow(self) -> None:
        """Drop what was read, and decode as much again as is left, at least 1 MiB."""
        self.text, self.at = self.text[self.at :], 0
        data = self._stream.read(max(_MORE_BYTES, len(self.text)))
        self.is_whole = not data
        self.bytes += len(data)
        self.text += self._decode(data, not data)

    def skip(self, characters: str) -> None:
        """Move to the next character that is none of these, or to the end."""
        while True:
            rest = self.text[self.at : self.at + 256]
            self.move(self.at + len(rest) - len(rest.lstrip(characters)))
            if self.at == len(self.text) and not self.is_whole:
                self.grow()
            elif self.at == len(self.text) or not rest or self.text[self.at] not in characters:
                return

    def move(self, end: int) -> None:
        """Move to a position of `text`, and count the lines."""
        self.line += self.text.count("\n", self.at, end)
        self.at = end


def _json_values(stream: IO[bytes], file: Path, _: Sequence[str]) -> Iterator[TextRow]:
    """Values of a JSON list, or those that follow each other, as one object or one a line; each is read by itself."""
    buffer, decoder = _Buffer(stream), json.JSONDecoder()

    def fault(text: str, line: int) -> TextRow:
        return TextRow(file, "line", line, buffer.bytes, None, text)

    try:
        buffer.skip(_SPACE)
        is_list = buffer.text[buffer.at : buffer.at + 1] == "["
        buffer.move(buffer.at + is_list)
        while True:
            buffer.skip(f"{_SPACE}," if is_list else _SPACE)
            rest = buffer.text[buffer.at : buffer.at + 1]
            if is_list and rest == "]":
                buffer.move(buffer.at + 1)
                buffer.skip(_SPACE)
                if buffer.at < len(buffer.text):
                    yield fault("not JSON (text after the end of the list); remove it", buffer.line)
                return
            if not rest:
                if is_list:
                    yield fault("not JSON (the list has no end); fetch the file again", buffer.line)
                return
            try:
                value, end = decoder.raw_decode(buffer.text, buffer.at)
            except (json.JSONDecodeError, RecursionError) as error:
                if not buffer.is_whole and len(buffer.text) - buffer.at <= MOST_LINE_BYTES:
                    buffer.grow()
                    continue
                where = error.pos if isinstance(error, json.JSONDecodeError) else buffer.at
                line = buffer.line + buffer.text.count("\n", buffer.at, where)
                reason = error.msg if isinstance(error, json.JSONDecodeError) else error
                yield fault(f"not JSON ({reason}); correct it", line)
                return
            row = TextRow(file, "line", buffer.line, buffer.bytes, value)
            if "\\u" in buffer.text[buffer.at : end]:
                try:
                    json.dumps(value, ensure_ascii=False).encode()
                except ValueError as error:
                    row = row._replace(content=None, fault=f"not JSON ({error}); correct it")
            buffer.move(end)
            yield row
    except UnicodeDecodeError as error:
        line = buffer.line + buffer.text.count("\n", buffer.at) + error.object[: error.start].count(b"\n")
        yield fault(not_utf8(error), line)


class _Lines:
    """Decoded lines of a .csv file; counts lines and bytes."""

    def __init__(self, stream: IO[bytes], file: Path) -> None:
        self._lines, self._file, self.number, self.bytes = read_lines(stream, file), file, 0, 0

    def __iter__(self) -> Iterator[str]:
        return self

    def __next__(self) -> str:
        line = next(self._lines)
        self.number += 1
        try:
            text = line.decode("utf-8-sig" if not self.bytes else "utf-8")
        except UnicodeDecodeError as error:
            raise CorpusError(f"{self._file}, line {self.number}: {not_utf8(error)}") from None
        self.bytes += len(line)
        return text


def _csv_rows(stream: IO[bytes], file: Path, columns: Sequence[str]) -> Iterator[TextRow]:
    """Rows of a .csv or .tsv file whose first line names the columns."""
    csv.field_size_limit(MOST_LINE_BYTES)
    lines = _Lines(stream, file)
    first = next(lines, "")
    if said := re.match(r"sep=(.)\s*$", first):  # Excel writes it, and reads it as the separator
        first = next(lines, "")
    if first.count('"') % 2:  # a name that reaches over the end of the line
        first += next(lines, "")
    separator = said[1] if said else _separator(first, columns)
    header = _names(first, separator)
    if "\r" in first.rstrip("\r\n"):
        yield TextRow(
            file, "line", 1, 0, None, "lines end in a carriage return alone; save it with other line ends"
        )
        return
    doubled = sorted({name for name in header if name and header.count(name) > 1})
    if not set(header) & set(columns) or doubled:
        cause = (
            f"two columns {doubled[0]}"
            if doubled
            else f"the first line names {', '.join(header) or 'nothing'}"
        )
        cure = f"name the columns there, such as {', '.join(columns[:3])}"
        yield TextRow(file, "line", 1, 0, None, f"{cause}; {cure}")
        return
    reader = csv.reader(lines, delimiter=separator, strict=True)
    while True:
        number, position = lines.number + 1, lines.bytes
        try:
            cells = next(reader)
        except StopIteration:
            return
        except csv.Error as error:
            yield TextRow(file, "line", number, position, None, f"not CSV ({error}); correct its quotes")
            continue
        if not any(map(str.strip, cells)):
            continue
        if len(cells) != len(header):
            cause = f"{len(cells)} fields, but the first line has {len(header)}"
            cure = f"put fields that contain {separator!r} in double quotes"
            yield TextRow(file, "line", number, position, None, f"{cause}; {cure}")
            continue
        content = {name: cell for name, cell in zip(header, cells, strict=True) if name}
        yield TextRow(file, "line", number, position, content)


def _names(first: str, separator: str) -> list[str]:
    """The names of columns in the first line; none if it is not CSV."""
    try:
        return [name.strip().lower() for name in next(csv.reader([first], delimiter=separator), [])]
    except csv.Error:
        return []


def _separator(first: str, columns: Sequence[str]) -> str:
    """The separator by which the first line has most of the columns, else most fields."""

    def found(separator: str) -> tuple[int, int]:
        names = _names(first, separator)
        return len(set(names) & set(columns)), len(names)

    return max(_SEPARATORS, key=found)


def _parquet_rows(stream: IO[bytes], file: Path, columns: Sequence[str]) -> Iterator[TextRow]:
    import pyarrow  # type: ignore[import-untyped] # slow to import
    from pyarrow import parquet

    try:
        table = parquet.ParquetFile(stream)
        names = [name for name in table.schema_arrow.names if not columns or name.lower() in columns]
        if not names:
            known = ", ".join(table.schema_arrow.names)
            yield TextRow(file, "row", 1, 0, None, f"the columns are {known}; name one of them {columns[0]}")
            return
        number = 0
        for batch in table.iter_batches(batch_size=256, columns=names):
            for content in batch.to_pylist():
                number += 1
                row = {name.lower(): value for name, value in without_nulls(content).items()}
                yield TextRow(file, "row", number, number - 1, row)
    except pyarrow.ArrowException as error:
        reason = " ".join(str(error).split())[:200]
        raise CorpusError(f"{file}: not a parquet file ({reason}); fetch it again") from None
