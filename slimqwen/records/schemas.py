"""The JSON Schemas of all record kinds, generated from their models and committed as schemas.json in this folder.

A measurements.json, which people write, and a field report, which others send, are checked by their schemas too;
records, which commands write, by their models.
"""

import json
from collections.abc import Mapping
from functools import cache
from pathlib import Path
from typing import Any

from pydantic.json_schema import GenerateJsonSchema, models_json_schema

from slimqwen.records import registry
from slimqwen.records.field_report import FieldReport
from slimqwen.records.record import Measurements, VersionedFile

FILE = Path(__file__).with_suffix(".json")
_DRAFT = "https://json-schema.org/draft/2020-12/schema"


class _WithoutTitles(GenerateJsonSchema):
    """Generates pydantic's schemas without the titles of fields, which only repeat their names."""

    def field_title_should_be_set(self, schema: Any) -> bool:
        return False


def models() -> Mapping[str, type[VersionedFile]]:
    """The models that have a schema, by the name of the kind: every record kind, measurements, field report."""
    return {**registry.kinds(), "measurements": Measurements, "field_report": FieldReport}


def generate_schemas() -> dict[str, Any]:
    """Generate the JSON Schema document: `kinds` refers to each kind's schema, `$defs` has the schemas and parts."""
    by_kind = models()
    references, definitions = models_json_schema(
        [(model, "validation") for model in by_kind.values()], schema_generator=_WithoutTitles
    )
    kinds = {kind: references[model, "validation"] for kind, model in sorted(by_kind.items())}
    return {"$schema": _DRAFT, "kinds": kinds, "$defs": definitions["$defs"]}


def render_schemas() -> str:
    """The content of schemas.json, with a line for each model, so that a changed field changes one line."""
    document = generate_schemas()
    models = (f"  {json.dumps(name)}: {json.dumps(part)}" for name, part in document.pop("$defs").items())
    head = json.dumps(document, indent=1).removesuffix("\n}")
    return head + ',\n "$defs": {\n' + ",\n".join(models) + "\n }\n}\n"


def find_fault(kind: str, fields: Mapping[str, Any]) -> str | None:
    """Check a file's fields against its committed schema; returns the main fault as "field: fault", or None."""
    from jsonschema.exceptions import best_match  # type: ignore[import-untyped]

    fault = best_match(_validator(kind, FILE).iter_errors(dict(fields)))
    return fault and f"{'/'.join(map(str, fault.absolute_path)) or 'the file'}: {fault.message}"


@cache
def _validator(kind: str, file: Path) -> Any:
    from jsonschema import Draft202012Validator  # type: ignore[import-untyped]

    document = json.loads(file.read_bytes())
    return Draft202012Validator({"$defs": document["$defs"], **document["kinds"][kind]})


def write_schemas(file: Path = FILE) -> Path:
    """Write the schemas of this checkout's models to a file; returns its path."""
    file.write_text(render_schemas(), encoding="utf-8")
    return file
