"""Traces the calls of a package's functions, apart from those that an import makes."""

import os
import sys
import threading
from pathlib import Path
from types import FrameType


def trace_into(folder: str, package: str) -> None:
    """Append `file:line` of every function of the package that this process calls to a file of its own."""
    prefix = package + os.sep
    is_own: dict[str, bool] = {}
    seen: set[tuple[str, int]] = set()

    def call(frame: FrameType, event: str, argument: object) -> None:
        file = frame.f_code.co_filename
        own = is_own.get(file)
        if own is None:
            own = is_own[file] = file.startswith(prefix)
        if own:
            place = file, frame.f_code.co_firstlineno
            if place not in seen and not _is_import(frame, prefix):
                seen.add(place)
                with Path(folder, str(os.getpid())).open("a") as stream:
                    stream.write(f"{place[0]}:{place[1]}\n")

    threading.settrace(call)
    sys.settrace(call)


def _is_import(frame: FrameType | None, prefix: str) -> bool:
    """Whether a module of the package is being imported, or this is its body."""
    if frame is not None and frame.f_code.co_name == "<module>":
        return True
    while frame is not None:
        code = frame.f_code
        if code.co_name == "<module>" and code.co_filename.startswith(prefix):
            return frame.f_globals["__name__"] != "__main__"
        frame = frame.f_back
    return False
