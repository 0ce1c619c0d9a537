"""Limits of CPU time and memory of this process's control groups, which a container or a job scheduler sets.

Control groups of version 1 and 2 are read. Every group from the process's own up to the root may have a limit; the
lowest limit holds.
"""

import math
from collections.abc import Iterator
from pathlib import Path, PurePosixPath

_PROCESS = Path("/proc/self")


def cpu_quota() -> float | None:
    """CPU time that the groups allow, in CPUs (0.5: half the time of one CPU); None without a limit."""
    quotas = []
    for group in _groups("cpu"):
        both = _words(group / "cpu.max") or (
            _words(group / "cpu.cfs_quota_us") + _words(group / "cpu.cfs_period_us")
        )
        if len(both) == 2 and both[0].isdecimal() and int(both[1]):  # no limit: "max", or -1
            quotas.append(int(both[0]) / int(both[1]))
    return min(quotas, default=None)


def memory_limit() -> float:
    """Bytes that the groups allow; infinite without a limit."""
    return min((limit for limit, _ in _memory_limits()), default=math.inf)


def available_memory() -> float:
    """Bytes that this process can still take within the limits; infinite without a limit."""
    return min((max(0, limit - used) for limit, used in _memory_limits()), default=math.inf)


def _memory_limits() -> Iterator[tuple[int, int]]:
    """Limit and use, bytes, of each group with a limit; memory that the kernel can reclaim does not count as used."""
    for group in _groups("memory"):
        # Above memory.high the kernel does not kill a process, but slows it down without bound.
        names = ("memory.max", "memory.high", "memory.limit_in_bytes")
        limits = [int(word) for name in names for word in _words(group / name) if word.isdecimal()]
        used = _words(group / "memory.current") or _words(group / "memory.usage_in_bytes")
        if limits and used:
            words = _words(group / "memory.stat")
            figures = dict(zip(words[::2], map(int, words[1::2]), strict=True))
            # In version 1 the fields with "total_" include the groups below, as all fields of version 2 do.
            files = (
                figures.get(f"total_{name}", figures.get(name, 0))
                for name in ("inactive_file", "active_file")
            )
            yield min(limits), int(used[0]) - sum(files)


def _groups(controller: str) -> Iterator[Path]:
    """Folders of the groups that may limit this process for a controller, from its own to the root of a hierarchy."""
    own = {}
    for line in _lines("cgroup"):
        _, controllers, path = line.split(":", 2)
        if not controllers:
            own["cgroup2"] = PurePosixPath(path)
        elif controller in controllers.split(","):
            own["cgroup"] = PurePosixPath(path)
    for line in _lines("mountinfo"):
        mount, _, file_system = line.partition(" - ")
        kind, _, options = file_system.split(" ", 2)
        if kind not in own or (kind == "cgroup" and controller not in options.split(",")):
            continue
        root, point = mount.split()[3:5]
        # A container sees its own group as the root of the mount, but may be told its path from outside.
        is_inside = own[kind].is_relative_to(root) and ".." not in own[kind].parts
        group = Path(point) / (own[kind].relative_to(root) if is_inside else "")
        yield from (folder for folder in (group, *group.parents) if folder.is_relative_to(point))


def _lines(name: str) -> list[str]:
    try:
        return (_PROCESS / name).read_text(encoding="utf-8").splitlines()
    except OSError:  # no Linux
        return []


def _words(file: Path) -> list[str]:
    try:
        return file.read_text(encoding="ascii").split()
    except OSError:
        return []
