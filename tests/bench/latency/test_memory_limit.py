"""What memory bandwidth allows, for the embedded model and for this host."""

from pathlib import Path

import pytest

from slimqwen import variant
from slimqwen.bench.latency import memory_limit
from slimqwen.bench.latency.memory_limit import find_bandwidth, shortest_tpot_ms
from slimqwen.checkpoint.tensors import list_tensors
from slimqwen.fit.memory import ServerSettings
from slimqwen.fit.subject import variant_subject
from slimqwen.plan import host_gpus
from slimqwen.plan.devices import UnknownGpuError

TINY = variant.load("tiny")


def test_a_step_reads_about_the_language_models_weights_once() -> None:
    tensors = {name: info for name, info in list_tensors(TINY.weights).items() if "mtp" not in name}
    limit_ms = shortest_tpot_ms(TINY, 1e9, context_len=0, sequences=1, acceptance_length=None)
    assert limit_ms == pytest.approx(1e-6 * sum(each.end - each.start for each in tensors.values()), rel=0.1)


def test_the_limit_falls_with_bandwidth_and_acceptance_and_grows_with_context_and_drafts() -> None:
    drafting = variant.load("tiny-best")
    depth = ServerSettings.of(variant_subject(drafting), None, None).depth
    plain, drafted = (shortest_tpot_ms(drafting, 1e9, 100, 1, each) for each in (None, float(depth + 1)))
    assert plain
    assert drafted
    assert plain < drafted * (depth + 1) < plain * (depth + 1)
    assert shortest_tpot_ms(drafting, 2e9, 100, 1, None) == pytest.approx(plain / 2)
    assert (shortest_tpot_ms(drafting, 1e9, 3000, 1, None) or 0) > plain
    assert shortest_tpot_ms(drafting, 1e9, 100, 1, (depth + 1) / 2) == pytest.approx(drafted * 2)


@pytest.mark.parametrize(
    "lines", [{"VLLM_TENSOR_PARALLEL_SIZE": "2"}, {"VLLM_SPECULATIVE_CONFIG": '{"method": "ngram"}'}]
)
def test_no_limit_is_claimed_for_a_step_that_is_not_counted(lines: dict[str, str]) -> None:
    assert shortest_tpot_ms(TINY.with_lines(lines), 1e9, 100, 1, 1.5) is None


def test_a_cpus_bandwidth_is_the_fastest_that_was_measured(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    first = find_bandwidth("cpu", tmp_path)
    assert first
    for measured, found in ((first / 2, first), (first * 2, first * 2), (first, first * 2)):
        monkeypatch.setattr(memory_limit, "_measure_copy", lambda measured=measured: measured)
        assert find_bandwidth("cpu", tmp_path) == found


def test_a_copy_reads_and_writes_each_byte(monkeypatch: pytest.MonkeyPatch) -> None:
    moments = iter([0.0, 3.0, 10.0, 12.0, 20.0, 24.0])
    monkeypatch.setattr(memory_limit, "_COPIES", 3)
    monkeypatch.setattr(memory_limit, "_COPIED_BYTES", 2**20)
    monkeypatch.setattr(memory_limit.time, "perf_counter", lambda: next(moments))
    assert memory_limit._measure_copy() == 2 * 2**20 / 2.0


def test_a_gpus_bandwidth_is_that_of_its_data_sheet(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    a10g = host_gpus.choose_gpu("a10g", TINY.root)
    monkeypatch.setattr(memory_limit, "choose_gpu", lambda name, root: a10g)
    assert find_bandwidth("cuda", tmp_path) == 600e9

    def unknown(name: None, root: Path) -> None:
        raise UnknownGpuError("not listed")

    monkeypatch.setattr(memory_limit, "choose_gpu", unknown)
    assert find_bandwidth("cuda", tmp_path) is None
