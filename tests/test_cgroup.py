"""Limits of control groups as files of a made-up kernel: both versions, nested, inside and outside a container."""

import math
from collections.abc import Callable, Mapping
from pathlib import Path

import psutil
import pytest

from slimqwen import cgroup, host

GIB = 2**30
Kernel = Callable[[str, Mapping[str, str]], None]


@pytest.fixture
def kernel(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Kernel:
    """Makes the files of groups; `{fs}` in the text is the folder where they are mounted."""
    monkeypatch.setattr(cgroup, "_PROCESS", tmp_path / "proc")

    def make(mounts_and_groups: str, files: Mapping[str, str]) -> None:
        mounts, groups = mounts_and_groups.split("\n\n")
        (tmp_path / "proc").mkdir(exist_ok=True)
        (tmp_path / "proc/mountinfo").write_text(mounts.strip().replace("{fs}", str(tmp_path)) + "\n")
        (tmp_path / "proc/cgroup").write_text(groups.strip() + "\n")
        for name, content in files.items():
            (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
            (tmp_path / name).write_text(content + "\n")

    return make


UNIFIED = """
23 1 0:20 / /proc rw - proc proc rw
31 23 0:28 / {fs}/cgroup rw,relatime shared:9 - cgroup2 cgroup2 rw

0::/user.slice/job/step
"""
SEPARATE = """
32 31 0:29 / {fs}/cpu,cpuacct rw - cgroup cgroup rw,cpu,cpuacct
33 31 0:30 / {fs}/memory rw - cgroup cgroup rw,memory
41 31 0:38 / {fs}/unified rw - cgroup2 cgroup2 rw

5:memory:/docker/abc
4:cpu,cpuacct:/docker/abc
0::/
"""


def test_a_machine_without_limits_has_all_that_it_has(kernel: Kernel) -> None:
    kernel(
        UNIFIED,
        {
            "cgroup/user.slice/job/step/cpu.max": "max 100000",
            "cgroup/user.slice/job/step/memory.max": "max",
            "cgroup/user.slice/job/step/memory.high": "max",
            "cgroup/user.slice/job/step/memory.current": "5",
        },
    )
    assert (cgroup.cpu_quota(), cgroup.memory_limit(), cgroup.available_memory()) == (
        None,
        math.inf,
        math.inf,
    )
    assert host.total_memory() == psutil.virtual_memory().total


def test_a_machine_whose_kernel_has_no_groups_has_no_limits(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(cgroup, "_PROCESS", tmp_path / "nothing")
    assert (cgroup.cpu_quota(), cgroup.memory_limit()) == (None, math.inf)


def test_the_lowest_limit_of_nested_groups_counts(kernel: Kernel) -> None:
    kernel(
        UNIFIED,
        {
            "cgroup/user.slice/job/step/cpu.max": "400000 100000",
            "cgroup/user.slice/job/cpu.max": "150000 100000",
            "cgroup/user.slice/cpu.max": "max 100000",
            "cgroup/user.slice/job/step/memory.max": str(8 * GIB),
            "cgroup/user.slice/job/step/memory.current": str(1 * GIB),
            "cgroup/user.slice/job/memory.max": "max",
            "cgroup/user.slice/job/memory.high": str(4 * GIB),
            # Others of the job use most of it, a part of that for files which the kernel can drop.
            "cgroup/user.slice/job/memory.current": str(3 * GIB),
            "cgroup/user.slice/job/memory.stat": f"anon 7\ninactive_file {GIB // 2}\nactive_file {GIB // 4}",
        },
    )
    assert cgroup.cpu_quota() == 1.5
    assert cgroup.memory_limit() == 4 * GIB
    assert cgroup.available_memory() == GIB + GIB // 2 + GIB // 4


def test_the_hierarchies_of_version_1_are_read_each_at_its_own_mount(kernel: Kernel) -> None:
    kernel(
        SEPARATE,
        {
            "cpu,cpuacct/docker/abc/cpu.cfs_quota_us": "50000",
            "cpu,cpuacct/docker/abc/cpu.cfs_period_us": "100000",
            "cpu,cpuacct/cpu.cfs_quota_us": "-1",
            "cpu,cpuacct/cpu.cfs_period_us": "100000",
            "memory/docker/abc/memory.limit_in_bytes": str(2 * GIB),
            "memory/docker/abc/memory.usage_in_bytes": str(3 * GIB),
            "memory/docker/abc/memory.stat": f"cache 1\ninactive_file 0\ntotal_inactive_file {2 * GIB}",
            "memory/memory.limit_in_bytes": "9223372036854771712",
            "memory/memory.usage_in_bytes": str(60 * GIB),
        },
    )
    assert cgroup.cpu_quota() == 0.5
    assert (cgroup.memory_limit(), cgroup.available_memory()) == (2 * GIB, GIB)


@pytest.mark.parametrize("path", ["/docker/abc", "/", "/../../outside", "/elsewhere"])
def test_a_container_that_sees_its_group_as_the_root_has_its_limits(kernel: Kernel, path: str) -> None:
    mounted = "33 31 0:30 /docker/abc {fs}/memory rw - cgroup cgroup rw,memory\n\n7:memory:" + path
    kernel(mounted, {"memory/memory.limit_in_bytes": str(GIB), "memory/memory.usage_in_bytes": "0"})
    assert cgroup.memory_limit() == GIB


@pytest.mark.parametrize(("quota", "cpus"), [(0.1, 1), (1.0, 1), (1.5, 2), (3.0, 3), (99.0, 4), (None, 4)])
def test_a_quota_is_rounded_up_to_whole_cpus(
    monkeypatch: pytest.MonkeyPatch, quota: float | None, cpus: int
) -> None:
    monkeypatch.setattr(cgroup, "cpu_quota", lambda: quota)
    monkeypatch.setattr("os.sched_getaffinity", lambda pid: {0, 1, 4, 5})
    monkeypatch.setattr(psutil, "cpu_count", lambda logical: 64)
    assert host.allowed_cpus() == host.physical_cores() == cpus


def test_memory_is_the_lower_of_the_machine_and_its_container(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cgroup, "memory_limit", lambda: float(GIB))
    monkeypatch.setattr(cgroup, "available_memory", lambda: 1000.0)
    assert (host.total_memory(), host.available_memory()) == (GIB, 1000)
