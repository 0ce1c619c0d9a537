"""What follows from the engine's counters; `tests/evals/test_acceptance.py` has the engine itself."""

import pytest

from slimqwen.serving.draft_counts import DraftCounts, needed_context


def test_length_and_rates_follow_from_the_counters() -> None:
    counted = DraftCounts(drafts=10, accepted_per_position=(8, 5, 1), output_tokens=24, seconds=1.0)
    assert counted.mean_length == pytest.approx(2.4)


@pytest.mark.parametrize(
    ("tokens", "depth", "context"), [(100, 0, 112), (100, 7, 112), (104, 7, 112), (105, 7, 128)]
)
def test_a_whole_draft_has_room_after_the_last_token(tokens: int, depth: int, context: int) -> None:
    assert needed_context(tokens, depth) == context
