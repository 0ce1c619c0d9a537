"""The schedule of draft depths by batch size, from curves made by hand, as vLLM itself reads it."""

import json
from collections.abc import Sequence

import pytest

from slimqwen.evals.depth_schedule import DepthRange, DepthSchedule, Speeds, graph_sizes, of_speeds


def ranges(fixed: Speeds, scheduled: Speeds | None = None) -> list[tuple[int, int, int]]:
    schedule = of_speeds("a curve", fixed, scheduled or fixed)
    return [(each.first, each.last, each.depth) for each in schedule.ranges]


@pytest.mark.parametrize(
    ("speeds", "expected"),
    [
        pytest.param(
            {0: [10, 20, 30, 40], 2: [18, 30, 31, 32], 4: [25, 29, 30, 31]},
            [(1, 1, 4), (2, 3, 2), (4, 4, 0)],
            id="shallower as the batch grows, none at last",
        ),
        pytest.param({0: [10, 20, 30], 1: [15, 30, 45], 4: [12, 24, 36]}, [(1, 3, 1)], id="one everywhere"),
        pytest.param({0: [10, 20], 4: [9, 18]}, [(1, 2, 0)], id="no drafts anywhere"),
        pytest.param({1: [10, 20, 30], 2: [10, 20, 30]}, [(1, 3, 1)], id="equal: the shallowest"),
        pytest.param(
            {1: [10, 20, 40, 10], 2: [11, 20, 30, 12]},
            [(1, 2, 2), (3, 3, 1), (4, 4, 2)],
            id="equal: the one before stays; a depth may come back",
        ),
        pytest.param({4: [10]}, [(1, 1, 4)], id="one batch size"),
    ],
)
def test_each_batch_size_gets_its_fastest_depth(
    speeds: Speeds, expected: Sequence[tuple[int, int, int]]
) -> None:
    assert ranges(speeds) == expected


def test_differences_of_rounding_make_no_ranges() -> None:
    assert ranges({1: [0.3, 3.0], 2: [0.1 + 0.2, 3.0 * (1 - 1e-12)]}) == [(1, 2, 1)]


def test_a_schedule_that_loses_to_a_fixed_depth_gives_way_to_it() -> None:
    """At depth 0 an engine with a schedule makes a draft pass nevertheless."""
    fixed = {0: [10.0, 20.0, 40.0], 3: [10.1, 15.0, 20.0]}
    idle = {0: [9.0, 18.0, 36.0], 3: fixed[3]}
    assert ranges(fixed) == [(1, 1, 3), (2, 3, 0)]
    assert ranges(fixed, idle) == [(1, 3, 0)]
    schedule = of_speeds("a curve", fixed, idle)
    assert [load.tokens_per_second for load in schedule.loads] == fixed[0]
    assert schedule.config_line() == "VLLM_SPECULATIVE_CONFIG="
    assert graph_sizes(schedule.ranges) == "1,2,3"


def test_the_gain_is_over_the_best_fixed_depth_and_may_be_a_loss() -> None:
    fixed = {0: [10.0, 20.0, 40.0, 80.0], 3: [30.0, 40.0, 41.0, 42.0]}
    idle = {0: [9.0, 18.0, 36.0, 72.0], 3: fixed[3]}
    schedule = of_speeds("a curve", fixed, idle)
    assert schedule.fixed_depth == 3
    assert [(load.batch_size, load.depth) for load in schedule.loads] == [(1, 3), (2, 3), (3, 3), (4, 0)]
    assert [load.gain for load in schedule.loads] == pytest.approx([0, 0, 0, 72 / 42 - 1])
    fixed[3] = [30.0, 22.0, 23.0, 24.0]
    schedule = of_speeds("a curve", fixed, idle | {3: fixed[3]})
    assert schedule.fixed_depth == 0
    assert [load.gain for load in schedule.loads] == pytest.approx([2, 0.1, -0.1, -0.1])


def test_of_many_batch_sizes_the_ends_of_ranges_and_powers_of_two_are_shown() -> None:
    schedule = of_speeds("a curve", *[{1: [2.0] * 5 + [1.0] * 15, 3: [1.0] * 5 + [2.0] * 15}] * 2)
    assert [load.batch_size for load in schedule.loads] == [1, 2, 4, 5, 6, 8, 16, 20]
    assert [row[0] for row in schedule.table("x").rows] == [str(load.batch_size) for load in schedule.loads]


def test_graph_sizes_are_the_tokens_of_a_step() -> None:
    assert graph_sizes([DepthRange(first=1, last=8, depth=4)]) == "5,10,15,20,25,30,35,40"
    assert graph_sizes([DepthRange(first=1, last=2, depth=0)]) == "1,2"


def lookup(schedule: DepthSchedule, max_num_seqs: int) -> list[int]:
    """Depth by batch size as vLLM's scheduler expands the line of config.env."""
    from vllm.v1.spec_decode.dynamic.utils import build_dynamic_sd_schedule_lookup

    speculation = json.loads(schedule.config_line().removeprefix("VLLM_SPECULATIVE_CONFIG=").strip("'"))
    return build_dynamic_sd_schedule_lookup(
        speculation["num_speculative_tokens_per_batch_size"],
        max_num_seqs,
        speculation["num_speculative_tokens"],
    )[1:]


def test_vllm_reads_the_line_as_it_was_fitted() -> None:
    speeds = {0: [1.0, 1.0, 3.0], 2: [1.0, 2.0, 1.0], 4: [2.0, 1.0, 1.0]}
    schedule = of_speeds("a curve", speeds, speeds)
    assert lookup(schedule, 5) == [4, 2, 0, 0, 0]
    assert graph_sizes(schedule.ranges) == "3,5,6"


def test_a_single_depth_needs_no_schedule() -> None:
    speeds = {0: [1.0, 1.0], 4: [2.0, 2.0]}
    line = of_speeds("a curve", speeds, speeds).config_line()
    assert line == 'VLLM_SPECULATIVE_CONFIG=\'{"method": "mtp", "num_speculative_tokens": 4}\''
