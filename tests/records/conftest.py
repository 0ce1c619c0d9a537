import pytest

from tests.record_files import example as body

ITEMS = {"file": "x.items.jsonl", "sha256": "ab" * 32, "count": 8}


@pytest.fixture
def example():
    """Kind -> a record as a file holds it."""
    return lambda kind: body(kind) if kind == "measurements" else {**body(kind), "items": ITEMS}


@pytest.fixture
def quality():
    return body("quality")


@pytest.fixture
def latency():
    return body("latency")
