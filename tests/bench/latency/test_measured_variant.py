import pytest

from slimqwen.bench.latency import figures
from slimqwen.bench.latency.measured_variant import ClassResults
from slimqwen.bench.workload import PromptClass

SHORT = PromptClass(name="short", prompt_tokens=4, output_tokens=5, requests=2)
ANSWERS = {
    "duration": 1.0,
    "output_lens": [5],
    "ttfts": [0.1],
    "latencies": [0.5],
    "errors": [""],
    "itls": [[0.1]],
}
REQUESTS = [([1] * 4, 5)]


@pytest.mark.parametrize(
    ("answers", "error"),
    [
        ({}, None),
        ({"output_lens": [3]}, "the stream ended after 3 of 5 tokens"),
        (
            {"errors": ["Traceback\n  File x\nServerDisconnectedError: gone\n"]},
            "ServerDisconnectedError: gone",
        ),
    ],
)
def test_an_early_end_is_a_failure_and_of_a_traceback_the_last_line_is_kept(answers, error):
    (row,) = ClassResults().add(SHORT, 0, REQUESTS, ANSWERS | answers)
    assert row["error"] == error


def test_acceptance_is_pooled_over_rounds():
    result = ClassResults()
    for drafts, accepted, rates in ((10, 15, [1.0, 0.5]), (30, 15, [0.5, 0.0])):
        counted = {
            "spec_decode_num_drafts": drafts,
            "spec_decode_draft_tokens": 2 * drafts,
            "spec_decode_accepted_tokens": accepted,
            "spec_decode_per_position_acceptance_rates": rates,
        }
        result.add(SHORT, 0, REQUESTS, ANSWERS | counted)
    acceptance = figures.acceptance(result)
    assert acceptance.length == pytest.approx(1 + 30 / 40)
    assert acceptance.per_position_rates == pytest.approx([25 / 40, 5 / 40])
    assert acceptance.draft_tokens == 80
