"""The record kinds: every subclass of `Record` that a module of the packages in `PACKAGES` defines.

Only modules whose source text names a base class of records are imported, so that reading a record loads no engine.
"""

import importlib
import importlib.util
import pkgutil
import re
from collections.abc import Iterator, Mapping
from functools import cache
from pathlib import Path
from types import MappingProxyType

from slimqwen.errors import SlimqwenError
from slimqwen.records.record import Record

PACKAGES = tuple(f"slimqwen.{name}" for name in ("evals", "bench", "plan", "search", "image"))
_NAMES_A_BASE = re.compile(r"slimqwen\.records\.record import|\b(record\.Record|ServedRecord|SplitRecord)\b")


@cache
def kinds() -> Mapping[str, type[Record]]:
    """The model of every record kind, by the name of the kind.

    Raises:
        SlimqwenError: two modules define the same kind.
    """
    by_kind: dict[str, type[Record]] = {}
    for model in _models():
        other = by_kind.setdefault(model.kind, model)
        if other is not model:
            raise SlimqwenError(
                f"record kind {model.kind!r} is defined in {other.__module__} and {model.__module__}; rename one"
            )
    return MappingProxyType(dict(sorted(by_kind.items())))


def _models() -> Iterator[type[Record]]:
    for name in PACKAGES:
        if importlib.util.find_spec(name) is None:
            continue
        package = importlib.import_module(name)
        for module in pkgutil.walk_packages(package.__path__, f"{name}."):
            spec = importlib.util.find_spec(module.name)
            if spec and spec.origin and _NAMES_A_BASE.search(Path(spec.origin).read_text(encoding="utf-8")):
                yield from _defined_in(module.name)


def _defined_in(module: str) -> Iterator[type[Record]]:
    for value in vars(importlib.import_module(module)).values():
        is_model = isinstance(value, type) and issubclass(value, Record) and "kind" in vars(value)
        if is_model and value.__module__ == module:
            yield value
