"""The time of a request by phase, part and operator."""

import argparse

import profile_model
import pytest

from slimqwen import variant

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
"""


@pytest.mark.engine
def test_requests_are_told_apart_by_phase_part_and_operator(
    tiny: variant.Variant, monkeypatch: pytest.MonkeyPatch
):
    # vLLM reads whether it records parts of a step once a process, and earlier tests have had an engine.
    monkeypatch.setattr("vllm.v1.utils._PROFILER_FUNC", None)
    (tiny.root / "eval" / "workloads").mkdir(parents=True)
    (tiny.root / "eval" / "workloads" / "small.yaml").write_text(WORKLOAD)
    options = argparse.Namespace(workload="small", requests=2)
    table, figures = profile_model.explore_requests(tiny, options)
    [row] = figures["classes"]
    assert row["class"] == "short 8 -> 24"
    assert row["seconds"].keys() == {"queue", "prefill", "decode"}
    assert {"forward", "sample"} <= row["step"].keys()
    assert sum(row["step"].values()) == pytest.approx(1)
    shares = [share for *_, share in row["operators"]]
    assert len(shares) == profile_model.OPERATORS
    assert shares == sorted(shares, reverse=True)
    assert 0 < sum(shares) <= 1
    assert list((tiny.root / "logs" / "profile-tiny").glob("short_*.json.gz"))
    assert len(table.rows) == 1
