"""Files that a user names: found in a folder, opened plain or packed (.gz, .zst), read line by line.

Only a line feed ends a line, because JSON strings may hold the other characters at which str.splitlines ends one
(U+2028, form feed). A byte order mark at the beginning is skipped. Text that is not UTF-8 is refused with its line.
Everything is streamed: memory holds one line, or one batch of rows.
"""

import contextlib
import gzip
import io
import json
import zlib
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import IO, Any, Final

from slimqwen.checkpoint.stored_file import is_pointer
from slimqwen.errors import SlimqwenError

FORMATS: Final = (".jsonl", ".ndjson", ".json", ".csv", ".tsv", ".parquet", ".txt")
"""Endings of the files that are read; all but .parquet may have a further .gz or .zst."""

MOST_LINE_BYTES: Final = 2**26
"""Longest line or JSON record that is read, so that a file without line feeds does not fill the memory."""

_PACKED = (".gz", ".zst")
_UNCHECKED_BYTES = 2**28
_MOST_EXPANSION = 200
"""Text shrinks to a tenth, the most repetitive logs to a hundredth; a packed file that exceeds this is no text."""

_NOT_DATA = (
    *(
        "dataset_info.json",
        "dataset_infos.json",
        "dataset_dict.json",
        "state.json",
        "readme.txt",
        "license.txt",
    ),
    "requirements.txt",
)
"""Files that data sets have beside their data."""


class CorpusError(SlimqwenError):
    """A text is missing, malformed or too short."""


def file_format(file: Path) -> str:
    """The format of a file, one of `FORMATS`, by the ending of its name without .gz or .zst.

    Raises:
        CorpusError: the name has another ending.
    """
    inner = Path(file.stem) if file.suffix.lower() in _PACKED else file
    suffix = inner.suffix.lower()
    if suffix not in FORMATS or (suffix == ".parquet" and inner != file):
        known = f"{', '.join(FORMATS[:-1])} and {FORMATS[-1]}"
        raise CorpusError(
            f"{file}: unknown format; name a file that ends in {known} (all but .parquet may be packed: .gz, .zst)"
        )
    return suffix


def list_files(path: Path) -> tuple[list[Path], list[Path]]:
    """List the files to read at a path, and the files of a folder that are left out.

    If the names in a folder are splits of a data set (train, test, validation), only `train` is read.

    Returns:
        The files to read, in the order of their names, and those that are left out: other formats and other splits. A
        path that is no folder is returned as it is, even if nothing is there.

    Raises:
        CorpusError: a folder has no file that can be read.
    """
    if not path.is_dir():
        return [path], []
    found: list[Path] = []
    left_out: list[Path] = []
    for file in sorted(path.rglob("*")):
        inside = file.relative_to(path)
        if not file.is_file() or any(part.startswith(".") for part in inside.parts):
            continue
        try:
            file_format(file)
        except CorpusError:
            left_out.append(file)
        else:
            (left_out if file.name.lower() in _NOT_DATA else found).append(file)
    trained = [file for file in found if _has_word("train", file.relative_to(path))]
    if trained:
        left_out += [file for file in found if file not in trained]
    if not found:
        raise CorpusError(
            f"{path} has no file that can be read; put .jsonl, .csv, .parquet or .txt files there"
        )
    return trained or found, left_out


def _has_word(word: str, path: Path) -> bool:
    letters = "".join(character if character.isalpha() else " " for character in str(path).lower())
    return word in letters.split()


class _Expanded(io.RawIOBase):
    """The bytes of a packed file, up to a limit that no text reaches."""

    def __init__(self, packed: Any, file: Path) -> None:
        self._packed, self._file, self._bytes = packed, file, 0
        self._limit = max(_UNCHECKED_BYTES, _MOST_EXPANSION * file.stat().st_size)

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int:
        data = self._packed.read(len(buffer))
        self._bytes += len(data)
        if self._bytes > self._limit:
            raise CorpusError(
                f"{self._file} expands to more than {self._limit:,} bytes, as no text does; unpack it, and name the "
                "unpacked file"
            )
        buffer[: len(data)] = data
        return len(data)


