"""The Ray executor: runs tasks on the nodes of a Ray cluster, each in a process of its own.

Every node must see the repository at the same path of a shared folder, and must be of the same kind, by a description
that the caller chooses; both are checked before the first task. Tasks of a lost node run
on the others: Ray repeats a task whose node or worker died, never one that raised.
"""

import contextlib
import logging
import os
import platform
import secrets
import shutil
import signal
import socket
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple, Self

from slimqwen.processes import task_process
from slimqwen.processes.task import ExecutorError, Failure, Outcome, Task
from slimqwen.progress import Progress, silent

RETRIES = 3
"""Number of times that a task is repeated after its node or worker was lost."""

_THREADS = "OMP_NUM_THREADS"
_POLL_S = 0.5
_CONNECT_S = 5
_NO_NODE_S = 60
"""Seconds that a cluster may have no node, and that it may still list a lost one: Ray takes 30 s to notice a loss."""

_REPORT_S = 180
"""Seconds that a node may take to report on itself: it has to import this package, perhaps beside other work."""


class HostKind(NamedTuple):
    """Package versions and hardware, which two hosts must share for their figures to be compared."""

    packages: Mapping[str, str]  # versions; those of the driver, too
    hardware: str  # a name; the driver need not have it


@dataclass(frozen=True)
class NodeReport:
    """A node's report on itself.

    Attributes:
        name: host name and the first digits of the node's Ray id.
        sees_folder: whether the node could read the driver's test file in the repository and write one beside it.
        kind: package versions and hardware, which have to equal the driver's.
    """

    name: str
    sees_folder: bool
    kind: HostKind


class RayExecutor:
    """Runs tasks on the nodes of a Ray cluster that is running already."""

    def __init__(
        self, root: Path, address: str, describe: Callable[[], HostKind], progress: Progress = silent
    ) -> None:
        """Make an executor for a repository on a folder that all nodes share.

        Args:
            address: address of the cluster, host:port; auto for the cluster to which this machine belongs.
            describe: describes the host on which it is called, importable by name; called on every node.
            progress: receives the title of each task that ended, and the numbers of ended and submitted tasks.
        """
        self._root, self._address, self._describe, self._progress = root, address, describe, progress
        self._folder = root / ".cache" / "cluster" / secrets.token_hex(8)
        self._tasks: dict[Any, Task] = {}
        self._ended = 0
        self._cpus = self._gpus = self._width = 0

    def __enter__(self) -> Self:
        """Connect to the cluster, and check that every node can run tasks.

        Raises:
            ExecutorError: Ray is not installed, there is no cluster, or a node cannot run tasks; the message names the
                first fault.
        """
        try:
            import ray
        except ImportError:
            raise ExecutorError("Ray is not installed; install it with `make install EXTRAS=ray`") from None
        ends_search = signal.getsignal(signal.SIGTERM)
        try:
            self._connect_socket()
            ray.init(
                address=self._address,
                log_to_driver=False,
                logging_level=logging.ERROR,
                configure_logging=False,
                ignore_reinit_error=True,
            )
        except (RuntimeError, ValueError, OSError) as error:
            cause = " ".join(str(error).split())[:200]
            raise ExecutorError(
                f"no Ray cluster at {self._address} ({cause}); run `ray start --head` to start one"
            ) from None
        # Ray's own handler prints a native stack trace and aborts.
        signal.signal(signal.SIGTERM, ends_search)
        try:
            self._folder.mkdir(parents=True)
            self._require_alike(self._look_at_nodes())
        except BaseException:
            self.__exit__()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        """Stop all tasks and disconnect from the cluster."""
        import ray

        for reference in self._tasks:
            with contextlib.suppress(Exception):  # the cluster may be gone
                ray.cancel(reference, force=True)
        self._tasks.clear()
        ray.shutdown()
        shutil.rmtree(self._folder, ignore_errors=True)

    @property
    def width(self) -> int:
        """Largest number of tasks that run at a time: one per GPU of the cluster, or per node if there is no GPU."""
        return self._width

    def submit(self, task: Task) -> None:
        """Submit a task to the cluster; it is ignored if a task with its key is pending already.

        Raises:
            ExecutorError: no node has as many GPUs as the task needs.
        """
        import ray

        if any(task.key == other.key for other in self._tasks.values()):
            return
        needs = task.resources
        if needs.gpus > self._gpus:
            raise ExecutorError(
                f"{task.title} needs {needs.gpus} GPUs, but no node of the cluster has more than {self._gpus}; "
                "add a node with as many"
            )
        remote = ray.remote(max_calls=1, max_retries=RETRIES, scheduling_strategy="SPREAD")(_run_on_node)
        options: dict[str, Any] = {
            # An engine on a CPU uses every core.
            "num_cpus": self._cpus if needs.whole_node or not needs.gpus else 1,
            "num_gpus": self._gpus if needs.whole_node and needs.gpus else needs.gpus,
        }
        if needs.memory_bytes:
            options["memory"] = needs.memory_bytes
        reference = remote.options(**options).remote(task, str(self._root), os.environ.get(_THREADS))
        self._tasks[reference] = task

    def wait(self) -> Outcome:
        """Wait for the next task that ends, report its title as progress, and return its outcome.

        Raises:
            ExecutorError: no task is pending, or the cluster has lost all its nodes.
        """
        import ray

        if not self._tasks:
            raise ExecutorError("no task is pending; submit one before waiting for its outcome")
        last_seen = time.monotonic()
        while not (ready := ray.wait(list(self._tasks), timeout=_POLL_S)[0]):
            if _list_nodes():
                last_seen = time.monotonic()
            elif time.monotonic() - last_seen > _NO_NODE_S:
                raise ExecutorError(
                    f"the cluster has had no node for {_NO_NODE_S} s; add a node and run again: finished tasks are kept"
                )
        task = self._tasks.pop(ready[0])
        try:
            outcome: Outcome = ray.get(ready[0])
        except ray.exceptions.RayError as error:
            cause = " ".join(str(error).split())[:300]
            return Failure(task.key, f"its node or worker was lost {1 + RETRIES} times ({cause})")
        self._ended += 1
        self._progress(f"{task.title}: ended", self._ended, self._ended + len(self._tasks))
        return outcome

    def _connect_socket(self) -> None:
        """Raise an OSError or ValueError if nothing listens at the address; Ray itself would wait for minutes."""
        if self._address != "auto":
            host, _, port = self._address.rpartition(":")
            socket.create_connection((host, int(port)), _CONNECT_S).close()

    def _look_at_nodes(self) -> list[NodeReport]:
        """Have every node report on itself."""
        import ray
        from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

        token = secrets.token_hex(8)
        (self._folder / "driver").write_text(token, encoding="utf-8")
        look = ray.remote(num_cpus=0, max_retries=RETRIES)(_look)
        asked = {}
        for node in _list_nodes():
            only_there = NodeAffinitySchedulingStrategy(node["NodeID"], soft=False)
            remote = look.options(scheduling_strategy=only_there)
            asked[node["NodeID"]] = remote.remote(str(self._folder), token, node["NodeID"], self._describe)
        reports = {}
        for node_id, reference in asked.items():
            try:
                reports[node_id] = report = ray.get(reference, timeout=_REPORT_S)
            except ray.exceptions.RayError as error:
                if not isinstance(error, ray.exceptions.RayTaskError) and _is_lost(node_id):
                    continue
                cause = " ".join(str(error).split())[-200:]
                raise ExecutorError(
                    f"a node of the cluster cannot run slimqwen ({cause}); install it there at the same path"
                ) from None
            answer = self._folder / node_id
            if not (report.sees_folder and answer.is_file() and answer.read_text(encoding="utf-8") == token):
                raise ExecutorError(
                    f"node {report.name} does not share the repository's folder; mount it there at the same path"
                )
        resources = [node["Resources"] for node in _list_nodes() if node["NodeID"] in reports]
        if not resources:
            raise ExecutorError("the Ray cluster has no node with a CPU; add one with `ray start --address`")
        gpus = [int(each.get("GPU", 0)) for each in resources]
        self._cpus, self._gpus = min(int(each["CPU"]) for each in resources), max(gpus)
        self._width = max(sum(gpus), len(resources))
        return list(reports.values())

    def _require_alike(self, nodes: list[NodeReport]) -> None:
        """Raise a ExecutorError if the figures of two nodes could not be compared."""
        packages = self._describe().packages
        for node in nodes:
            if others := {name for name, _ in node.kind.packages.items() ^ packages.items()}:
                raise ExecutorError(
                    f"node {node.name} has other versions of {', '.join(sorted(others))}; run `make install "
                    "EXTRAS=ray` there at the same commit"
                )
        kinds = {node.kind.hardware: node.name for node in nodes}
        if len(kinds) > 1:
            described = "; ".join(f"{name}: {kind}" for kind, name in kinds.items())
            raise ExecutorError(
                f"the cluster mixes kinds of hardware ({described}), whose figures cannot be compared; keep nodes of "
                "one kind"
            )


