"""The values of a real server's `/metrics`."""

from pathlib import Path

import pytest

from slimqwen.serving import metrics

REAL = (Path(__file__).parent / "data" / "metrics.txt").read_text(encoding="utf-8")
"""Text of vLLM 0.32 with MTP at K=4 after six requests; families that nothing here reads left out."""


def test_counters_gauges_and_buckets_are_read_from_the_real_text():
    values = metrics.read_metrics(REAL)
    assert values["vllm:prompt_tokens_total"] == 40
    assert values["vllm:generation_tokens_total"] == 407
    assert values["vllm:num_requests_waiting"] == 0
    assert values["vllm:time_to_first_token_seconds_bucket/0.25"] == 6


def test_engines_are_summed_but_for_the_share_of_the_kv_cache():
    text = "".join(
        f'{name}{{engine="{engine}"}} {value}\n'
        for name in ("vllm:kv_cache_usage_perc", "vllm:num_requests_running")
        for engine, value in ((0, 0.25), (1, 0.5))
    )
    values = metrics.read_metrics(text)
    assert values == {"vllm:kv_cache_usage_perc": 0.5, "vllm:num_requests_running": 0.75}


def test_another_format_is_a_value_error():
    with pytest.raises(ValueError, match=r"."):
        metrics.read_metrics("<html>not metrics</html>")
