"""The rehearsal of step c of `make gpu-check` at K = 1, in this process."""

import pytest

from slimqwen import variant
from tests.gpu.engines import check_depth, in_this_process, rehearsed


@pytest.mark.engine
def test_one_draft_and_a_prefix_cache_change_no_token() -> None:
    subject, settings = rehearsed(variant.repository_root())
    cached, plain = check_depth(subject, 1, settings, in_this_process(subject.weights))
    assert [cached["verdict"], plain["verdict"]] == ["pass", "pass"], (cached, plain)
    assert (cached["title"], plain["title"]) == ("K=1, prefix cache on", "K=1, prefix cache off")
    assert cached["cached_tokens"] > 0
    assert min(cached["accepted_drafts"], plain["accepted_drafts"]) > 0
    assert (cached["sequences"], plain["sequences"]) == (4, 4)
