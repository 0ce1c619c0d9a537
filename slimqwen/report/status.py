"""Lists Slimqwen's processes on this host, the locks that they wait for, and what fills a workspace's disk.

There is no register: all is read from processes, their command lines and the kernel's table of locks.
"""

import contextlib
import os
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import psutil

from slimqwen.file_lock import identify, list_locks, name_owner
from slimqwen.variant.config_env import config_env

_LOCKS = (
    "weights/store/.lock", "weights/store/.locks/*", "weights/.download-*/lock", "data/.download-*/lock",
    "data/*/.download-*/lock", ".cache/*/*.lock", ".cache/*/*.jsonl", ".cache/.*.lock",
)  # fmt: skip
"""Files of a workspace that commands lock."""

_SERVER = "slimqwen.vllm_plugin.api_server"


@dataclass(frozen=True)
class Running:
    """A command or server of Slimqwen.

    Attributes:
        what: words of the command line after the program; of a server the name of its checkpoint's folder.
        owner: user who runs it; None if it has ended meanwhile.
        seconds: time since its start.
        folder: its working folder; None if this user may not read it.
        port: TCP port of a server.
        waits_for: the file whose lock it waits for, and the holder; None if it waits for none.
    """

    pid: int
    what: str
    owner: str | None
    seconds: float
    folder: Path | None
    port: str | None
    waits_for: str | None


def list_running(root: Path) -> list[Running]:
    """List the commands and servers of all workspaces and users on this host, oldest first, without this process."""
    found: dict[int, tuple[psutil.Process, str, list[str]]] = {}
    for process in psutil.process_iter():
        with contextlib.suppress(psutil.Error):
            words = " ".join(process.cmdline()).split()  # a forked server's command line is a single word
            if process.pid != os.getpid() and (what := _describe(words)):
                found[process.pid] = (process, what, words)
    waits = dict(_list_waits(root))
    running = []
    for process, what, words in found.values():
        with contextlib.suppress(psutil.Error):
            if any(parent.pid in found and found[parent.pid][1] == what for parent in process.parents()):
                continue  # a fork of the same command
            folder = None
            with contextlib.suppress(psutil.AccessDenied):
                folder = Path(process.cwd())
            port = (
                words[words.index("--port") + 1] if what.startswith("server") and "--port" in words else None
            )
            age = time.time() - process.create_time()
            waits_for = waits.get(process.pid)
            running.append(Running(process.pid, what, name_owner(process.pid), age, folder, port, waits_for))
    return sorted(running, key=lambda each: -each.seconds)


def _describe(words: Sequence[str]) -> str | None:
    """What a command line runs, such as "recipe run mine" or "server of mine"; None if it is not Slimqwen's."""
    if not words or not Path(words[0]).name.startswith(("python", "slimqwen")):
        return None
    if _SERVER in words[:4]:
        model = words[words.index("--model") + 1] if "--model" in words else "?"
        return f"server of {Path(model).name}"
    program = (
        n for n, word in enumerate(words[:4]) if word == "slimqwen.cli" or Path(word).name == "slimqwen"
    )
    return " ".join(words[at + 1 :]) or "slimqwen" if (at := next(program, None)) is not None else None


def _list_waits(root: Path) -> Iterator[tuple[int, str]]:
    """Each process that waits for a lock, with the file and the processes that hold it."""
    names = {identify(file): str(file.relative_to(root)) for pattern in _LOCKS for file in root.glob(pattern)}
    locks = list_locks()
    for waiting in (lock for lock in locks if lock.is_waiting):
        holders = [f"{lock.pid}" for lock in locks if lock.file == waiting.file and not lock.is_waiting]
        yield waiting.pid, f"{names.get(waiting.file, 'a lock')}, held by {', '.join(holders)}"


def list_disk_use(root: Path) -> list[tuple[str, int, str]]:
    """List what fills a workspace's disk, largest first: name, size in bytes, and the command that frees it."""
    places = ((name, sum(map(_disk_bytes, folders)), cure) for name, folders, cure in _list_places(root))
    return sorted((place for place in places if place[1]), key=lambda place: -place[1])


def _list_places(root: Path) -> Iterator[tuple[str, list[Path], str]]:
    """Name, folders, and what frees them."""
    weights = root / "weights"
    yield "outputs of recipes", [weights / "store"], "`slimqwen recipe clean`, those that no variant uses"
    for folder in sorted(weights.glob("*")):
        if folder.is_dir() and not folder.is_symlink() and folder.name not in ("store", ".staging"):
            again = (
                f"; `slimqwen download {folder.name}` gets it again" if _is_copy(folder.name, root) else ""
            )
            yield f"weights/{folder.name}", [folder], f"`rm -r weights/{folder.name}`{again}"
    yield "data sets", [root / "data"], "`rm -r data`; `slimqwen download` gets them again"
    caches = [root / ".cache" / name for name in ("vllm", "inductor")]
    caches += root.glob(f".cache/*-{'[0-9a-f]' * 16}")
    yield (
        "compile caches",
        caches,
        "`rm -r .cache/vllm .cache/inductor .cache/*-*`; the next starts compile again",
    )
    yield "logs", [root / "logs"], "`rm -r logs`"
    yield "the demo", [root / "demo"], "`rm -r demo`"


def _is_copy(name: str, root: Path) -> bool:
    file = config_env(name, root)
    return file.is_file() and "\nSOURCE=" in f"\n{file.read_text(encoding='utf-8')}"


def _disk_bytes(folder: Path) -> int:
    """Bytes that the files below a folder take on disk, those that this user may see, each once."""
    taken: dict[tuple[int, int], int] = {}
    for top, _, names in os.walk(folder):
        for name in names:
            with contextlib.suppress(OSError):
                stat = (Path(top) / name).lstat()
                taken[stat.st_dev, stat.st_ino] = stat.st_blocks * 512
    return sum(taken.values())
