import itertools
import json
from dataclasses import dataclass

import pytest

from slimqwen import variant
from slimqwen.evals import quality_comparison
from slimqwen.records import collection
from slimqwen.report import choice, leaderboard

ROOT = variant.repository_root()


@pytest.fixture(scope="module")
def committed():
    records = collection.collect(ROOT)
    rows = [row for name in variant.names(ROOT) for row in leaderboard.rows_of(records, name)[0]]
    return Board(rows)


@dataclass
class Board:
    """Rows, and what to serve."""

    rows: list[leaderboard.Row]

    @property
    def choices(self):
        return choice.choose_variants(self.rows)


@pytest.fixture
def board(tmp_path):
    def build():
        records = collection.collect(tmp_path)
        rows, problems = [], list(records.problems)
        for name in variant.names(tmp_path):
            of_variant, unusable = leaderboard.rows_of(records, name)
            rows += of_variant
            problems += unusable
        return Board(rows), {one.location: one.reason for one in problems}

    return build


def by_name(board, name):
    return next(row for row in board.rows if row.variant == name)


def test_every_variant_has_a_row_that_says_what_its_files_say(committed):
    assert {row.variant for row in committed.rows} == set(variant.names(ROOT))
    for row in committed.rows:
        claims = json.loads((ROOT / "experiments" / row.variant / "measurements.json").read_text())
        assert (row.hypothesis, row.baseline, row.status, row.verdict) == tuple(
            claims[key] for key in ("hypothesis", "baseline", "status", "verdict")
        )


def test_scores_and_their_changes_are_those_of_the_newest_pair(pair, add_record, board, tmp_path):
    pair()
    numbers = itertools.count()

    def worsen(record):
        for row in record["tasks"].values():
            row["value"] *= 0.75

    def worsen_each(item):
        return item | {"value": item["value"] * (0.5 if next(numbers) % 3 else 1)}

    add_record("quick", "quality", "2026-01-02T000000Z", edit=worsen, edit_items=worsen_each)
    row = by_name(board()[0], "quick")
    folders = [tmp_path / "experiments" / name for name in ("base", "quick")]
    compared = quality_comparison.compare_quality(*quality_comparison.pair_quality_records(*folders))
    assert [score.change for score in row.scores.values()] == compared
    assert {change.sign for change in compared} == {1, -1}
    for score, change in zip(row.scores.values(), compared, strict=True):
        assert score.row.value == pytest.approx(0.75 * change.first)
        gain, judgement = score.gain, change.judgement
        assert judgement.low < change.gain < judgement.high
        expected = change.gain, judgement.low, judgement.high
        assert (gain.value * 0.5, gain.low * 0.5, gain.high * 0.5) == pytest.approx(expected)
    table = leaderboard.leaderboard_table([row])
    for (_, task), change in zip(row.scores, compared, strict=True):
        difference, verdict = change.difference, change.judgement.verdict
        said = f"({difference.value:+.3f} ± {difference.standard_error:.3f}, {verdict})"
        assert table.rows[0][table.columns.index(task)].endswith(said)


def test_a_variant_that_passed_and_is_faster_is_the_one_to_serve(pair, board):
    pair()
    leaders, problems = board()

    assert problems == {}
    [choice] = leaders.choices
    assert (choice.baseline, choice.serve.variant) == ("base", "quick")
    speed = choice.serve.timed.speed
    assert speed.speedup == pytest.approx(2, rel=0.02)
    assert 1 < speed.interval[0] < 2 < speed.interval[1]
    table = leaderboard.leaderboard_table([choice.serve])
    text = "{:.2f}x [{:.2f}, {:.2f}]".format(speed.speedup, *speed.interval)
    assert table.rows[0][table.columns.index("speed-up [95 %]")] == f"{text} (classes)"
    assert choice.serve.missing == ["gate"]
    assert choice.advice[0].startswith("Serve quick on ")
    assert f"{text} as fast over the workload classes; worst task " in choice.advice[0]


def test_a_pair_in_turns_over_any_workload_counts_and_is_named(pair, board):
    pair(edit=lambda record: record.update(workload="own"), workload="own")
    leaders, _ = board()
    assert "over the workload own" in leaders.choices[0].advice[0]


def test_the_command_that_supplies_what_is_missing_is_named(pair, board, tmp_path):
    pair()
    for file in (tmp_path / "experiments" / "quick").glob("latency_*"):
        file.unlink()
    leaders, _ = board()
    [found] = leaders.choices
    assert found.advice[0].startswith("Serve base on ")
    assert found.advice[1] == "quick lacks a current gate record: `slimqwen gate --variant quick`."


def test_a_speed_of_another_checkpoint_than_was_scored_is_none_to_serve_for(pair, board):
    def earlier(record):
        record["provenance"]["checkpoint"]["digest"] = "e" * 64

    pair(edit=earlier)
    leaders, _ = board()
    row = by_name(leaders, "quick")
    assert row.timed.is_faster
    assert leaders.choices[0].serve is None
    assert row.doubts == ["latency and quality are of different checkpoints"]


