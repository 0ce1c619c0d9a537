"""Ray for real on this machine: a head without CPUs and two nodes with a logical GPU each."""

import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest

from slimqwen.processes import ExecutorError, Failure, Resources, Result, Task
from slimqwen.processes import ray as executor_ray
from slimqwen.processes.ray import HostKind, NodeReport, RayExecutor
from slimqwen.records.provenance import host_kind
from tests.processes import tasks

pytest.importorskip("ray", reason="Ray is an extra: `make install EXTRAS=ray`")
cluster_utils = pytest.importorskip("ray.cluster_utils")

STORE_BYTES = 100 << 20
HEALTH_CHECKS = {"health_check_initial_delay_ms": 1000, "health_check_period_ms": 500}
"""Ray's own notice the loss of a node after half a minute."""


def add_node(cluster: Any) -> Any:
    return cluster.add_node(num_cpus=1, num_gpus=1, object_store_memory=STORE_BYTES)


@pytest.fixture(scope="module")
def cluster() -> Iterator[Any]:
    head = {"num_cpus": 0, "_system_config": HEALTH_CHECKS}
    made = cluster_utils.Cluster(initialize_head=True, head_node_args=head)
    for _ in range(2):
        add_node(made)
    yield made
    made.shutdown()


def test_tasks_run_on_nodes_with_their_resources_and_each_end_is_reported(
    cluster: Any, tmp_path: Path
) -> None:
    heard: list[tuple[str, float, float]] = []
    with RayExecutor(tmp_path, cluster.address, host_kind, lambda *report: heard.append(report)) as executor:
        assert executor.width == 2
        needs = Resources(gpus=1, memory_bytes=1 << 20)
        for name in ("a", "b"):
            # Both wait for each other, so both nodes have one.
            executor.submit(Task(f"key-{name}", f"meet {name}", tasks.meet, name, needs))
        executor.submit(Task("key-a", "the same again", tasks.refuse, "not submitted"))
        outcomes = {outcome.key: outcome for outcome in (executor.wait(), executor.wait())}
        with pytest.raises(ExecutorError, match="no task is pending"):
            executor.wait()
        executor.submit(Task("refused", "title", tasks.refuse, "no such thing; name another"))
        executor.submit(Task("crash", "title", tasks.crash, None))
        failures = {outcome.key: outcome for outcome in (executor.wait(), executor.wait())}
        with pytest.raises(ExecutorError, match="needs 2 GPUs, but no node of the cluster has more than 1"):
            executor.submit(Task("big", "title", tasks.double, 1, Resources(gpus=2)))
    met = {key: outcome.value[0] for key, outcome in outcomes.items() if isinstance(outcome, Result)}
    assert met == {"key-a": "b", "key-b": "a"}
    assert sorted(title for title, *_ in heard) == [
        "meet a: ended", "meet b: ended", "title: ended", "title: ended",
    ]  # fmt: skip
    assert [counts for _, *counts in heard[:2]] == [[1, 2], [2, 2]]
    assert isinstance(failures["refused"], Failure)
    assert failures["refused"].reason == "no such thing; name another"
    assert "SIGSEGV" in failures["crash"].reason
    assert not list((tmp_path / ".cache" / "cluster").iterdir())


TERMINATED = """
import os, signal, sys
from pathlib import Path
from slimqwen.processes.ray import RayExecutor
from slimqwen.records.provenance import host_kind

def interrupt(*_):
    raise KeyboardInterrupt

signal.signal(signal.SIGTERM, interrupt)
try:
    with RayExecutor(Path(sys.argv[1]), sys.argv[2], host_kind):
        os.kill(os.getpid(), signal.SIGTERM)
except KeyboardInterrupt:
    sys.exit(7)
"""


def test_sigterm_ends_a_search_as_it_would_without_ray(cluster: Any, tmp_path: Path) -> None:
    words = [sys.executable, "-c", TERMINATED, str(tmp_path), cluster.address]
    ended = subprocess.run(words, capture_output=True, text=True, timeout=300)
    assert ended.returncode == 7, ended.stderr
    assert "SIGTERM received" not in ended.stderr


def test_a_lost_node_gives_its_tasks_to_the_others_and_is_left_out_of_the_next_run(
    cluster: Any, tmp_path: Path
) -> None:
    lost = add_node(cluster)
    with RayExecutor(tmp_path, cluster.address, host_kind) as executor:
        for number in range(3):
            executor.submit(Task(f"key-{number}", "hold", tasks.hold, f"{number}", Resources(gpus=1)))

        def remove() -> None:
            wait_until(lambda: len(read_pids(tmp_path)) == 3, 120)
            cluster.remove_node(lost, allow_graceful=False)
            # A worker outlives its node for a moment, in which it could still end its task.
            wait_until(lambda: not all(map(psutil.pid_exists, read_pids(tmp_path))), 50)
            (tmp_path / "go").touch()

        remover = threading.Thread(target=remove)
        remover.start()
        outcomes = [executor.wait() for _ in range(3)]
        remover.join()
    assert sorted(outcome.value for outcome in outcomes if isinstance(outcome, Result)) == ["0", "1", "2"]
    assert len(read_pids(tmp_path)) == 4  # the lost one ran twice
    # Ray may list the node for half a minute.
    with RayExecutor(tmp_path, cluster.address, host_kind) as executor:
        assert executor.width == 2


