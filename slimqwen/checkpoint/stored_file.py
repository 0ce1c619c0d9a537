"""Checks of a file by its first and last bytes: no git-lfs pointer, no byte order mark, not empty, not cut short."""

import shlex
from pathlib import Path

from slimqwen.checkpoint.errors import CorruptCheckpointError

_POINTER = b"version https://git-lfs.github.com/spec/"
"""How a file of git-lfs begins that stands for a large one; git without git-lfs checks out these."""

_MARK = b"\xef\xbb\xbf"
_NEVER_EMPTY = (".json", ".jinja", ".safetensors", ".model")
_WITHOUT_MARK = (".json", ".jinja")


def is_pointer(head: bytes) -> bool:
    """Whether a file that begins with these bytes is a git-lfs pointer instead of the file itself."""
    return head.startswith(_POINTER)


def refuse_pointer(file: Path) -> None:
    """Refuse a git-lfs pointer in place of a file, and a JSON file or chat template with a byte order mark.

    Neither is damaged, but vLLM cannot read a pointer. At the mark transformers fails, or puts it before every prompt.

    Raises:
        CorruptCheckpointError: the file is one of these; the message has a cure.
        OSError: the file cannot be read.
    """
    with file.open("rb") as stream:
        head = stream.read(len(_POINTER))
    if is_pointer(head):
        raise CorruptCheckpointError(
            f"{file} is a git-lfs pointer, not the file itself",
            f"run `git lfs pull` in {file.parent}, or download the file again",
        )
    if head.startswith(_MARK) and file.suffix in _WITHOUT_MARK:
        raise CorruptCheckpointError(f"{file} begins with a byte order mark", remove_mark(file))


def refuse_cut(file: Path) -> None:
    """Refuse an empty file, and a tokenizer.json that is cut short, because vLLM would end at them while it starts.

    Raises:
        CorruptCheckpointError: the file is empty or cut short.
        OSError: the file cannot be read.
    """
    length = file.stat().st_size
    if not length and file.suffix in _NEVER_EMPTY:
        raise CorruptCheckpointError(f"{file} is empty")
    if file.name == "tokenizer.json":  # too long to be parsed before every start
        with file.open("rb") as stream:
            head = stream.read(64).lstrip()
            stream.seek(max(0, length - 64))
            tail = stream.read().rstrip()
        if not (head.startswith(b"{") and tail.endswith(b"}")):
            raise CorruptCheckpointError(f"{file} is cut short, or no JSON object")


def remove_mark(file: Path) -> str:
    """Say how to remove a byte order mark from the beginning of a file, as the end of an error message."""
    return rf"remove it with `sed -i '1s/^\xEF\xBB\xBF//' {shlex.quote(str(file))}`"