def _run_on_node(task: Task, root: str, threads: str | None) -> Outcome:
    """Run a task with the driver's number of OpenMP threads; Ray calls this function on a node."""
    os.environ.pop(_THREADS, None)  # Ray sets the variable to the task's number of CPUs
    if threads is not None:
        os.environ[_THREADS] = threads
    return task_process.run_task(task, Path(root), silent)


def _look(folder: str, token: str, answer: str, describe: Callable[[], HostKind]) -> NodeReport:
    """Report on this node; Ray calls this function on each node.

    Args:
        folder: folder that the nodes share.
        token: content of the driver's test file in the folder.
        answer: name of the file that the node writes beside it.
    """
    import ray

    try:
        sees = (Path(folder) / "driver").read_text(encoding="utf-8") == token
        (Path(folder) / answer).write_text(token, encoding="utf-8")
    except OSError:
        sees = False
    name = f"{platform.node()}-{ray.get_runtime_context().get_node_id()[:6]}"
    return NodeReport(name, sees, describe())


def _list_nodes() -> list[Mapping[str, Any]]:
    """List the cluster's nodes that have CPUs for tasks; a node that was lost seconds ago may be among them."""
    import ray

    return [node for node in ray.nodes() if node["Alive"] and node["Resources"].get("CPU", 0) >= 1]


def _is_lost(node_id: str) -> bool:
    """Wait up to `_NO_NODE_S` for Ray to notice the loss of a node; returns whether the node is lost."""
    until = time.monotonic() + _NO_NODE_S
    while any(node["NodeID"] == node_id for node in _list_nodes()):
        if time.monotonic() > until:
            return False
        time.sleep(_POLL_S)
    return True
