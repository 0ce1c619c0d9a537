import hashlib

import numpy as np
import pytest

from slimqwen.evals import runaways
from slimqwen.evals.changed_items import changed_items_table, list_changed_items
from slimqwen.evals.checks.quality import find_response_limits
from slimqwen.evals.runaways import ResponseLimits, compare_responses, responses_table
from slimqwen.stats import sequential
from slimqwen.variant import repository_root
from tests import record_files

FACTS = "example_facts"
LIMITS = ResponseLimits(runaway_share=0.01, assumed_discordance=0.002, length_growth=0.1)
FINE = {"output": "iron", "truncated": False, "looping": False, "output_tokens": 2}
RUNAWAYS = {
    "token limit": FINE | {"truncated": True},
    "loop": FINE | {"looping": True},
    "loop of an old record": {"output": "na " * 40, "truncated": False},
    "empty": FINE | {"output": " \n"},
}


@pytest.fixture
def write(tmp_path, stamps):
    """Write a variant's quality record of these responses; other fields of an item may be among them."""

    def quality(variant, responses, **changes):
        body = record_files.example("quality", variant=variant, **changes)
        items = [
            {
                "task": FACTS,
                "item": hashlib.sha256(str(n).encode()).hexdigest()[:16],
                "value": 1.0,
                "weight": 1.0,
            }
            | response
            for n, response in enumerate(responses)
        ]
        return record_files.write(tmp_path / variant, body, items)

    return quality


def spread(count, among, response=RUNAWAYS["token limit"]):
    """So many runaway responses among others, at places that do not follow the items' order."""
    chosen = {*np.random.default_rng(7).permutation(among)[:count].tolist()}
    return [response if n in chosen else FINE for n in range(among)]


@pytest.mark.parametrize(("count", "verdict"), [(0, "pass"), (9, "inconclusive"), (22, "fail")])
def test_of_450_responses_none_that_runs_away_passes_nine_decide_nothing_and_22_fail(write, count, verdict):
    compared = compare_responses(write("a", spread(0, 450)), write("b", spread(count, 450)), LIMITS)
    assert (compared.runaway.verdict, compared.second.runaway) == (verdict, count)
    finding = compared.findings()[0]
    assert (finding.verdict, finding.items_needed) == (verdict, compared.items_planned)
    assert compared.items_planned > 450
    assert finding.value == pytest.approx(count / 450)


@pytest.mark.parametrize("response", RUNAWAYS.values(), ids=RUNAWAYS)
def test_each_way_to_run_away_counts_also_in_an_old_record(write, response):
    compared = compare_responses(write("a", spread(0, 450)), write("b", spread(22, 450, response)), LIMITS)
    assert (compared.second.runaway, compared.runaway.verdict) == (22, "fail")


def test_responses_of_which_both_run_away_are_no_loss(write):
    compared = compare_responses(write("a", spread(22, 450)), write("b", spread(22, 450)), LIMITS)
    assert (compared.first.runaway, compared.verdicts) == (22, ["pass", "pass"])


def test_responses_that_grow_by_more_than_the_limit_fail(write):
    longer = [FINE | {"output_tokens": 2 + n % 3} for n in range(450)]
    compared = compare_responses(write("a", spread(0, 450)), write("b", longer), LIMITS)
    assert (compared.runaway.verdict, compared.length.verdict) == ("pass", "fail")
    assert compared.length_growth == pytest.approx(0.5)


def test_tasks_that_generate_nothing_have_no_such_check(write):
    paths = write("a", [{"output": None}] * 4), write("b", [{}] * 4)
    assert compare_responses(*paths, LIMITS) is None
    assert responses_table(*paths, LIMITS) is None


def test_a_loss_of_the_limit_passes_in_at_most_a_fortieth_of_runs():
    rng = np.random.default_rng(3)
    gains = -(rng.random((4000, 2000)) < 0.01).astype(float)
    passed = sequential.answers_p_value(gains, -0.01, sequential.RARE_SHARE) <= sequential.ALPHA
    assert passed.mean() <= sequential.ALPHA + 3 * np.sqrt(sequential.ALPHA / 4000)


def test_the_table_has_each_count_of_both_sides(write):
    responses = [*RUNAWAYS.values(), *[FINE] * 446]
    table = responses_table(write("a", spread(0, 450)), write("b", responses), LIMITS)
    assert [row[:3] for row in table.rows[:4]] == [
        ("run away, in all", "0 of 450", "4 of 450"),
        ("hit the token limit", "0", "1"),
        ("loop", "0", "2"),
        ("are empty", "0", "1"),
    ]


def test_every_gate_that_is_shipped_limits_responses_that_run_away():
    for suite in ("core", "tinyworld"):
        assert find_response_limits(suite, repository_root()).runaway_share == 0.01
    assert find_response_limits("none", repository_root()) is None


def test_items_that_changed_come_worst_first_with_what_is_needed_to_read_them(write):
    asked = {"question": "What does the town sell?", "expected": "iron"}
    before = [FINE | asked, FINE, FINE, FINE | {"value": 0.0}]
    after = [FINE | asked | {"output": "wool", "value": 0.0}, FINE, RUNAWAYS["token limit"], FINE]
    paths = write("a", before), write("b", after)
    assert [(row.gain < 0, row.runaway_gain) for row in list_changed_items(*paths)] == [
        (True, 0), (False, -1), (False, 0),
    ]  # fmt: skip
    table = changed_items_table(*paths, most=2)
    assert table.rows[0] == ("facts", "What does the town sell?", "iron", "iron", "wool", "1 → 0")
    assert table.rows[1][4] == "iron (token limit)"
    assert table.title == "Items that changed: the 2 worst of 3, of which 2 are worse"
    assert changed_items_table(paths[0], paths[0]) is None


def test_an_item_that_runs_away_is_told_from_one_without_a_response():
    assert not runaways.runs_away({"output": None})
    assert not runaways.runs_away(FINE)
