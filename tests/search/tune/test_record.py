"""What the record of a tuning says: whether drafts pay, at which load, and which lines to write."""

from pathlib import Path

from slimqwen.records import store
from slimqwen.search.tune.arms import UNDRAFTED
from slimqwen.search.tune.contest import Contest
from slimqwen.search.tune.record import Tune
from slimqwen.stats.verdict import Verdict
from tests.search.tune.turns import ARMS, K2, K4, record_of, turn


def contest(**speeds: tuple[float, float]) -> Contest:
    """Three rounds of arms at loads 1 and 4; the undrafted runs at 100 and 200 tokens a second."""
    made = Contest((UNDRAFTED, *(ARMS[name] for name in speeds)), {})
    for number in range(3):
        made.add_turn(turn(UNDRAFTED, number, {1: 100, 4: 200}))
        for name, (one, four) in speeds.items():
            made.add_turn(turn(ARMS[name], number, {1: one + number, 4: four + number}, drafts=10))
    return made


def test_it_says_that_drafts_pay_at_which_load_and_what_to_write() -> None:
    lines = {"VLLM_SPECULATIVE_CONFIG": "'{}'"}
    advice = record_of(contest(k2=(150, 220), k4=(160, 150)), "MTP K=2", lines).advice
    assert advice[0].startswith("Drafts pay: MTP K=2 is 1.29 [1.2")
    assert advice[0].endswith("times as fast as no drafts over the loads 1, 4.")
    assert advice[1].startswith("At load 1: drafts pay, the fastest is MTP K=4 with 1.61 [")
    assert advice[2].startswith("At load 4: drafts pay, the fastest is MTP K=2 with 1.1")
    assert advice[3] == "Write into config.env: VLLM_SPECULATIVE_CONFIG='{}'"


def test_it_says_plainly_that_drafts_do_not_pay() -> None:
    advice = record_of(contest(k2=(50, 120), k4=(40, 50)), "none", {}).advice
    assert advice[0].startswith("Drafts do not pay here: the fastest, MTP K=2, is 0.5")
    assert advice[1].startswith("At load 1: drafts do not pay, the fastest is MTP K=2 with 0.5")
    assert advice[-1] == "Its config.env stays as it is."


def test_it_names_those_that_cannot_be_told_from_the_fastest() -> None:
    made = contest(k2=(150, 300), k4=(149, 301))
    assert made.verdict == Verdict.PASS
    fastest = made.find_fastest()
    assert fastest is not None
    (close,) = {K2.name, K4.name} - {fastest.name}
    assert f"Perhaps as fast as {fastest.name}: {close}." in record_of(made, fastest.name, {}).advice


def test_an_open_verdict_asks_for_more_minutes() -> None:
    made = Contest((UNDRAFTED, K2), {})
    for arm, speed in ((UNDRAFTED, 100), (K2, 130)):
        made.add_turn(turn(arm, 0, {1: speed}))
    advice = record_of(made, None, {}).advice
    assert advice == [
        "Not decided: the fastest, MTP K=2, is 1.30 (a single round) times as fast as none.",
        "The same command with more --minutes continues.",
    ]


def test_without_anything_that_drafts_it_says_so() -> None:
    made = Contest((UNDRAFTED, K2), {K2.name: "vLLM refuses it"})
    made.add_turn(turn(UNDRAFTED, 0, {1: 100}))
    record = record_of(made, "none", {})
    assert record.advice[0].startswith("Nothing that drafts could be measured")
    (shown,) = record.tables(Path("tune_x.json"))
    assert "MTP K=2: vLLM refuses it." in shown.notes


def test_the_table_has_a_row_for_each_arm_and_load(tmp_path: Path) -> None:
    made = contest(k2=(150, 220), k4=(40, 50), ngram=(60, 70))
    made.end_slow_arms()
    record = record_of(made, "MTP K=2", {})
    path = store.write_record(tmp_path / "experiments" / "a", record, [{"arm": "none"}])
    kept = store.read_record(path, Tune)
    (shown,) = kept.tables(path)
    assert [row[:3] for row in shown.rows] == [
        ("MTP K=2", "chosen", "1"), ("MTP K=2", "chosen", "4"), ("none", "measured", "1"), ("none", "measured", "4"),
        ("ngram K=4", "surely slower than the best", "1"), ("ngram K=4", "surely slower than the best", "4"),
        ("MTP K=4", "surely slower than the best", "1"), ("MTP K=4", "surely slower than the best", "4"),
    ]  # fmt: skip
    assert shown.rows[0][3:5] == ("151.0", "1.51 [1.49, 1.54]")
    assert shown.rows[0][6:] == ("4.00", "512", "3")
    assert shown.rows[2][4] == "-"
    figures = kept.figures()
    (name,) = (
        name for name in figures if "MTP K=2" in name and name.endswith("tokens_per_second") and "4" in name
    )
    assert figures[name].unit == "tokens/s"
