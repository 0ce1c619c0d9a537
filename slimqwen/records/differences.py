"""The differences between the circumstances of two measurements, one line each."""

from collections.abc import Iterator, Mapping
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


def between(before: Provenance, after: Provenance) -> list[Difference]:
    """Compare two provenance blocks; addresses and the folders of caches are left out."""
    sides = before, after
    digests = [{"": (side.checkpoint_digest or "none")[:12]} for side in sides]
    hardware = [side.hardware.as_json() for side in sides]
    return [
        *_compare(Circumstance.CHECKPOINT, "checkpoint", *digests),
        *_compare(Circumstance.DATA, "data file ", *(_shortened(side.datasets) for side in sides)),
        *_compare(Circumstance.FLAGS, "flag ", *(provenance.deciding(side.flags) for side in sides)),
        *_compare(Circumstance.FLAGS, "variable ", *(_variables(side.environment) for side in sides)),
        *_compare(Circumstance.HARDWARE, "engine threads", *({"": side.threads} for side in sides)),
        *_compare(Circumstance.HARDWARE, "hardware ", *hardware),
        *_compare(Circumstance.PACKAGES, "", *(side.packages for side in sides)),
        *_compare(
            Circumstance.CODE,
            "commit",
            *({"": provenance.commit_name(side.git)} for side in sides),
        ),
    ]


def _compare(
    circumstance: Circumstance, prefix: str, before: Mapping[str, Any], after: Mapping[str, Any]
) -> Iterator[Difference]:
    for name in dict.fromkeys([*before, *after]):
        old, new = before.get(name), after.get(name)
        if old != new:
            yield Difference(circumstance, f"{prefix}{name}", _text(old), _text(new))


def _shortened(digests: Mapping[str, str]) -> dict[str, str]:
    return {name: digest[:12] for name, digest in digests.items()}


def _variables(environment: Mapping[str, str]) -> dict[str, str]:
    """The environment without the threads, which have their own line, and without cache folders."""
    return {
        name: value
        for name, value in environment.items()
        if name != "OMP_NUM_THREADS" and not name.endswith(("CACHE_ROOT", "CACHE_DIR"))
    }


def _text(value: Any) -> str:
    return "none" if value is None else str(value)
