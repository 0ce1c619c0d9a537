"""What a result depends on (code, package versions, flags), so that an unchanged result is reused, not made again."""

import hashlib
import json
from collections.abc import Mapping


def digest_of(value: object) -> str:
    """SHA-256 of a value's JSON with sorted keys, in hexadecimal digits."""
    return hashlib.sha256(json.dumps(value, sort_keys=True, default=str).encode()).hexdigest()


def changed_names(before: Mapping[str, object], after: Mapping[str, object]) -> list[str]:
    """Sorted names whose values differ, or which only one of the two mappings has."""
    return sorted(name for name in before.keys() | after.keys() if before.get(name) != after.get(name))
