"""Result files of GuideLLM, AIPerf and `vllm bench serve`, as these wrote them, and files that are none."""

import json
from pathlib import Path

import pytest

from slimqwen.bench import BenchError, external_results
from slimqwen.bench.external_results import read_external

FILES = Path(__file__).parent / "external_results"
"""Six requests of 16 tokens each, two at a time, to a server that waits 20 ms, then 4 ms a token, on a busy host, by
GuideLLM 0.8.1, AIPerf 0.13.0 and vLLM 0.32.0; cut down to fewer fields."""


def edited(folder: Path, name: str, **changes: object) -> Path:
    file = folder / name
    file.write_text(json.dumps(json.loads((FILES / name).read_text()) | changes))
    return file


def content(name: str) -> dict:
    return json.loads((FILES / name).read_text())


def test_guidellm_s_medians_are_those_of_a_latency_record() -> None:
    (run,) = read_external(FILES / "guidellm.json")
    (benchmark,) = content("guidellm.json")["benchmarks"]
    median = {
        name: each["successful"]["median"]
        for name, each in benchmark["metrics"].items()
        if "totals" not in name
    }
    assert (run.tool, run.model, run.load) == ("GuideLLM 0.8.1", "default", "2 at a time")
    assert (run.requests, run.failures, run.output_tokens) == (6, 0, 16)
    assert run.ttft_ms == median["time_to_first_token_ms"]
    # Its time per output token counts the first one, too.
    assert run.tpot_ms == median["inter_token_latency_ms"] < median["time_per_output_token_ms"]
    assert run.e2el_ms == pytest.approx(run.ttft_ms + 15 * run.tpot_ms, rel=0.05)


def test_aiperf_s_medians_are_those_of_a_latency_record() -> None:
    (run,) = read_external(FILES / "aiperf.json")
    said = content("aiperf.json")
    assert (run.tool, run.model, run.load) == ("AIPerf 0.13.0", "default", "2 at a time")
    assert (run.requests, run.failures) == (6, 0)
    assert run.output_tokens == said["output_sequence_length"]["avg"]  # by its own tokenizer
    assert (run.ttft_ms, run.tpot_ms, run.e2el_ms) == tuple(
        said[name]["p50"] for name in ("time_to_first_token", "inter_token_latency", "request_latency")
    )


def test_vllm_bench_s_medians_are_those_of_a_latency_record() -> None:
    (run,) = read_external(FILES / "vllm_bench.json")
    said = content("vllm_bench.json")
    assert (run.tool, run.model, run.load) == ("vllm bench serve", "default", "2 at a time")
    assert (run.requests, run.failures, run.output_tokens) == (6, 0, 16)
    assert (run.ttft_ms, run.tpot_ms) == (said["median_ttft_ms"], said["median_tpot_ms"])
    assert run.e2el_ms is None  # it was not asked for


def test_the_seeds_and_what_they_count_of_drafts_are_named_as_not_comparable(tmp_path: Path) -> None:
    limits = {
        name: read_external(FILES / f"{name}.json")[0].limits for name in ("guidellm", "aiperf", "vllm_bench")
    }
    assert "drawn by its own seed 20260101" in limits["guidellm"][0]
    assert "no acceptance length" in limits["guidellm"][1]
    assert "drawn by its own seed 7" in limits["aiperf"][0]
    assert "by a seed that its file does not state" in limits["vllm_bench"][0]
    (run,) = read_external(edited(tmp_path, "vllm_bench.json", spec_decode_acceptance_length=2.5))
    assert run.limits[1] == "its acceptance length of 2.50 is of its own prompts"


def test_a_file_to_which_vllm_appended_has_several_runs(tmp_path: Path) -> None:
    file = edited(tmp_path, "vllm_bench.json", request_rate=2.0)
    file.write_text(f"{file.read_text()}\n{(FILES / 'vllm_bench.json').read_text()}\n")
    assert [run.load for run in read_external(file)] == ["2/s, Poisson", "2 at a time"]


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("", "holds no benchmark run"),
        ("[1]", "is no JSON file"),
        ("not json", "is no JSON file; name GuideLLM's"),
        ('{"a": 1}', "is not a result file of a known load generator; name GuideLLM's"),
        ("[" * 100_000, "is no JSON file"),
    ],
)
def test_any_other_file_is_refused_in_one_line(text: str, said: str, tmp_path: Path) -> None:
    file = tmp_path / "x.json"
    file.write_text(text)
    with pytest.raises(BenchError, match=said) as refused:
        read_external(file)
    assert "\n" not in str(refused.value)


def test_a_missing_file_and_one_that_is_too_large_are_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(BenchError, match="No such file or directory; name a result file"):
        read_external(tmp_path / "none.json")
    monkeypatch.setattr(external_results, "MOST_BYTES", 10)
    with pytest.raises(BenchError, match="name a smaller file"):
        read_external(FILES / "aiperf.json")


@pytest.mark.parametrize(
    ("name", "changes", "said"),
    [
        (
            "guidellm.json",
            {"benchmarks": [{}]},
            r"cannot be read as a result of GuideLLM: benchmarks\.0\.config: field required",
        ),
        ("guidellm.json", {"benchmarks": []}, "holds no benchmark run"),
        ("aiperf.json", {"was_cancelled": True}, "cannot be read as a result of AIPerf: was_cancelled"),
        ("aiperf.json", {"request_latency": {"unit": "ms", "p50": -1}}, r"request_latency\.p50"),
        (
            "vllm_bench.json",
            {"median_ttft_ms": float("nan")},
            "median_ttft_ms: input should be a finite number",
        ),
        ("vllm_bench.json", {"completed": 0}, "no request of vllm bench serve succeeded"),
    ],
)
def test_a_run_that_did_not_end_or_lacks_a_figure_is_refused_with_its_field(
    name: str, changes: dict[str, object], said: str, tmp_path: Path
) -> None:
    with pytest.raises(BenchError, match=said):
        read_external(edited(tmp_path, name, **changes))
