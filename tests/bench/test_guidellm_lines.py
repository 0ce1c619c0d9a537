"""The command lines of GuideLLM for a workload: lengths, arrivals and numbers of requests are those of its classes."""

import shlex

import pytest

from slimqwen import variant
from slimqwen.bench import BenchError
from slimqwen.bench.guidellm_lines import list_lines
from slimqwen.bench.workload import Workload

ROOT = variant.repository_root()


def lines_of(name: str, context: int = 8448, sequences: int = 4) -> list[str]:
    return list_lines(Workload.load(name, ROOT), "http://h:1", "default", "/tok", context, sequences)


def options(line: str) -> dict[str, str]:
    words = shlex.split(line)
    assert words[:2] == ["guidellm", "run"]
    return dict(zip(words[2::2], words[3::2], strict=True))


def test_each_class_has_a_line_with_its_lengths_and_all_requests_of_its_rounds() -> None:
    short, *others = lines_of("classes")
    assert len(others) == 2
    assert options(short) == {
        "--backend": "kind=openai_http,target=http://h:1,model=default,request_format=/v1/completions",
        "--tokenizer": "kind=huggingface_auto,model=/tok",
        "--data": "kind=synthetic_text,prompt_tokens=64,output_tokens=128",
        "--profile": "kind=concurrent,streams=1",
        "--constraint": "kind=max_requests,count=96",
        "--seed": "kind=static,value=20260101",
        "--output": "kind=json,path=classes-short.json",
    }


def test_a_shorter_context_shortens_the_lengths_as_the_workload_does() -> None:
    assert "prompt_tokens=992,output_tokens=31" in lines_of("classes", context=1024)[2]


def test_a_sweep_of_the_concurrency_and_arrivals_have_their_profiles() -> None:
    assert [options(line)["--profile"] for line in lines_of("concurrency")] == [
        f"kind=concurrent,streams={n}" for n in (1, 2, 4)
    ]
    assert [options(line)["--profile"] for line in lines_of("arrivals")] == [
        "kind=concurrent,streams=1", "kind=throughput", "kind=constant,rate=40",
    ]  # fmt: skip


def test_a_rate_that_is_not_known_yet_is_left_to_fill_in_and_said() -> None:
    lines = lines_of("poisson")
    at = lines.index("# RATE: 0.25 times the requests a second of upfront")
    line = next(line for line in lines[at:] if not line.startswith("#"))
    assert options(line)["--profile"] == "kind=poisson,rate=RATE"
    assert "prompt_tokens_stdev=136,output_tokens_stdev=68" in line  # 256 and 128 times sqrt(exp(0.25) - 1)


@pytest.mark.parametrize("name", ["prefix_cache", "agent"])
def test_a_load_that_guidellm_does_not_draw_is_refused(name: str) -> None:
    with pytest.raises(
        BenchError, match=f"^{name} sends .*, which GuideLLM cannot; choose a workload of new"
    ):
        lines_of(name)
