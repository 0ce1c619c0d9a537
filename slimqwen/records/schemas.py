"""The JSON Schemas of all record kinds: generated from their models, committed as schemas.json beside this module."""

import json
from collections.abc import Mapping
from functools import cache
from pathlib import Path
from typing import Any

from jsonschema_rs import Draft202012Validator
from pydantic.json_schema import models_json_schema

from slimqwen.records import registry
from slimqwen.records.record import Measurements, Record

FILE = Path(__file__).with_suffix(".json")
_DRAFT = "https://json-schema.org/draft/2020-12/schema"
_LINE_LENGTH = 120
_LEADING_KEYS = ("description", "type", "const", "enum", "additionalProperties", "required")
"""Keys of JSON Schema that come first, in this order."""

_LINE_STARTERS = {"description", "properties"}
"""Keys that make an object begin a line."""


def models() -> Mapping[str, type[Record] | type[Measurements]]:
    """The models that have a schema, by kind: every record kind, and measurements."""
    return {**registry.kinds(), "measurements": Measurements}


def generate() -> dict[str, Any]:
    """One document: `kinds` points to the schema of each kind, `$defs` holds these and the parts that they share."""
    by_kind = models()
    references, definitions = models_json_schema([(model, "validation") for model in by_kind.values()])
    kinds = {kind: references[model, "validation"] for kind, model in sorted(by_kind.items())}
    return {"$schema": _DRAFT, "kinds": kinds, "$defs": _plain(definitions["$defs"], named=True)}


def text() -> str:
    """The content of schemas.json: every value that fits a line is on one."""
    return _compact(generate(), 0, 0) + "\n"


def write_schemas(file: Path = FILE) -> Path:
    """Write the schemas of this checkout's models to a file, and return it."""
    file.write_text(text(), encoding="utf-8")
    return file


def faults(kind: str, record: Mapping[str, Any]) -> list[str]:
    """Where a record breaks the schema of its kind, a line each.

    Args:
        record: as JSON, in the present version of its schema.
    """
    if kind not in _document(FILE)["kinds"]:
        return [f"no schema of kind {kind} in {FILE.name}; `slimqwen report --schemas` writes it"]
    errors = _validator(FILE, kind).iter_errors(record)
    return sorted(f"{'/'.join(map(str, e.instance_path)) or 'the record'}: {e.message}" for e in errors)


@cache
def _document(file: Path) -> dict[str, Any]:
    document: dict[str, Any] = json.loads(file.read_text(encoding="utf-8"))
    return document


@cache
def _validator(file: Path, kind: str) -> Draft202012Validator:
    # A validator is slow to build and fast to use.
    document = _document(file)
    return Draft202012Validator({"$defs": document["$defs"], **document["kinds"][kind]})


def _plain(schema: Any, *, named: bool = False) -> Any:
    """The schema without titles and defaults, which only the models need, and with its keys in the order for readers.

    Args:
        named: whether the keys of a mapping are names of fields or models, not words of JSON Schema.
    """
    if isinstance(schema, list):
        return [_plain(part) for part in schema]
    if not isinstance(schema, Mapping):
        return schema
    if named:
        return {name: _plain(part) for name, part in schema.items()}
    parts = {
        key: _plain(part, named=key == "properties")
        for key, part in schema.items()
        if key not in ("title", "default")
    }
    choices = parts.get("anyOf", ())
    if choices[1:] == [{"type": "null"}] and "type" in choices[0] and "enum" not in choices[0]:
        parts |= choices[0] | {"type": [choices[0]["type"], "null"]}
        del parts["anyOf"]
    if "description" in parts:
        # The first paragraph of a model's docstring: fields have their own descriptions.
        parts["description"] = " ".join(parts["description"].partition("\n\n")[0].split())
    leading = {key: parts[key] for key in _LEADING_KEYS if key in parts}
    return {**leading, **parts}


def _compact(value: Any, indent: int, prefix_length: int) -> str:
    """JSON with as much on a line as fits; models, blocks of fields and values with a description begin a line.

    Args:
        indent: spaces before the inner lines.
        prefix_length: characters before the value on its first line.
    """
    line = json.dumps(value, ensure_ascii=False)
    if not isinstance(value, dict | list) or indent + prefix_length + len(line) < _LINE_LENGTH:
        return line
    opening, closing = "{}" if isinstance(value, dict) else "[]"
    lines = [""]
    for key, part in value.items() if isinstance(value, dict) else (("", part) for part in value):
        name = f"{json.dumps(key, ensure_ascii=False)}: " if isinstance(value, dict) else ""
        short = json.dumps(part, ensure_ascii=False)
        column = indent + 1 + len(lines[-1]) + (prefix_length if len(lines) == 1 else 0)
        begins_line = isinstance(part, dict) and (
            key == "properties" or not part.keys().isdisjoint(_LINE_STARTERS)
        )
        if lines[-1] and (begins_line or column + len(name) + len(short) + 2 > _LINE_LENGTH):
            lines.append("")
            column = indent + 1
        gap = " " if lines[-1] else ""
        lines[-1] += f"{gap}{name}{_compact(part, indent + 1, column - indent - 1 + len(name))},"
    return opening + f"\n{' ' * (indent + 1)}".join(lines).removesuffix(",") + closing