@contextlib.contextmanager
def open_bytes(file: Path) -> Iterator[IO[bytes]]:
    """Open a file to read its bytes, unpacked if it ends in .gz or .zst.

    Raises:
        CorpusError: here or in the `with` block: the file cannot be read, is a git-lfs pointer, is cut short, or
            unpacks to far more bytes than any text would.
    """
    with reading(file), contextlib.ExitStack() as stack:
        plain = stack.enter_context(file.open("rb"))
        if is_pointer(plain.peek(64)):
            raise CorpusError(
                f"{file} is a git-lfs pointer, not the file itself; run `git lfs pull` in {file.parent}"
            )
        packed: Any = None
        if file.suffix.lower() == ".gz":
            packed = stack.enter_context(gzip.GzipFile(fileobj=plain))
        elif file.suffix.lower() == ".zst":
            import pyarrow  # type: ignore[import-untyped] # slow to import

            packed = stack.enter_context(pyarrow.CompressedInputStream(plain, "zstd"))
        yield plain if packed is None else io.BufferedReader(_Expanded(packed, file))


def read_lines(stream: IO[bytes], file: object) -> Iterator[bytes]:
    """Yield the lines of a stream with their ends.

    Args:
        file: name of the file in the error message.

    Raises:
        CorpusError: a line is longer than 64 MiB.
    """
    number = 0
    while line := stream.readline(MOST_LINE_BYTES + 1):
        number += 1
        if len(line) > MOST_LINE_BYTES:
            raise CorpusError(
                f"{file}, line {number}: longer than {MOST_LINE_BYTES:,} bytes; divide the line"
            )
        yield line


def parse_json(line: bytes, *, is_first: bool) -> Any:
    """The value of a line of JSON; a byte order mark may begin the first.

    Raises:
        ValueError: the line is not UTF-8 or not JSON, or has half a surrogate pair; the message is cause and cure.
    """
    try:
        value = json.loads(line.decode("utf-8-sig" if is_first else "utf-8"))
        if b"\\u" in line:
            json.dumps(value, ensure_ascii=False).encode()  # fails for a surrogate without its pair
    except UnicodeDecodeError as error:
        raise ValueError(not_utf8(error)) from None
    except (ValueError, RecursionError) as error:
        raise ValueError(f"not JSON ({error}); write one JSON object per line") from None
    return value


def read_json_lines(lines: Iterable[bytes], name: object) -> Iterator[tuple[int, Any]]:
    """Yield the byte position and the value of each line that is not blank; `name` names the file in errors.

    Raises:
        CorpusError: a line is not UTF-8 or not JSON.
    """
    position = 0
    for number, line in enumerate(lines, start=1):
        if line.strip():
            try:
                value = parse_json(line, is_first=position == 0)
            except ValueError as error:
                raise CorpusError(f"{name}, line {number}: {error}") from None
            yield position, value
        position += len(line)


def without_nulls(value: Any) -> Any:
    """The same JSON without the keys whose value is null.

    In a parquet file every row has the keys of all rows, with null for those that it lacks.
    """
    if isinstance(value, Mapping):
        return {key: without_nulls(part) for key, part in value.items() if part is not None}
    return [without_nulls(part) for part in value] if isinstance(value, list) else value


def not_utf8(error: UnicodeDecodeError) -> str:
    """Cause and cure of text that is not UTF-8."""
    return f"not UTF-8 ({error.reason}); decompress it or convert it to UTF-8"


@contextlib.contextmanager
def reading(path: Path) -> Iterator[None]:
    """Turn what readers raise in the `with` block into a CorpusError with cause and cure.

    Args:
        path: the file, for the message.

    Raises:
        CorpusError: the file cannot be read, or is cut short or damaged.
    """
    try:
        yield
    except (EOFError, zlib.error) as error:
        raise CorpusError(f"{path}: cut short or damaged ({error}); fetch or pack it again") from None
    except OSError as error:
        cause = error.strerror or " ".join(str(error).split())[:200]
        raise CorpusError(f"{path}: cannot be read ({cause}); put a readable file there") from None
