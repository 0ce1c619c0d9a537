import json
from collections import Counter

import jsonschema
import pytest

from eval.tasks.core.tool_calls import make_tool_questions

QUESTIONS = make_tool_questions(200, 20261126)


def functions(question):
    return {tool["function"]["name"]: tool["function"] for tool in question.tools}


def described(question):
    """Schema of the tool that the answer calls."""
    return functions(question)[question.answer["name"]]["parameters"]


def test_questions_are_the_same_for_a_seed_and_differ_from_each_other():
    assert make_tool_questions(20, 20261126) == QUESTIONS[:20] != make_tool_questions(20, 1)
    assert len({json.dumps(question.answer) for question in QUESTIONS}) == 200


def test_one_of_four_offered_tools_is_right_and_the_others_are_near_it():
    positions = Counter()
    for question in QUESTIONS:
        names = list(functions(question))
        assert len(names) == 4
        verb, noun = question.answer["name"].split("_")
        assert question.messages[0]["content"].startswith(f"{verb.capitalize()} a {noun} with ")
        assert all((verb in name) != (noun in name) for name in names if name != question.answer["name"])
        positions[names.index(question.answer["name"])] += 1
    assert min(positions.values()) > 25


def test_arguments_fit_the_schema_and_leave_optional_fields_out():
    for question in QUESTIONS:
        schema, arguments = described(question), question.answer["arguments"]
        jsonschema.validate(arguments, {**schema, "additionalProperties": False})
        assert len(schema["properties"]) == 6
        assert len(schema["required"]) == 3
        assert len(arguments) == 4


def said(value):
    if isinstance(value, dict):
        return [word for part in value.values() for word in said(part)]
    if isinstance(value, list):
        return value
    return [{True: "yes", False: "no"}[value] if isinstance(value, bool) else str(value)]


def test_a_request_states_every_argument_and_no_other():
    for question in QUESTIONS:
        fields = question.messages[0]["content"].partition(" others. ")[2].removesuffix(".").split("; ")
        stated = dict(field.split(": ") for field in fields)
        arguments = question.answer["arguments"]
        assert list(stated) == [name.replace("_", " ") for name in arguments]
        for text, value in zip(stated.values(), arguments.values(), strict=True):
            assert all(word in text for word in said(value))


@pytest.mark.parametrize(
    "kind", ["string", "integer", "number", "boolean", "array", "object", "enum", "format"]
)
def test_every_kind_of_field_is_asked_for(kind):
    asked = Counter()
    for question in QUESTIONS:
        for name in question.answer["arguments"]:
            schema = described(question)["properties"][name]
            asked.update([schema["type"], *(each for each in ("enum", "format") if each in schema)])
    assert asked[kind] >= 20


def test_values_leave_no_doubt_about_their_types():
    """An integer is not 0 or 1, which equal booleans, and a number is no integer."""
    for question in QUESTIONS:
        for name, value in question.answer["arguments"].items():
            match described(question)["properties"][name]["type"]:
                case "integer":
                    assert value > 1
                case "number":
                    assert value % 1 == 0.5
