"""Phases, parts and operators of real requests, in the real engine."""

import gzip
import json
from collections.abc import Callable
from pathlib import Path

import pytest

from slimqwen import variant
from slimqwen.bench import profile
from slimqwen.bench.workload import Workload
from slimqwen.records import store

ROOT = Path(__file__).parents[2]
WORKLOAD = """
documents: tinyworld
seed: 1
reference_context_tokens: 128
min_tokens: 2
warmup_requests: 0
rounds: 1
sampling: {temperature: 0}
classes:
  short: {prompt_tokens: 8, output_tokens: 24, requests: 2}
  long: {prompt_tokens: 96, output_tokens: 4, requests: 2}
"""


@pytest.mark.engine
def test_a_request_is_told_apart_by_phase_part_and_operator(
    tmp_path: Path, add_variant: Callable[..., Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(profile, "PROFILED_TOKENS", 3)
    drafts = '{"method": "mtp", "num_speculative_tokens": 2}'
    add_variant(
        "tiny",
        "VLLM_MODEL=weights/tiny\nVLLM_DTYPE=bfloat16\nVLLM_MAX_MODEL_LEN=128\nVLLM_MAX_NUM_SEQS=1\n"
        f"VLLM_ENABLE_PREFIX_CACHING=0\nVLLM_ENFORCE_EAGER=1\nVLLM_SPECULATIVE_CONFIG='{drafts}'\n",
    )
    (tmp_path / "weights").mkdir()
    (tmp_path / "weights" / "tiny").symlink_to(ROOT / "weights" / "tiny")
    (tmp_path / "eval" / "workloads").mkdir(parents=True)
    (tmp_path / "eval" / "workloads" / "small.yaml").write_text(WORKLOAD)
    one = variant.load("tiny", tmp_path)
    traces = tmp_path / "traces"
    path = profile.write(one, Workload.load("small", tmp_path), 2, traces, command=["x"])
    record = store.read(path, profile.Profile)
    assert [(row.class_, row.prompt_tokens, row.output_tokens) for row in record.classes] == [
        ("short", 8, 24),
        ("long", 96, 4),
    ]
    for row in record.classes:
        assert all(seconds.value >= 0 for seconds in row.seconds.values())
        whole = sum(seconds.value for seconds in row.seconds.values())
        assert row.decode_share == pytest.approx(row.seconds["decode"].value / whole)
        assert sum(row.step.values()) == pytest.approx(1)
        assert {"forward", "sample", "draft"} <= row.step.keys()
        assert len(row.operators) == profile.OPERATORS
        assert sum(operator.share for operator in row.operators) <= 1
        with gzip.open(traces / f"{row.class_}.trace.json.gz") as trace:
            assert json.load(trace)["traceEvents"]
    assert [len(table.rows) for table in record.tables(path)] == [2, 10]
    assert len(record.panels()) == 2
