"""What a file of a checkpoint must not be, seen in its first and last bytes: a pointer, behind a mark, empty or cut."""

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
    """Refuse a file with which vLLM fails, or which spoils every prompt, although nothing has damaged it.

    Raises:
        CorruptCheckpointError: it is a pointer of git-lfs; or a JSON file or chat template begins with a byte order
            mark, at which transformers fails, or which it puts before every prompt. The message has a cure.
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
    """Refuse a file that is empty, and a tokenizer.json that ends too early, for vLLM dies of them while it starts.

    Raises:
        CorruptCheckpointError: it is.
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
    """The cure for a byte order mark at the beginning of a file."""
    return rf"remove it with `sed -i '1s/^\xEF\xBB\xBF//' {shlex.quote(str(file))}`"
