"""Trials of a search."""

from typing import Any

from slimqwen.search.record import SearchTrial


def trial(number: int, **fields: Any) -> SearchTrial:
    """A trial that passed, with other fields."""
    common: dict[str, Any] = {
        "number": number, "name": f"tiny-{number}", "changes": {"depth": number}, "rung": "speed", "reason": "",
        "crashed": False, "checkpoint_bytes": 8_000_000, "bound_tokens_per_second": 90_000.0, "seconds": 60.0,
    }  # fmt: skip
    return SearchTrial(**{**common, **fields})
