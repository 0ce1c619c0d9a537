"""A sweep on a Ray cluster gives the records of a local one, also when a node is lost in the middle of a part."""

import dataclasses
import threading
import time
from pathlib import Path

import pytest

from slimqwen.search import measurements
from slimqwen.search.executors import LocalExecutor
from slimqwen.search.executors.ray import RayExecutor
from slimqwen.search.sweep import sweep
from tests.search import stand_in
from tests.search.stand_in import OPTIONS, contents

pytest.importorskip("ray", reason="Ray is an extra: `make install EXTRAS=ray`")
cluster_utils = pytest.importorskip("ray.cluster_utils")

NAMES = ["a", "b"]
TWO_PARTS = dataclasses.replace(OPTIONS, parts=2)


def test_a_lost_node_changes_no_record(repository: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(measurements, "ask_part", stand_in.ask_part)
    go, pids = repository / "go", repository / "pids.txt"
    go.touch()
    results = sweep(NAMES, TWO_PARTS, LocalExecutor(repository), repository)
    assert [each.failure for each in results] == [None, None]
    local = contents(repository)
    for path in repository.glob("experiments/*/quality_*"):
        path.unlink()
    pids.unlink()
    go.unlink()
    cluster = cluster_utils.Cluster(initialize_head=True, head_node_args={"num_cpus": 0})
    try:
        nodes = [cluster.add_node(num_cpus=1, num_gpus=1, object_store_memory=100 << 20) for _ in range(2)]

        def remove_while_busy() -> None:
            """Remove a node once each has a part, which it holds until there is the file."""
            until = time.monotonic() + 120
            while time.monotonic() < until and (not pids.is_file() or len(pids.read_text().split()) < 2):
                time.sleep(0.1)
            cluster.remove_node(nodes[1], allow_graceful=False)
            go.touch()

        remover = threading.Thread(target=remove_while_busy)
        remover.start()
        results = sweep(NAMES, TWO_PARTS, RayExecutor(repository, cluster.address), repository)
        remover.join()
    finally:
        cluster.shutdown()
    assert [each.failure for each in results] == [None, None]
    sides = len(NAMES) + 1
    assert (
        len(pids.read_text().split()) == sides * TWO_PARTS.parts + 1
    )  # what the node was doing was done again
    assert contents(repository) == local
