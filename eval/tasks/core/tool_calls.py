"""The task tool_calls: several tools are offered, one is right, and the question states every argument.

lm-eval calls `items`, `text` and `score` by `!function`; it passes its metadata beside the dataset_kwargs.
"""

import random
from typing import Any

from datasets import Dataset

from slimqwen.evals.suites.questions import Question, item_rows, question_text, score_response

_VERBS = ("create", "update", "cancel", "find", "schedule", "archive", "approve", "export")
_NOUNS = ("bill", "shipment", "meeting", "ticket", "booking", "contract", "survey", "payment")

_STRING = {"type": "string"}
_LEAVES: dict[str, dict[str, Any]] = {
    "reference": _STRING,
    "owner": _STRING,
    "city": _STRING,
    "due_date": {"type": "string", "format": "date"},
    "quantity": {"type": "integer", "minimum": 1},
    "retry_limit": {"type": "integer"},
    "weight_kg": {"type": "number"},
    "distance_km": {"type": "number"},
    "urgent": {"type": "boolean"},
    "notify_owner": {"type": "boolean"},
    "priority": {"enum": ["low", "normal", "high"], **_STRING},
    "currency": {"enum": ["CHF", "EUR", "GBP", "JPY", "USD"], **_STRING},
    "labels": {"type": "array", "items": {"enum": ["audit", "draft", "export", "legal", "rush"], **_STRING}},
}
_GROUPS: dict[str, dict[str, dict[str, Any]]] = {
    "address": {"street": _STRING, "city": _STRING, "floor": {"type": "integer"}},
    "contact": {"name": _STRING, "language": {"enum": ["de", "en", "fr"], **_STRING}},
    "window": {
        "start_hour": {"type": "integer"},
        "days": {"type": "integer"},
        "flexible": {"type": "boolean"},
    },
}
_OFFERED, _REQUIRED, _OPTIONAL = 4, 3, 3

text = question_text


def items(count: int, seed: int, **_: Any) -> dict[str, Dataset]:
    """The items of the task."""
    return {"test": Dataset.from_list(item_rows(make_tool_questions(count, seed)))}


def score(item: dict[str, str], responses: list[str]) -> dict[str, float]:
    """Score one response."""
    return score_response(item, responses, "tool_call")


def make_tool_questions(count: int, seed: int) -> list[Question]:
    """Make questions whose answer is a tool call; equal `count` and `seed` give equal questions."""
    rng = random.Random(seed)
    return [_make_question(rng) for _ in range(count)]


def _make_question(rng: random.Random) -> Question:
    verb, noun = rng.choice(_VERBS), rng.choice(_NOUNS)
    # The wrong tools have the same verb with another noun, or another verb with the same noun.
    near = [(each, noun) for each in _VERBS if each != verb] + [
        (verb, each) for each in _NOUNS if each != noun
    ]
    names = [(verb, noun), *rng.sample(near, _OFFERED - 1)]
    tools = [_make_tool(*each, rng) for each in names]
    right = tools[0]["function"]
    parameters = right["parameters"]
    optional = [name for name in parameters["properties"] if name not in parameters["required"]]
    stated = {*parameters["required"], optional[0]}  # the call must leave out what the request does not state
    arguments = {
        name: _choose_value(schema, rng)
        for name, schema in parameters["properties"].items()
        if name in stated
    }
    fields = "; ".join(f"{_label(name)}: {_say(value)}" for name, value in arguments.items())
    rng.shuffle(tools)
    return Question(
        messages=[
            {
                "role": "user",
                "content": f"{verb.capitalize()} a {noun} with these fields and no others. {fields}.",
            }
        ],
        tools=tools,
        answer={"name": right["name"], "arguments": arguments},
    )


def _make_tool(verb: str, noun: str, rng: random.Random) -> dict[str, Any]:
    group = rng.choice(sorted(_GROUPS))
    properties: dict[str, dict[str, Any]] = {
        name: _LEAVES[name] for name in rng.sample(sorted(_LEAVES), _REQUIRED + _OPTIONAL - 1)
    }
    parts = _GROUPS[group]
    properties[group] = {"type": "object", "properties": parts, "required": list(parts)}
    names = rng.sample(sorted(properties), len(properties))
    parameters = {
        "type": "object",
        "properties": {name: properties[name] for name in names},
        "required": rng.sample(names, _REQUIRED),
    }
    described = {"name": f"{verb}_{noun}", "description": f"{verb.capitalize()} a {noun}."}
    return {"type": "function", "function": {**described, "parameters": parameters}}


def _choose_value(schema: dict[str, Any], rng: random.Random) -> Any:
    match schema:
        case {"enum": values}:
            return rng.choice(values)
        case {"items": {"enum": values}}:
            return rng.sample(values, 2)
        case {"properties": parts}:
            return {name: _choose_value(part, rng) for name, part in parts.items()}
        case {"type": "integer"}:
            return rng.randrange(2, 500)
        case {"type": "number"}:
            return rng.randrange(2, 500) + 0.5
        case {"type": "boolean"}:
            return rng.random() < 0.5
        case {"format": "date"}:
            return f"2027-{rng.randrange(1, 13):02}-{rng.randrange(1, 29):02}"
    return rng.choice(("Alder", "Birch", "Cedar", "Hazel", "Maple", "Rowan")) + f"-{rng.randrange(100, 1000)}"


def _say(value: Any) -> str:
    match value:
        case bool():
            return "yes" if value else "no"
        case list():
            return " and ".join(value)
        case dict():
            return ", ".join(f"{_label(name)} {_say(part)}" for name, part in value.items())
    return str(value)


def _label(name: str) -> str:
    return name.replace("_", " ")
