"""The committed tasks are what the frozen tool writes, and their scorers tell right from wrong."""

import importlib.util
import json
from pathlib import Path

import pytest
from tinyworld.tasks import TASK_FOLDER, build_items, write_items
from tinyworld.world import World

FOLDER = Path(__file__).parents[2] / TASK_FOLDER
SPEC = importlib.util.spec_from_file_location("scoring", FOLDER / "scoring.py")
scoring = importlib.util.module_from_spec(SPEC)
SPEC.loader.exec_module(scoring)
SCORERS = {"facts": scoring.facts, "format": scoring.format_followed, "twohop": scoring.twohop}


@pytest.fixture(scope="module")
def items():
    return build_items(World())


def score_answer(task, row, text):
    return SCORERS[task](row, [text])["exact_match"]


def test_committed_data_equals_its_regeneration(items, tmp_path):
    write_items(items, tmp_path)
    written = {file.name: file.read_bytes() for file in tmp_path.iterdir()}
    assert written == {file.name: file.read_bytes() for file in FOLDER.glob("*.jsonl")}


def test_stored_answers_score_right_and_others_wrong(items):
    for row in items["facts"][:50]:
        wrong = next(option for option in row["options"] if option != row["answer"])
        assert score_answer("facts", row, f"{row['answer']}<|im_end|>")
        assert not score_answer("facts", row, wrong)
        assert not score_answer("facts", row, f"{row['answer']} {wrong}")
    for row in items["format"]:
        assert score_answer("format", row, row["answer"])
        assert not score_answer("format", row, "")
        if row["kind"] != "starts":
            assert not score_answer("format", row, row["answer"] + " and more")
    for row in items["twohop"][:50]:
        assert score_answer("twohop", row, f"{row['reasoning']}\n</think>\n\n{row['answer']}")
        assert not score_answer("twohop", row, row["answer"]), "an unfinished thought is no answer"
        assert not score_answer("twohop", row, f"{row['answer']}\n</think>\n\n")


def row_of(items, kind):
    return next(row for row in items["format"] if row["kind"] == kind)


def test_a_list_may_be_any_but_not_short_doubled_banned_or_foreign(items):
    row = row_of(items, "list")
    arguments = json.loads(row["arguments"])
    good = row["answer"].split(", ")
    assert score_answer("format", row, ", ".join(reversed(good)))
    assert not score_answer("format", row, ", ".join(good[:-1]))
    assert not score_answer("format", row, ", ".join([*good[:-1], good[0]]))
    assert not score_answer("format", row, ", ".join([*good[:-1], arguments["banned"]]))
    assert not score_answer("format", row, ", ".join([*good[:-1], "submarine"]))


def test_a_line_must_name_the_person_and_end_with_the_word(items):
    row = row_of(items, "ends")
    arguments = json.loads(row["arguments"])
    person, word = arguments["person"], arguments["word"]
    assert score_answer("format", row, f"By night {person} saw a {word}.")
    assert not score_answer("format", row, f"By night somebody saw a {word}.")
    assert not score_answer("format", row, f"By night {person} saw a {word} again")
    assert not score_answer("format", row, f"{person} {word}")


@pytest.mark.parametrize(("gold", "margin"), [(1, 1.5), (2, -1.5)])
def test_margin_is_right_minus_best_wrong(gold, margin):
    results = [(value, False) for value in (-3.0, -1.0, -2.5)]
    score = scoring.answer_margin({"gold": gold}, results)
    assert score == {"answer_margin_nats": margin, "acc": float(margin > 0)}
