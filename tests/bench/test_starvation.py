import re

import pytest

from slimqwen.bench import BenchError, starvation

TPOT, ITL = "vllm:request_time_per_output_token_seconds", "vllm:inter_token_latency_seconds"
BEFORE = {f"{TPOT}_sum": 7.0, f"{TPOT}_count": 70.0, f"{ITL}_sum": 9.0, f"{ITL}_count": 900.0}


def after(tpot_s=0.008, itl_s=0.008, requests=16, gaps=240):
    gained = {
        f"{TPOT}_sum": tpot_s * requests,
        f"{TPOT}_count": requests,
        f"{ITL}_sum": itl_s * gaps,
        f"{ITL}_count": gaps,
    }
    return {name: BEFORE[name] + value for name, value in gained.items()}


def answer(gaps_ms, tokens=16, error=None):
    span = sum(gaps_ms)
    return {
        "ttft_ms": 20.0,
        "e2el_ms": 20.0 + span,
        "tpot_ms": span / max(1, tokens - 1),
        "itl_ms": list(gaps_ms),
        "output_tokens": tokens,
        "error": error,
    }


EVEN, AT_ONCE = [8.0] * 15, [0.01] * 15


@pytest.mark.parametrize(
    ("answers", "counters"),
    [
        ([answer(EVEN)] * 16, after()),
        ([answer([9.5] * 15)] * 16, after()),  # the way over HTTP takes time too
        ([answer([0.0, 16.0] * 7 + [8.0])] * 16, after()),  # two at once, the whole as long as it was
        ([answer([20.0] * 3, tokens=16)] * 16, after(tpot_s=0.004, itl_s=0.02)),  # drafts: five tokens a step
        ([answer(EVEN)] * 15 + [answer(AT_ONCE, error="gone")], after()),
        ([answer([], tokens=1)] * 4, after()),
        ([answer(AT_ONCE)] * 16, BEFORE),  # nothing was counted
    ],
)
def test_gaps_that_the_server_can_have_made_are_accepted(answers, counters):
    assert starvation.fault(answers, BEFORE, counters) == ""


@pytest.mark.parametrize(
    ("answers", "reason"),
    [
        ([answer(EVEN)] * 15 + [answer(AT_ONCE)], "an answer's tokens came 0.0 ms apart .* was 8.0 ms"),
        ([answer([], tokens=16)], "an answer's tokens came 0.0 ms apart"),
        ([answer([0.01] * 8 + [8.0] * 7)] * 16, "TPOT was 3.7 ms and by the server's own clock 8.0 ms"),
    ],
)
def test_tokens_that_came_faster_than_they_were_generated_show_a_busy_host(answers, reason):
    assert re.match(reason, starvation.fault(answers, BEFORE, after()))


def test_a_server_without_the_counters_is_an_error():
    starvation.require_counters(BEFORE)
    with pytest.raises(BenchError, match="VLLM_DISABLE_LOG_STATS"):
        starvation.require_counters({"vllm:num_requests_running": 0.0})
