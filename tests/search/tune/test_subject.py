"""The requests of a tuning: how many at a time."""

import pytest

from slimqwen import variant
from slimqwen.bench.workload import Workload
from slimqwen.search.tune.subject import TuneSubject


@pytest.mark.parametrize(
    ("served", "given", "loads", "sequences"),
    [
        ("1", None, [1], None),
        ("8", None, [1, 4, 8], None),
        ("", None, [1, 4, 16], None),
        ("8", [2, 16, 2], [2, 16], 16),
    ],
    ids=["one", "eight", "no limit", "given"],
)
def test_loads_go_up_to_what_the_variant_serves_at_a_time_unless_they_are_given(
    served, given, loads, sequences
):
    one = variant.load("tiny").with_lines({"VLLM_MAX_NUM_SEQS": served})
    subject = TuneSubject.of_variant(one, Workload.load("classes", one.root), given, None, sessions=False)
    assert (subject.loads, subject.sequences) == (loads, sequences)
