import json
from pathlib import Path

import pytest

DATA = Path(__file__).parent / "data"


def example(kind):
    """A record's body as a measurement would hand it to the store: everything but "items"."""
    return json.loads((DATA / f"{kind}.json").read_text())


@pytest.fixture
def quality():
    return example("quality")


@pytest.fixture
def latency():
    return example("latency")
