import pytest

from slimqwen.bench.latency.figures import summarise
from slimqwen.bench.workload import ServiceLevel
from slimqwen.stats.intervals import TooFewItemsError


def row(ttft_ms=100.0, itl_ms=(10.0, 10.0, 10.0), error=None):
    e2el_ms = ttft_ms + sum(itl_ms)
    return {
        "prompt_tokens": 6,
        "output_tokens": len(itl_ms) + 1,
        "ttft_ms": ttft_ms,
        "tpot_ms": sum(itl_ms) / len(itl_ms),
        "e2el_ms": e2el_ms,
        "itl_ms": list(itl_ms),
        "error": error,
    }


def test_a_summary_counts_only_what_succeeded():
    summary = summarise([row(100), row(300), row(9000, error="gone")], duration_s=2)
    assert (summary["request_count"], summary["failure_count"]) == (3, 1)
    assert summary["request_throughput_per_s"] == 1
    assert summary["output_throughput_tokens_per_s"] == 4
    assert summary["total_throughput_tokens_per_s"] == 4 + 6
    expected = {"mean": 200, "standard_error": pytest.approx(100), "median": 200}
    assert summary["ttft_ms"].as_json() == expected
    assert summary["e2el_ms"].mean == 230


def test_intervals_count_each_but_requests_are_the_units():
    summary = summarise([row(itl_ms=[10.0] * 9), row(itl_ms=[100.0])], duration_s=1)
    assert summary["itl_ms"].mean == pytest.approx(19)
    assert summary["itl_ms"].median == 10
    assert summary["tpot_ms"].mean == pytest.approx(55)


@pytest.mark.parametrize(
    ("requests", "shown"),
    [
        (9, set()),
        (10, {"p90"}),
        (20, {"p90", "p95"}),
        (99, {"p90", "p95"}),
        (100, {"p90", "p95", "p99"}),
    ],
)
def test_percentiles_appear_only_where_the_sample_supports_them(requests, shown):
    summary = summarise([row(float(n)) for n in range(requests)], duration_s=1)
    for measure in ("ttft_ms", "tpot_ms", "itl_ms", "e2el_ms"):
        assert set(summary[measure].as_json()) - {"mean", "standard_error", "median"} == shown


def test_failures_alone_give_no_figure():
    with pytest.raises(TooFewItemsError):
        summarise([row(), row(error="gone")], duration_s=1)


def test_goodput_counts_the_requests_that_meet_both_limits():
    rows = [row(100), row(900), row(100, itl_ms=[90.0] * 3), row(100, error="gone")]
    level = ServiceLevel(ttft_ms=500, tpot_ms=50)
    expected = {"ttft_ms": 500, "tpot_ms": 50, "good_count": 1, "requests_per_s": 0.5}
    assert summarise(rows, 2, level)["goodput"].as_json() == expected
    assert summarise(rows, 2)["goodput"] is None
