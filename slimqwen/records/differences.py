"""What differs between the circumstances of two measurements, one line each."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from enum import StrEnum
from typing import Any

from slimqwen.records import provenance


class Of(StrEnum):
    """The kinds of circumstances, those that decide a figure most directly first."""

    CHECKPOINT = "checkpoint"
    DATA = "data"
    FLAGS = "flags"
    HARDWARE = "hardware"
    PACKAGES = "packages"
    CODE = "code"


@dataclass(frozen=True)
class Difference:
    """One circumstance that was not the same; `before` and `after` are words for people."""

    of: Of
    name: str
    before: str
    after: str

    def __str__(self) -> str:
        return f"{self.name}: {self.before} -> {self.after}"


def between(before: Mapping[str, Any], after: Mapping[str, Any]) -> list[Difference]:
    """Compare two provenance blocks; addresses, and the places of caches, are no circumstances.

    Args:
        before: of the earlier measurement, in the present version of its schema.
        after: of the later one.
    """
    sides = before, after
    return [
        *_each(Of.CHECKPOINT, "checkpoint", *({"": block["checkpoint"]["digest"][:12]} for block in sides)),
        *_each(Of.DATA, "data file ", *(_cut(block["datasets"]) for block in sides)),
        *_each(Of.FLAGS, "flag ", *(provenance.deciding(block["flags"]) for block in sides)),
        *_each(Of.FLAGS, "variable ", *(_variables(block["environment"]) for block in sides)),
        *_each(Of.HARDWARE, "engine threads", *({"": block["threads"]} for block in sides)),
        *_each(Of.HARDWARE, "hardware ", before["hardware"], after["hardware"]),
        *_each(Of.PACKAGES, "", before["packages"], after["packages"]),
        *_each(Of.CODE, "commit", *({"": _commit(block["git"])} for block in sides)),
    ]


def _each(of: Of, prefix: str, before: Mapping[str, Any], after: Mapping[str, Any]) -> Iterator[Difference]:
    for name in dict.fromkeys([*before, *after]):
        old, new = before.get(name), after.get(name)
        if old != new:
            yield Difference(of, f"{prefix}{name}", _said(old), _said(new))


def _cut(digests: Mapping[str, str]) -> dict[str, str]:
    return {name: digest[:12] for name, digest in digests.items()}


def _variables(environment: Mapping[str, str]) -> dict[str, str]:
    """Without what has a line of its own, and without where caches lie."""
    return {
        name: value
        for name, value in environment.items()
        if name != "OMP_NUM_THREADS" and not name.endswith(("CACHE_ROOT", "CACHE_DIR"))
    }


def _said(value: Any) -> str:
    return "not said" if value is None else str(value)


def _commit(git: Mapping[str, Any]) -> str:
    return f"{(git['commit'] or 'none')[:10]}{'+changes' if git['dirty'] else ''}"