def test_a_node_that_is_gone_before_it_reports_is_left_out(
    cluster: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whether Ray has noticed the end of a node at the start of a run is a matter of seconds, so it is forced here."""
    listed, stock = [], executor_ray._list_nodes

    def list_nodes() -> list[Any]:
        listed.append(stock())
        gone = {**listed[0][0], "NodeID": "ab" * 28}
        return [*listed[-1], gone] if len(listed) == 1 else listed[-1]

    monkeypatch.setattr(executor_ray, "_list_nodes", list_nodes)
    with RayExecutor(tmp_path, cluster.address, host_kind) as executor:
        assert executor.width == 2


@pytest.mark.parametrize("threads", ["2", None])
def test_a_task_takes_as_many_threads_as_it_would_here(
    cluster: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, threads: str | None
) -> None:
    """Ray sets one thread a CPU that a task asks for, which a record would show as another engine."""
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    if threads:
        monkeypatch.setenv("OMP_NUM_THREADS", threads)
    with RayExecutor(tmp_path, cluster.address, host_kind) as executor:
        executor.submit(Task("key", "title", tasks.threads, None))
        outcome = executor.wait()
    assert isinstance(outcome, Result)
    assert outcome.value == threads


def test_an_interrupt_stops_the_tasks_on_all_nodes(
    cluster: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def interrupt() -> list[str]:
        if len(read_pids(tmp_path)) == 2:
            raise KeyboardInterrupt
        return ["a node"]

    with RayExecutor(tmp_path, cluster.address, host_kind) as executor:
        for number in range(2):
            executor.submit(Task(f"key-{number}", "hold", tasks.hold, "x", Resources(gpus=1)))
        monkeypatch.setattr(executor_ray, "_list_nodes", interrupt)
        with pytest.raises(KeyboardInterrupt):
            executor.wait()
    wait_until(lambda: not any(map(psutil.pid_exists, read_pids(tmp_path))), 50)


def test_a_cluster_that_stays_without_a_node_ends_the_run(
    cluster: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with RayExecutor(tmp_path, cluster.address, host_kind) as executor:
        executor.submit(Task("key", "hold", tasks.hold, "x", Resources(gpus=1)))
        monkeypatch.setattr(executor_ray, "_list_nodes", list)
        monkeypatch.setattr(executor_ray, "_NO_NODE_S", 1)
        with pytest.raises(ExecutorError, match="has had no node for 1 s"):
            executor.wait()


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (
            {"sees_folder": False},
            "node here does not share the repository's folder; mount it there at the same path",
        ),
        (
            {"kind": HostKind({"vllm": "0.1"}, "a CPU")},
            "node here has other versions of .*vllm.*; run `make install EXTRAS=ray` there",
        ),
    ],
)
def test_a_node_that_could_not_do_the_work_is_refused_before_it(
    cluster: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, change: dict[str, Any], message: str
) -> None:
    monkeypatch.setattr(executor_ray, "_look", looker(change))
    with pytest.raises(ExecutorError, match=message), RayExecutor(tmp_path, cluster.address, host_kind):
        pass


def looker(change: dict[str, Any]) -> Callable[..., NodeReport]:
    """A node's report with something changed."""

    def look(folder: str, token: str, answer: str, describe: Callable[[], HostKind]) -> NodeReport:
        (Path(folder) / answer).write_text(token)
        return NodeReport(**{"name": "here", "sees_folder": True, "kind": describe(), **change})

    return look


def test_kinds_of_hardware_are_not_mixed(tmp_path: Path) -> None:
    here = host_kind()
    nodes = [NodeReport("a", True, here), NodeReport("b", True, here._replace(hardware="another"))]
    executor = RayExecutor(tmp_path, "auto", host_kind)
    executor._require_alike(nodes[:1])
    with pytest.raises(ExecutorError, match="mixes kinds of hardware"):
        executor._require_alike(nodes)


@pytest.mark.parametrize("address", ["127.0.0.1:1", "nonsense"])
def test_no_cluster_is_an_error(tmp_path: Path, address: str) -> None:
    with (
        pytest.raises(ExecutorError, match=f"no Ray cluster at {address}"),
        RayExecutor(tmp_path, address, host_kind),
    ):
        pass


def wait_until(condition: Callable[[], bool], seconds: float) -> None:
    until = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < until
        time.sleep(0.1)


def read_pids(root: Path) -> list[int]:
    file = root / "pids.txt"
    return [int(line) for line in file.read_text().split()] if file.is_file() else []
