"""Questions as people keep them in tables and JSON are asked and scored as meant, or refused with all faults."""

import json
from pathlib import Path

import pyarrow
import pytest
from pyarrow import parquet

from slimqwen.evals.suites import questions
from slimqwen.text.files import CorpusError

TABLE = """Question;Answer;Answer 2;Choices;Tolerance
"Capital of France;
one word?";Paris;Lutetia;;
Colour of the sky?;blue;;red|blue;
g in m/s²?;9,81;;;0,05
Inhabitants?;1.000.000;;;5 %
Say yes;yes|ja;;;
"""
EXPECTED = [
    {"prompt": "Capital of France;\none word?", "answer": ["Paris", "Lutetia"]},
    {"prompt": "Colour of the sky?", "answer": "blue", "choices": ["red", "blue"]},
    {"prompt": "g in m/s²?", "answer": "9,81", "tolerance": "0,05"},
    {"prompt": "Inhabitants?", "answer": "1.000.000", "tolerance": "5 %"},
    {"prompt": "Say yes", "answer": ["yes", "ja"]},
]


def read(file: Path) -> list[dict[str, object]]:
    return [each.model_dump(exclude_none=True) for each in questions.read_questions(file, None)]


@pytest.mark.parametrize("name", ["questions.csv", "questions.json", "questions.jsonl", "questions.parquet"])
def test_every_format_gives_the_same_questions(tmp_path: Path, name: str) -> None:
    file = tmp_path / name
    if file.suffix == ".csv":
        file.write_text(TABLE, encoding="utf-8-sig")
    elif file.suffix == ".parquet":
        rows = [{**each, "answer": json.dumps(_several(each["answer"]))} for each in EXPECTED]
        parquet.write_table(pyarrow.Table.from_pylist(rows, schema=_SCHEMA), file)
    else:
        lines = [json.dumps(each) for each in EXPECTED]
        file.write_text("\n".join(lines) if file.suffix == ".jsonl" else f"[{','.join(lines)}]")
    found = [{**each, "answer": _several(each["answer"])} for each in read(file)]
    assert found == [{**each, "answer": _several(each["answer"])} for each in EXPECTED]


_SCHEMA = pyarrow.schema(
    [(name, pyarrow.string()) for name in ("prompt", "answer", "tolerance")]
    + [("choices", pyarrow.list_(pyarrow.string()))]
)


def _several(answer: object) -> object:
    return answer if isinstance(answer, list) else [answer]


@pytest.mark.parametrize(
    ("response", "number", "is_right"),
    [
        ("The answer is 9.79.", 2, True),
        ("9.75", 2, False),
        ("960,000", 3, True),
        ("940,000", 3, False),
        ("Lutetia", 0, True),
        ("B", 1, True),
        ("Ja.", 4, True),
    ],
)
def test_rows_of_a_table_are_scored_by_their_answers_and_tolerance(
    tmp_path: Path, response: str, number: int, is_right: bool
) -> None:
    (tmp_path / "questions.csv").write_text(TABLE, encoding="utf-8-sig")
    item = questions.item_rows(questions.read_questions(tmp_path / "questions.csv", None))[number]
    assert questions.score_response(item, [response], None) == {questions.SCORE: float(is_right)}


def test_columns_named_by_letters_hold_the_choices(tmp_path: Path) -> None:
    file = tmp_path / "questions.csv"
    file.write_text("question,A,B,C,answer\nSky?,red,blue,,B\nGrass?,green,blue,red,green\n")
    assert read(file) == [
        {"prompt": "Sky?", "answer": "blue", "choices": ["red", "blue"]},
        {"prompt": "Grass?", "answer": "green", "choices": ["green", "blue", "red"]},
    ]


def test_chats_with_tools_stand_in_cells_as_json(tmp_path: Path) -> None:
    call = {"name": "weather", "arguments": {}}
    chat = {"messages": [{"role": "user", "content": "Rain?"}], "tools": [{"function": {"name": "weather"}}]}
    row = "\t".join(json.dumps(each) for each in (chat["messages"], chat["tools"], call))
    quoted = "\t".join('"' + cell.replace('"', '""') + '"' for cell in row.split("\t"))
    (tmp_path / "questions.tsv").write_text("messages\ttools\tanswer\n" + f"{quoted}\n" * 2)
    assert read(tmp_path / "questions.tsv") == [chat | {"answer": call}] * 2


def test_numbers_are_answers(tmp_path: Path) -> None:
    rows = [{"prompt": "?", "answer": 3, "tolerance": 0.5}, {"prompt": "?", "answer": [1, 2.5]}]
    (tmp_path / "questions.json").write_text(json.dumps(rows))
    assert [each["answer"] for each in read(tmp_path / "questions.json")] == ["3", ["1", "2.5"]]


def test_all_faults_of_a_table_come_at_once(tmp_path: Path) -> None:
    file = tmp_path / "questions.csv"
    file.write_text(
        "prompt,answer,choices,tolerance\n"
        "fine?,yes,,\n"
        ",yes,,\n"
        "?,,,\n"
        "?,3,,much\n"
        "?,three,,1\n"
        "?,a,b|c,\n"
        "?,a\n"
        '?,"[1",,\n'
    )
    with pytest.raises(CorpusError) as raised:
        questions.read_questions(file, None)
    assert [fault.removeprefix(f"{file}, ").partition("; ")[0] for fault in raised.value.faults] == [
        "line 3: give either prompt or messages",
        "line 4: answer: it is empty",
        "line 5: tolerance: 'much' is no tolerance",
        "line 6: a tolerance needs an answer that is a number, and no choices",
        "line 7: the answer is none of the choices",
        "line 8: 2 fields, but the first line has 4",
        "line 9: not JSON in a cell (Expecting ',' delimiter: line 1 column 3 (char 2))",
    ]


def test_what_was_understood_of_questions_is_one_line(tmp_path: Path) -> None:
    (tmp_path / "questions.csv").write_text(TABLE, encoding="utf-8-sig")
    found = questions.read_questions(tmp_path / "questions.csv", None)
    assert questions.describe(found, None) == (
        "5 questions (4 exact, 1 choice), 2 with several right answers, 2 with a tolerance"
    )
