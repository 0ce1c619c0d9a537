import json
from pathlib import Path

import pytest

from slimqwen.evals.suites import questions, scorer
from slimqwen.text.files import CorpusError

CALL = {"name": "get_weather", "arguments": {"city": "Köln", "days": 2}}
CHAT = [{"role": "user", "content": "Weather?"}]
TOOLS = [{"type": "function", "function": {"name": "get_weather"}}]


def write_questions(folder: Path, *rows: object) -> Path:
    file = folder / "questions.jsonl"
    file.write_text("\r\n".join(json.dumps(row, ensure_ascii=False) for row in rows), encoding="utf-8-sig")
    return file


def item(**fields: object) -> dict[str, str]:
    return {"question": json.dumps(fields)}


def right(response: str, metric: scorer.Metric | None = None, **fields: object) -> bool:
    fields = fields if "messages" in fields else {"prompt": "?", **fields}
    score = questions.score_response(item(**fields), [response], metric)[questions.SCORE]
    assert score in (0.0, 1.0)
    return score == 1.0


def test_exact_ignores_case_spaces_and_a_full_stop():
    assert right(" Forty  two.\n", answer="forty two")
    assert not right("Forty two or three", answer="forty two")
    assert not right("", answer="forty two")


def test_contains_finds_the_answer_in_a_sentence():
    assert right("It is Forty two, I think.", "contains", answer="forty two")
    assert not right("It is forty-two.", "contains", answer="forty two")


@pytest.mark.parametrize(
    ("response", "chosen"),
    [
        ("B", "blue"),
        ("(B)", "blue"),
        ("B. because A is red", "blue"),
        ("Blue", "blue"),
        ("A dog has no colour, so C", "green"),
        ("The answer is C.", "green"),
        ("D", None),
        ("I do not know", None),
    ],
)
def test_a_choice_is_named_by_its_text_or_its_letter(response, chosen):
    choices = ["red", "blue", "green"]
    assert [answer for answer in choices if right(response, choices=choices, answer=answer)] == (
        [chosen] if chosen else []
    )


def called(*calls, text=""):
    """A response with tool calls: names, and arguments as the server states them, which is as text."""
    found = [{"name": name, "arguments": arguments} for name, arguments in calls]
    return right(scorer.response_text(text, found), messages=CHAT, tools=TOOLS, answer=CALL)


@pytest.mark.parametrize(
    ("name", "arguments", "is_right"),
    [
        ("get_weather", '{"days": 2, "city": "Köln"}', True),
        ("get_weather", '{"city": "K\\u00f6ln", "days": 2.0}', True),
        ("get_weather", '{"days": 2.5, "city": "Köln"}', False),
        ("get_weather", '{"days": "2", "city": "Köln"}', False),
        ("get_weather", '{"city": "Köln"}', False),
        ("get_weather", '{"days": 2, "city": "Köln", "unit": null}', False),
        ("get_weather", '{"days": 2, "city": "Köln"', False),
        ("get_weather", "", False),
        ("weather", '{"days": 2, "city": "Köln"}', False),
    ],
)
def test_a_tool_call_is_right_by_name_and_arguments(name, arguments, is_right):
    assert called((name, arguments)) == is_right
    assert called((name, arguments), text="I look it up.") == is_right


def test_one_call_that_the_server_found_is_right_and_no_other_number():
    call = ("get_weather", json.dumps(CALL["arguments"]))
    assert called(call)
    assert not called(call, call)
    assert not called(text=f"<tool_call>{json.dumps(CALL)}</tool_call>")


def test_true_is_not_one():
    fields = {"messages": CHAT, "tools": TOOLS, "answer": {"name": "switch", "arguments": {"on": True}}}
    for arguments, is_right in (('{"on": true}', True), ('{"on": 1}', False)):
        response = scorer.response_text("", [{"name": "switch", "arguments": arguments}])
        assert right(response, **fields) == is_right


def test_a_chat_passes_through_the_text_that_lm_eval_carries():
    messages = [{"role": "system", "content": "Be brief."}, *CHAT]
    text = questions.question_text(item(messages=messages, tools=TOOLS, answer=CALL))
    assert questions.chat_of([{"role": "user", "content": text}]) == (messages, TOOLS)
    assert questions.chat_of(CHAT) == (CHAT, None)
    assert questions.chat_of(CHAT + CHAT) == (CHAT + CHAT, None)


