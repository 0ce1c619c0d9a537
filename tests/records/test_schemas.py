import copy
import json
from pathlib import Path

import pytest

from slimqwen.records import store

DATA = Path(__file__).parent / "data"
SCHEMAS = {
    file.name: json.loads(file.read_text()) for file in Path(store.__file__).parent.glob("schemas/*.json")
}
ITEMS = {"file": "x.items.jsonl", "sha256": "ab" * 32, "count": 8}


def whole(kind):
    record = json.loads((DATA / f"{kind}.json").read_text())
    return record if kind == "measurements" else {**record, "items": ITEMS}


def required_fields(schema, value, file, path=()):
    """Every required field of the schema that the value has, as a path into the value."""
    if "$ref" in schema:
        target, _, pointer = schema["$ref"].partition("#/")
        file = target or file
        schema = SCHEMAS[file]
        for step in pointer.split("/"):
            schema = schema[step]
        yield from required_fields(schema, value, file, path)
    elif isinstance(value, dict):
        yield from ((*path, name) for name in schema.get("required", []))
        for name, part in value.items():
            inner = schema.get("properties", {}).get(name, schema.get("additionalProperties"))
            if isinstance(inner, dict):
                yield from required_fields(inner, part, file, (*path, name))
    elif isinstance(value, list) and "items" in schema:
        for number, part in enumerate(value):
            yield from required_fields(schema["items"], part, file, (*path, number))


def cases():
    for kind in ("quality", "latency", "acceptance", "measurements"):
        for path in required_fields(SCHEMAS[f"{kind}.json"], whole(kind), f"{kind}.json"):
            yield pytest.param(kind, path, id=f"{kind}:{'/'.join(map(str, path))}")


@pytest.mark.parametrize("kind", ["quality", "latency", "acceptance", "measurements"])
def test_the_example_is_valid(kind):
    store.validate(whole(kind), "example")


@pytest.mark.parametrize(("kind", "path"), cases())
def test_a_record_without_a_required_field_is_refused(kind, path):
    record = copy.deepcopy(whole(kind))
    holder = record
    for step in path[:-1]:
        holder = holder[step]
    del holder[path[-1]]
    with pytest.raises(store.RecordError, match=r"^example: "):
        store.validate(record, "example")


@pytest.mark.parametrize(
    ("kind", "path", "wrong"),
    [
        ("quality", ("limit",), 0),
        ("quality", ("variant",), "../tiny"),
        ("quality", ("tasks",), {}),
        ("quality", ("tasks", "example_facts", "standard_error"), -0.1),
        ("quality", ("provenance", "started"), "2026-01-02 03:04:05"),
        ("quality", ("provenance", "server"), "maybe"),
        ("quality", ("provenance", "datasets"), {"/home/me/items.jsonl": "cd" * 32}),
        ("quality", ("provenance", "checkpoint", "path"), "/home/me/weights"),
        ("quality", ("provenance", "git", "commit"), "main"),
        ("latency", ("scale",), 1.5),
        ("latency", ("classes", "short", "acceptance", "length"), 0.5),
        ("latency", ("classes", "short", "ttft_ms", "p50"), 1.0),
        ("latency", ("classes", "short", "note"), "typed by hand"),
        ("measurements", ("status",), "great"),
        ("measurements", ("verdict",), "maybe"),
        ("measurements", ("records",), ["a.json", "a.json"]),
    ],
)
def test_a_wrong_value_is_refused_by_name(kind, path, wrong):
    record = whole(kind)
    holder = record
    for step in path[:-1]:
        holder = holder[step]
    holder[path[-1]] = wrong
    with pytest.raises(store.RecordError) as error:
        store.validate(record, "example")
    assert path[0] in str(error.value)


@pytest.mark.parametrize("schema", ["quality/2", "common/1", "leaderboard/1", "", None, 7])
def test_a_foreign_or_future_schema_is_refused(schema):
    with pytest.raises(store.RecordError, match="schema"):
        store.validate({**whole("quality"), "schema": schema}, "example")
