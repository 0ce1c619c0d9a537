"""Phases, parts and operators of real requests, in the real engine."""

import gzip
import json
from collections.abc import Callable
from pathlib import Path

import pytest

from slimqwen import variant
from slimqwen.evaluation import profile, workload
from slimqwen.records import results
from slimqwen.report import plots

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
    found = profile.profile(one, workload.load("small", tmp_path), 2, tmp_path / "traces")
    short, long = found["classes"]
    assert [(row["class"], row["prompt_tokens"], row["output_tokens"]) for row in (short, long)] == [
        ("short", 8, 24),
        ("long", 96, 4),
    ]
    for row in (short, long):
        assert all(seconds["value"] >= 0 for seconds in row["seconds"].values())
        assert sum(row["step"].values()) == pytest.approx(1)
        assert {"forward", "sample", "draft"} <= row["step"].keys()
        assert len(row["operators"]) == profile.OPERATORS
        assert sum(each["share"] for each in row["operators"]) <= 1
        with gzip.open(tmp_path / "traces" / f"{row['class']}.trace.json.gz") as trace:
            assert json.load(trace)["traceEvents"]
    # 24 tokens after 8 are decoding, 4 after 96 hardly.
    assert short["decode_share"] > long["decode_share"]
    file = results.write(
        "profile",
        one,
        found,
        command=["x"],
        started="2026-01-01T00:00:00Z",
    )
    assert plots.beside(file).is_file()
    assert json.loads(file.read_text())["classes"] == found["classes"]