def test_a_request_has_the_arguments_of_an_earlier_call_as_text():
    message = {"role": "assistant", "tool_calls": [{"function": CALL}]}
    function = {**CALL, "arguments": json.dumps(CALL["arguments"])}
    assert questions.as_request(message)["tool_calls"] == [
        {"id": "call", "type": "function", "function": function}
    ]
    assert questions.as_request(CHAT[0]) == CHAT[0]


def test_choices_follow_the_prompt_under_letters():
    text = questions.question_text(item(prompt="Sky?", choices=["red", "blue"], answer="blue"))
    assert text.startswith("Sky?\nA. red\nB. blue\n")


def test_a_byte_order_mark_and_crlf_are_no_part_of_a_question(tmp_path):
    file = write_questions(
        tmp_path, {"prompt": "一加一?", "answer": "二"}, {"prompt": "1 + 2?", "answer": "3"}
    )
    assert [each.answer for each in questions.read_questions(file, None)] == ["二", "3"]


def test_every_unusable_line_is_named_at_once(tmp_path):
    file = write_questions(
        tmp_path,
        {"prompt": "1 + 1?", "answer": "2"},
        {"answer": "2"},
        {"prompt": "1 + 1?"},
        {"prompt": "Sky?", "choices": ["red", "blue"], "answer": "green"},
        {"prompt": "?", "answer": {"arguments": {}}},
        {"prompt": "?", "answer": CALL},
        {"prompt": "1 + 2?", "answer": True},
        *[{"frage": "1 + 1?", "answer": "2"}] * 5,
    )
    with pytest.raises(CorpusError) as raised:
        questions.read_questions(file, None)
    message = str(raised.value)
    assert "line 1:" not in message
    for fault in (
        "lines 2, 8, 9 and 3 more: give either prompt or messages",
        "line 3: answer: Field required",
        "line 4: the answer is none of the choices; write the choice itself, not its letter",
        "line 5: write an answer that is a tool call as {",
        "line 6: an answer that is a tool call needs `tools`",
        'line 7: answer: write it as text, such as "3", as a list of texts, or as {"name": …',
    ):
        assert fault in message


@pytest.mark.parametrize(
    ("metric", "row", "fault"),
    [
        ("choice", {"prompt": "?", "answer": "a"}, "the metric choice needs the field choices"),
        ("tool_call", {"prompt": "?", "answer": "a"}, "metric tool_call does not fit"),
        ("contains", {"messages": CHAT, "tools": TOOLS, "answer": CALL}, "metric contains does not fit"),
    ],
)
def test_a_metric_that_does_not_fit_an_answer_is_refused(tmp_path, metric, row, fault):
    with pytest.raises(CorpusError, match=fault):
        questions.read_questions(write_questions(tmp_path, row), metric)


def test_one_question_is_too_few(tmp_path):
    with pytest.raises(CorpusError, match="1 questions give no standard error"):
        questions.read_questions(write_questions(tmp_path, {"prompt": "1 + 1?", "answer": "2"}), None)
    with pytest.raises(CorpusError, match="put the questions there"):
        questions.read_questions(tmp_path / "absent.jsonl", None)


EMPTY = [
    {"prompt": "?", "answer": ""},
    {"prompt": "?", "answer": " 。"},
    {"prompt": "?", "answer": []},
    {"prompt": "?", "answer": ["a", ""]},
]


def test_empty_answers_and_equal_choices_are_refused_with_their_lines(tmp_path):
    twice = {"prompt": "?", "answer": "a", "choices": ["a", "A."]}
    with pytest.raises(CorpusError) as raised:
        questions.read_questions(
            write_questions(tmp_path, *EMPTY, twice, twice | {"choices": ["a", " "]}), None
        )
    assert "lines 1, 2, 3 and 1 more: answer: it is empty" in str(raised.value)
    assert "lines 5, 6: two choices are the same, or one is empty" in str(raised.value)


def test_each_of_several_answers_is_right():
    assert right("Deux", answer=["two", "deux"])
    assert not right("three", answer=["two", "deux"])
    assert right("B", choices=["red", "blue", "navy"], answer=["blue", "navy"])
    assert not right("A", choices=["red", "blue", "navy"], answer=["blue", "navy"])
    assert right("It is deux.", "contains", answer=["two", "deux"])
