import copy
import json
from pathlib import Path

import jsonschema_rs
import pytest

from slimqwen import variant
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
            if path == ("provenance", "schema"):
                continue  # the block had no version at first
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
        ("quality", ("provenance", "threads"), 0),
        ("quality", ("provenance", "schema"), "provenance/9"),
        ("quality", ("endpoint",), "telepathy"),
        ("quality", ("tasks", "example_facts", "floor"), 0.5),
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


@pytest.mark.parametrize(
    "schema", ["quality/3", "quality/0x2", "quality", "common/1", "leaderboard/1", "", None, 7]
)
def test_a_foreign_or_future_schema_is_refused(schema):
    with pytest.raises(store.RecordError, match="schema"):
        store.validate({**whole("quality"), "schema": schema}, "example")


def explorations():
    files = sorted((variant.repository_root() / "results").glob("**/*.json"))
    return [pytest.param(file, id=file.stem) for file in files]


@pytest.mark.parametrize("file", explorations())
def test_a_committed_exploration_is_valid_and_nothing_may_be_added(file):
    record = json.loads(file.read_text())
    present = store.validate(record, file.name)
    assert present["provenance"]["schema"] == "provenance/2"
    for part in ({"typed_by_hand": 1}, {"provenance": present["provenance"] | {"host": "mine"}}):
        with pytest.raises(store.RecordError, match="Additional properties"):
            store.validate(present | part, "example")
    for name in SCHEMAS[f"{record['schema'].partition('/')[0]}.json"]["required"]:
        with pytest.raises(store.RecordError):
            store.validate({key: value for key, value in present.items() if key != name}, "example")


def test_every_schema_is_one_of_its_draft_and_finds_what_it_refers_to():
    for name, schema in SCHEMAS.items():
        assert schema["$id"] == name
        jsonschema_rs.meta.validate(schema)
        if "properties" in schema:
            kind, _, version = schema["properties"]["schema"]["const"].partition("/")
            assert (f"{kind}.json", version.isdecimal()) == (name, True)
            with pytest.raises(store.RecordError, match="example"):
                store.validate({"schema": f"{kind}/{version}"}, "example")


def test_the_schemas_are_of_every_kind_that_is_written():
    written = {
        "quality", "latency", "fidelity", "acceptance", "engine", "gate", "start_up", "redistill_mtp", "lm_head",
        "vocab_coverage", "bench_prune_vocab", "roofline", "profile", "gate_power", "measurements",
    }  # fmt: skip
    assert written <= set(store.present_versions())
