"""The differences between the circumstances of two measurements, one line each."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from enum import StrEnum
from typing import Any

from slimqwen.records import provenance
from slimqwen.records.record import Provenance


class Circumstance(StrEnum):
    """Circumstances of a measurement, the most decisive first."""

    CHECKPOINT = "checkpoint"
    DATA = "data"
    FLAGS = "flags"
    HARDWARE = "hardware"
    PACKAGES = "packages"
    CODE = "code"


@dataclass(frozen=True)
class Difference:
    """One circumstance that was not the same; `before` and `after` are text for people."""

    circumstance: Circumstance
    name: str
    before: str
    after: str

    def __str__(self) -> str:
        return f"{self.name}: {self.before} -> {self.after}"


def _variables(block: Provenance) -> dict[str, str]:
    """The environment without the threads, which have their own line, and without cache folders."""
    return {
        name: value
        for name, value in block.environment.items()
        if name != "OMP_NUM_THREADS" and not name.endswith(("CACHE_ROOT", "CACHE_DIR"))
    }


_COMPARED: tuple[tuple[Circumstance, str, Callable[[Provenance], Mapping[str, Any]]], ...] = (
    (Circumstance.CHECKPOINT, "checkpoint", lambda block: {"": (block.checkpoint_digest or "none")[:12]}),
    (
        Circumstance.DATA,
        "data file ",
        lambda block: {name: digest[:12] for name, digest in block.datasets.items()},
    ),
    (Circumstance.FLAGS, "flag ", lambda block: provenance.deciding(block.flags)),
    (Circumstance.FLAGS, "variable ", _variables),
    (Circumstance.HARDWARE, "engine threads", lambda block: {"": block.threads}),
    (Circumstance.HARDWARE, "hardware ", lambda block: block.hardware.as_json()),
    (Circumstance.PACKAGES, "", lambda block: block.packages),
    (Circumstance.CODE, "commit", lambda block: {"": provenance.commit_name(block.git)}),
)
"""What is compared: prefix of its name, and the values by the rest of the name."""


def between(before: Provenance, after: Provenance) -> list[Difference]:
    """Compare two provenance blocks; addresses and the folders of caches are left out."""
    differences = []
    for circumstance, prefix, values in _COMPARED:
        old, new = values(before), values(after)
        for name in dict.fromkeys([*old, *new]):
            first, second = old.get(name), new.get(name)
            if first != second:
                differences.append(Difference(circumstance, f"{prefix}{name}", _text(first), _text(second)))
    return differences


def _text(value: Any) -> str:
    return "none" if value is None else str(value)