def test_a_speed_of_another_build_counts_and_is_said(pair, add_record, board, tmp_path):
    def built(digest):
        return lambda record: record["provenance"]["checkpoint"].update(
            digest=digest * 64, recipe_key="1" * 64
        )

    pair(edit=built("e"))
    for file in (tmp_path / "experiments" / "quick").glob("quality_*.json"):
        record = json.loads(file.read_text())
        built("f")(record)
        file.write_text(json.dumps(record))
    leaders, _ = board()
    row = by_name(leaders, "quick")
    assert (row.doubts, leaders.choices[0].serve) == ([], row)
    assert leaders.choices[0].advice[-1] == "quick: latency measured on another build of quick."


def test_a_gain_within_its_interval_is_not_to_be_served(pair, board):
    pair(factor=0.999)
    leaders, _ = board()
    row = by_name(leaders, "quick")
    assert row.timed.speed.speedup > 1
    assert (row.timed.is_faster, leaders.choices[0].serve) == (False, None)
    assert leaders.choices[0].candidate == row


def test_times_of_two_runs_are_no_speed_up(pair, board):
    def on_another_day(record):
        record["run"] = "2026-02-01T00:00:00Z"

    pair(edit=on_another_day)
    leaders, _ = board()
    row = by_name(leaders, "quick")
    assert (row.timed.speed, row.timed.comparison, leaders.choices[0].serve) == (None, (), None)
    table = leaderboard.leaderboard_table([row])
    assert table.rows[0][table.columns.index("speed-up [95 %]")] == "not timed in turns"


def test_without_a_pass_in_quality_nothing_is_to_be_served(pair, board, tmp_path):
    pair()
    for file in (tmp_path / "experiments" / "quick").glob("quality_*"):
        file.unlink()
    leaders, _ = board()
    row = by_name(leaders, "quick")
    assert (row.timed.is_faster, leaders.choices[0].serve) == (True, None)


@pytest.mark.parametrize("baseline", ["nobody", "quick"])
def test_a_baseline_that_is_not_there_is_named_and_takes_its_claims_along(pair, claim, board, baseline):
    pair()
    claim("quick", baseline=baseline)
    leaders, problems = board()
    assert "its baseline" in problems["experiments/quick/measurements.json"]
    row = by_name(leaders, "quick")
    assert (row.status, row.baseline, leaders.choices) == ("unreadable", None, [])
    assert row.scores


@pytest.mark.parametrize("changes", [{"status": "rejected"}, {"verdict": "fail"}])
def test_what_a_person_rejected_or_a_verdict_failed_is_not_to_be_served(pair, claim, board, changes):
    pair()
    claim("quick", **{"verdict": "pass", "status": "measured"} | changes)
    leaders, _ = board()
    assert by_name(leaders, "quick").standing in ("rejected", "fail")
    assert (leaders.choices[0].serve, leaders.choices[0].candidate) == (None, None)


def test_a_variant_whose_engine_responds_wrongly_is_not_to_be_served(pair, add_record, board):
    pair()

    def respond_wrongly(record):
        record["engines"][0]["wrong"] = {"alone": [513]}

    add_record("quick", "engine", edit=respond_wrongly)
    leaders, _ = board()

    assert leaders.choices[0].serve is None
    assert by_name(leaders, "quick").doubts == ["its newest engine record fails"]


def test_records_of_an_earlier_checkpoint_are_marked_and_do_not_give_scores(add_variant, add_record, board):
    def of_checkpoint(digest, value):
        def edit(record):
            record["provenance"]["checkpoint"]["digest"] = digest * 64
            for row in record["tasks"].values():
                row["value"] = value

        return edit

    add_variant("base", "VLLM_MODEL=weights/base\n")
    add_record("base", "quality", "2026-01-01T000000Z", edit=of_checkpoint("a", 0.1))

    def later(record):
        of_checkpoint("b", 0.2)(record)
        record["provenance"]["ended"] = "2027-01-01T00:00:00Z"

    add_record("base", "quality", "2027-01-01T000000Z", edit=later)
    add_record("base", "latency")
    leaders, _ = board()

    row = by_name(leaders, "base")
    assert {score.row.value for score in row.scores.values()} == {0.2}
    assert {each.kind for each in row.evidence if each.is_stale} == {"latency"}
    assert "latency" in row.missing


def test_damaged_items_cost_the_paired_change_alone_and_are_named(pair, board, tmp_path):
    pair()
    [items] = (tmp_path / "experiments" / "quick").glob("quality_*.items.jsonl")
    items.unlink()
    items.write_text("not what was measured\n")
    leaders, problems = board()

    row = by_name(leaders, "quick")
    assert row.scores
    assert row.worst is None
    assert [location for location in problems if "quick/quality" in location]


def test_times_on_other_hardware_are_a_row_of_their_own(pair, add_record, board):
    pair()

    def on_gpu(record):
        record["provenance"]["hardware"]["gpus"] = [{"name": "NVIDIA X", "memory_bytes": 1, "driver": "1"}]

    add_record("quick", "latency", "2026-02-01T000000Z", edit=on_gpu)
    leaders, _ = board()

    rows = [row for row in leaders.rows if row.variant == "quick"]
    assert {(row.hardware == "NVIDIA X", row.on_cpu) for row in rows} == {(True, False), (False, True)}
    assert {row.timed.speed is None for row in rows if row.hardware == "NVIDIA X"} == {True}
