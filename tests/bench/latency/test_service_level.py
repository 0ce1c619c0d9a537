from pathlib import Path

import pytest

from slimqwen.bench.latency import Latency
from slimqwen.bench.latency.service_level import best, good_throughput
from slimqwen.records import store

PATH = Path(__file__).parent / "data" / "latency_2026-11-22T063548Z.json"


@pytest.fixture(scope="module")
def loads():
    return {load.prompt_class: load for load in good_throughput(store.read(PATH, Latency), PATH)}


def test_tokens_are_those_of_the_requests_within_both_limits(loads):
    record = store.read(PATH, Latency)
    items = store.read_items(PATH)
    for name, figures in record.classes.items():
        answered = [item for item in items if item["class"] == name and item["error"] is None]
        good = [item for item in answered if item["ttft_ms"] <= 500 and item["tpot_ms"] <= 50]
        assert len(good) == figures.goodput.good_count
        tokens = sum(item["output_tokens"] for item in good)
        assert loads[name].tokens_per_s == pytest.approx(tokens / figures.duration_s)
        low, high = loads[name].interval
        assert 0 <= low < loads[name].tokens_per_s < high


def test_the_best_load_is_the_one_that_yields_most(loads):
    assert best(list(loads.values())).prompt_class == "load-0.75"
    assert loads["load-0.75"].rate_per_s == pytest.approx(4.11, abs=0.01)
    assert loads["upfront"].rate_per_s is None
    assert best([]) is None


def test_a_workload_without_a_service_level_has_none():
    path = PATH.with_name("latency_2026-11-22T062857Z.json")
    assert good_throughput(store.read(path, Latency), path) == []
