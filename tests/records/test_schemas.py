"""The committed JSON Schemas and the models say the same of every record there is."""

import copy
import json

import jsonschema
import pytest

from slimqwen import variant
from slimqwen.records import registry, schemas, store

ROOT = variant.repository_root()
COMMITTED = sorted(ROOT.glob("experiments/*/*.json"))
DOCUMENT = schemas.generate_schemas()
VALIDATORS = {
    kind: jsonschema.Draft202012Validator({"$defs": DOCUMENT["$defs"], **schema})
    for kind, schema in DOCUMENT["kinds"].items()
}


def present(path):
    """A committed record as JSON, and its kind."""
    record = json.loads(path.read_text())
    return record["schema"].partition("/")[0], record


def newest_of_each_kind():
    newest = {present(path)[0]: path for path in COMMITTED}
    return [pytest.param(path, id=kind) for kind, path in newest.items() if kind in DOCUMENT["kinds"]]


def required_fields(schema, value, path=()):
    """Every required field of the schema that the value has, as a path into the value."""
    if "$ref" in schema:
        schema = DOCUMENT["$defs"][schema["$ref"].rpartition("/")[2]]
    for choice in schema.get("anyOf", ()):
        if value is not None and choice != {"type": "null"}:
            yield from required_fields(choice, value, path)
    if isinstance(value, dict):
        yield from ((*path, name) for name in schema.get("required", []) if name in value)
        for name, part in value.items():
            inner = schema.get("properties", {}).get(name, schema.get("additionalProperties"))
            if isinstance(inner, dict):
                yield from required_fields(inner, part, (*path, name))
    elif isinstance(value, list) and "items" in schema:
        for number, part in enumerate(value):
            yield from required_fields(schema["items"], part, (*path, number))


def without(record, path):
    changed = copy.deepcopy(record)
    holder = changed
    for step in path[:-1]:
        holder = holder[step]
    del holder[path[-1]]
    return changed


def test_the_committed_schemas_are_those_of_the_models():
    assert schemas.FILE.read_text() == schemas.render_schemas(), (
        "run `slimqwen report --schemas` and commit schemas.json"
    )


def test_every_schema_is_one_of_its_draft():
    jsonschema.Draft202012Validator.check_schema(DOCUMENT)
    assert set(DOCUMENT["kinds"]) == {*registry.kinds(), "measurements", "field_report"}


@pytest.mark.parametrize("path", COMMITTED, ids=lambda path: f"{path.parent.name}/{path.stem}")
def test_a_committed_record_follows_the_schema_of_its_kind(path):
    kind, record = present(path)
    if kind in DOCUMENT["kinds"]:
        assert not [*VALIDATORS[kind].iter_errors(record)]


@pytest.mark.parametrize("path", newest_of_each_kind())
def test_model_and_schema_refuse_a_record_without_a_required_field_or_with_one_more(path):
    kind, record = present(path)
    schema = DOCUMENT["kinds"][kind]
    paths = {tuple("*" if isinstance(step, int) else step for step in path): path
             for path in required_fields(schema, record)}  # fmt: skip
    assert paths
    damaged = [without(record, path) for path in paths.values()] + [record | {"typed_by_hand": 1}]
    for changed in damaged:
        assert not VALIDATORS[kind].is_valid(changed)
        with pytest.raises(store.RecordError, match=r"^example: "):
            store.validate(changed, "example")


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        (
            {"status": "great"},
            r"status: 'great' is not one of \['planned', 'measured', 'promoted', 'rejected'\]",
        ),
        ({"records": ["a.json", "a.json"]}, r"records: \['a.json', 'a.json'\] has non-unique elements"),
        ({"note": "mine"}, r"the file: Additional properties are not allowed \('note' was unexpected\)"),
        ({"hypothesis": ""}, "hypothesis: '' should be non-empty"),
    ],
)
def test_a_measurements_json_is_checked_by_the_committed_schema(example, changes, said):
    with pytest.raises(store.RecordError, match=rf"^x/measurements.json: {said}; correct it$"):
        store.validate(example("measurements") | changes, "x/measurements.json")


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
        ("quality", ("limit",), "telepathy"),
        ("quality", ("tasks", "example_facts", "floor"), 0.5),
        ("latency", ("scale",), 1.5),
        ("latency", ("classes", "short", "acceptance", "length"), 0.5),
        ("latency", ("classes", "short", "ttft_ms", "p50"), 1.0),
        ("latency", ("classes", "short", "note"), "typed by hand"),
        ("measurements", ("verdict",), "maybe"),
    ],
)
def test_a_wrong_value_is_refused_by_name(example, kind, path, wrong):
    record = example(kind)
    holder = record
    for step in path[:-1]:
        holder = holder[step]
    holder[path[-1]] = wrong
    with pytest.raises(store.RecordError) as error:
        store.validate(record, "example")
    assert path[0] in str(error.value)
