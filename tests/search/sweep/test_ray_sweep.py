"""A sweep on a Ray cluster gives the records of a local one, also when a node is lost in the middle of a part."""

import dataclasses
import threading
import time
from pathlib import Path
from typing import Any

import pytest

from slimqwen.search.executors import LocalExecutor
from slimqwen.search.executors.ray import RayExecutor
from slimqwen.search.sweep import tasks
from slimqwen.search.sweep.driver import sweep
from tests.search.sweep import stand_in
from tests.search.sweep.stand_in import OPTIONS, contents

pytest.importorskip("ray", reason="Ray is an extra: `make install EXTRAS=ray`")
cluster_utils = pytest.importorskip("ray.cluster_utils")

NAMES = ["a", "b", "e"]
TWO_PARTS = dataclasses.replace(OPTIONS, parts=2)


def test_a_lost_node_changes_no_record(repository: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tasks, "ask_part", stand_in.ask_part)
    seconds = repository / stand_in.SECONDS
    seconds.write_text("0")
    results = sweep(NAMES, TWO_PARTS, LocalExecutor(repository), repository)
    assert [each.failure for each in results] == [None, None, None]
    local = contents(repository)
    for path in repository.glob("experiments/*/quality_*"):
        path.unlink()
    (repository / "pids.txt").unlink()
    seconds.write_text("4")
    cluster = cluster_utils.Cluster(initialize_head=True, head_node_args={"num_cpus": 0})
    try:
        nodes = [cluster.add_node(num_cpus=1, num_gpus=1, object_store_memory=100 << 20) for _ in range(2)]
        remover = threading.Thread(target=_remove_while_busy, args=(cluster, nodes[1], repository))
        remover.start()
        results = sweep(NAMES, TWO_PARTS, RayExecutor(repository, cluster.address), repository)
        remover.join()
    finally:
        cluster.shutdown()
    assert [each.failure for each in results] == [None, None, None]
    assert len(_begun(repository)) > len(NAMES) * TWO_PARTS.parts  # what the node was doing was done again
    assert contents(repository) == local


def _remove_while_busy(cluster: Any, node: Any, repository: Path) -> None:
    until = time.monotonic() + 60
    while time.monotonic() < until and len(_begun(repository)) < 2:
        time.sleep(0.1)
    cluster.remove_node(node, allow_graceful=False)


def _begun(repository: Path) -> list[str]:
    file = repository / "pids.txt"
    return file.read_text().split() if file.is_file() else []
