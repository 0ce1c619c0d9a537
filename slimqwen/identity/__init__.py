"""What a result depends on, and whether it would be the same again: derived in one place, asked everywhere else."""

import hashlib
import json
from collections.abc import Mapping


def digest_of(value: object) -> str:
    """SHA-256 of a value's JSON: the same for equal values, in whatever order their keys come."""
    return hashlib.sha256(json.dumps(value, sort_keys=True, default=str).encode()).hexdigest()


def changed_names(before: Mapping[str, object], after: Mapping[str, object]) -> list[str]:
    """Names, sorted, that have other values or are in one of the two alone."""
    return sorted(name for name in before.keys() | after.keys() if before.get(name) != after.get(name))
