"""Ray for real on this machine: a head without CPUs and two nodes with a logical GPU each."""

import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest

from slimqwen.records import provenance
from slimqwen.search import SearchError
from slimqwen.search.executors import Failure, Resources, Result, Task
from slimqwen.search.executors import ray as executor_ray
from slimqwen.search.executors.ray import RayExecutor
from tests.search.executors import tasks

pytest.importorskip("ray", reason="Ray is an extra: `make install EXTRAS=ray`")
cluster_utils = pytest.importorskip("ray.cluster_utils")

STORE_BYTES = 100 << 20


@pytest.fixture(scope="module")
def cluster() -> Iterator[Any]:
    made = cluster_utils.Cluster(initialize_head=True, head_node_args={"num_cpus": 0})
    for _ in range(2):
        made.add_node(num_cpus=1, num_gpus=1, object_store_memory=STORE_BYTES)
    yield made
    made.shutdown()


def test_tasks_run_on_nodes_with_their_resources_and_each_end_is_reported(
    cluster: Any, tmp_path: Path
) -> None:
    heard: list[str] = []
    with RayExecutor(tmp_path, cluster.address, lambda activity, *_: heard.append(activity)) as executor:
        for number in range(2):
            needs = Resources(gpus=1, memory_bytes=1 << 20)
            executor.submit(Task(f"key-{number}", f"nap {number}", tasks.sleep, 3.0, needs))
        executor.submit(Task("key-0", "the same again", tasks.sleep, 3.0))
        assert executor.pending == 2
        outcomes = [executor.wait() for _ in range(2)]
        executor.submit(Task("refused", "title", tasks.refuse, "no such thing; name another"))
        executor.submit(Task("crash", "title", tasks.crash, None))
        failures = {outcome.key: outcome for outcome in (executor.wait(), executor.wait())}
        with pytest.raises(SearchError, match="needs 2 GPUs and no node of the cluster has more than 1"):
            executor.submit(Task("big", "title", tasks.double, 1, Resources(gpus=2)))
    assert all(isinstance(outcome, Result) for outcome in outcomes)
    assert sorted(heard) == ["nap 0: ended", "nap 1: ended", "title: ended", "title: ended"]
    assert isinstance(failures["refused"], Failure)
    assert failures["refused"].reason == "no such thing; name another"
    assert "SIGSEGV" in failures["crash"].reason
    assert not list((tmp_path / ".cache" / "cluster").iterdir())


def test_a_node_that_is_lost_gives_its_tasks_to_the_other(cluster: Any, tmp_path: Path) -> None:
    extra = cluster.add_node(num_cpus=1, num_gpus=1, object_store_memory=STORE_BYTES)
    with RayExecutor(tmp_path, cluster.address) as executor:
        for number in range(3):
            executor.submit(Task(f"key-{number}", "nap", tasks.sleep, 6.0, Resources(gpus=1)))

        def remove() -> None:
            until = time.monotonic() + 60
            while time.monotonic() < until and len(_pids(tmp_path)) < 3:
                time.sleep(0.1)
            cluster.remove_node(extra, allow_graceful=False)

        remover = threading.Thread(target=remove)
        remover.start()
        outcomes = [executor.wait() for _ in range(3)]
        remover.join()
    assert sorted(outcome.key for outcome in outcomes) == ["key-0", "key-1", "key-2"]
    assert all(isinstance(outcome, Result) for outcome in outcomes)
    assert len(_pids(tmp_path)) == 4  # the lost one ran twice


@pytest.mark.parametrize("threads", ["2", None])
def test_a_task_takes_as_many_threads_as_it_would_here(
    cluster: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, threads: str | None
) -> None:
    """Ray sets one thread a CPU that a task asks for, which a record would show as another engine."""
    monkeypatch.delenv("OMP_NUM_THREADS")
    if threads:
        monkeypatch.setenv("OMP_NUM_THREADS", threads)
    with RayExecutor(tmp_path, cluster.address) as executor:
        executor.submit(Task("key", "title", tasks.threads, None))
        outcome = executor.wait()
    assert isinstance(outcome, Result)
    assert outcome.value == threads


def test_an_interrupt_stops_the_tasks_on_all_nodes(
    cluster: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def interrupt() -> list[str]:
        if len(_pids(tmp_path)) == 2:
            raise KeyboardInterrupt
        return ["a node"]

    with RayExecutor(tmp_path, cluster.address) as executor:
        for number in range(2):
            executor.submit(Task(f"key-{number}", "nap", tasks.sleep, 60.0, Resources(gpus=1)))
        monkeypatch.setattr(executor_ray, "_worker_nodes", interrupt)
        with pytest.raises(KeyboardInterrupt):
            executor.wait()
    until = time.monotonic() + 60
    while any(map(psutil.pid_exists, _pids(tmp_path))) and time.monotonic() < until:
        time.sleep(0.2)
    assert not any(map(psutil.pid_exists, _pids(tmp_path)))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (
            {"sees_folder": False},
            "node here does not share the repository's folder; mount it there at the same path",
        ),
        (
            {"packages": {"vllm": "0.1"}},
            "node here has other versions of .*vllm.*; install the same lock there",
        ),
    ],
)
def test_a_node_that_could_not_do_the_work_is_refused_before_it(
    cluster: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, change: dict[str, Any], message: str
) -> None:
    monkeypatch.setattr(executor_ray, "_look", looker(change))
    with pytest.raises(SearchError, match=message), RayExecutor(tmp_path, cluster.address):
        pass


def looker(change: dict[str, Any]) -> Callable[[str, str, str], executor_ray.Node]:
    """A node's answer with something changed."""

    def look(folder: str, token: str, answer: str) -> executor_ray.Node:
        (Path(folder) / answer).write_text(token)
        fields = {
            "name": "here", "sees_folder": True, "packages": provenance.package_versions(),
            "hardware": provenance.hardware(),
        }  # fmt: skip
        return executor_ray.Node(**{**fields, **change})

    return look


def test_kinds_of_hardware_are_not_mixed(cluster: Any, tmp_path: Path) -> None:
    here = provenance.hardware()
    other = here.model_copy(update={"cpu_model": "another"})
    nodes = [
        executor_ray.Node(name, True, provenance.package_versions(), hardware)
        for name, hardware in (("a", here), ("b", other))
    ]
    executor = RayExecutor(tmp_path, cluster.address)
    with pytest.raises(SearchError, match="mixes kinds of hardware"):
        executor._require_alike(nodes)


def test_no_cluster_is_an_error(tmp_path: Path) -> None:
    with (
        pytest.raises(SearchError, match=r"no Ray cluster at 127\.0\.0\.1:1"),
        RayExecutor(tmp_path, "127.0.0.1:1"),
    ):
        pass


def _pids(root: Path) -> list[int]:
    file = root / "pids.txt"
    return [int(line) for line in file.read_text().split()] if file.is_file() else []
