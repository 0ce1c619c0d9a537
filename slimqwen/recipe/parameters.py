"""Describes the parameters of stages (meaning, default, allowed values), as derived from their pydantic models."""

import inspect
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, get_args, get_origin

from pydantic import BaseModel
from pydantic.fields import FieldInfo

_ENTRY = re.compile(r"^    (\w+): (.*?)(?=^    \w+: |\Z)", re.DOTALL | re.MULTILINE)


@dataclass(frozen=True)
class Parameter:
    """A parameter of a stage.

    Attributes:
        name: last part of its dotted name.
        meaning: one line, from the docstring of the model.
        allowed: allowed values in words; empty if any value of the type is allowed.
        value: the default, or an example if there is none; None if it has to be filled in or is off.
        parts: the parameters inside this one, if it is a model itself.
    """

    name: str
    meaning: str
    allowed: str
    value: Any
    parts: tuple["Parameter", ...] = ()


def list_parameters(model: type[BaseModel], default: BaseModel | None = None) -> Iterator[Parameter]:
    """Yield the parameters of a model, in the order of its fields.

    Args:
        default: instance whose values are the defaults, if the model is a field of another one.
    """
    meanings = _meanings(model)
    for name, field in model.model_fields.items():
        value = _value(name, field, default)
        inner = field.annotation
        meaning = meanings.get(name, "")
        if isinstance(inner, type) and issubclass(inner, BaseModel):
            parts = tuple(list_parameters(inner, value if isinstance(value, BaseModel) else None))
            yield Parameter(name, meaning, "", None, parts)
        else:
            yield Parameter(name, meaning, _allowed(field), value)


def _value(name: str, field: FieldInfo, default: BaseModel | None) -> Any:
    # A path is shown as written, not as resolved.
    if default is not None and not field.exclude:
        return getattr(default, name)
    if field.is_required():
        return field.examples[0] if field.examples else None
    # A text that is not said is that of the recipe, which no value shows.
    return None if field.default == Path() else field.default


def _allowed(field: FieldInfo) -> str:
    if get_origin(field.annotation) is Literal:
        return " | ".join(map(str, get_args(field.annotation)))
    signs = {"ge": "at least", "gt": "more than", "le": "at most", "lt": "less than"}
    bounds = [
        f"{words} {getattr(limit, sign):g}"
        for limit in field.metadata
        for sign, words in signs.items()
        if getattr(limit, sign, None) is not None
    ]
    return ", ".join(bounds)


def _meanings(model: type[BaseModel]) -> dict[str, str]:
    """Meaning of each field, from `Attributes:` in the docstrings of a model and its base classes."""
    meanings: dict[str, str] = {}
    for part in reversed(model.__mro__):
        if issubclass(part, BaseModel) and part.__doc__:
            attributes = inspect.cleandoc(part.__doc__).partition("Attributes:\n")[2]
            found = _ENTRY.findall(attributes)
            meanings |= {name: " ".join(text.split()).rstrip(".") for name, text in found}
    return meanings
