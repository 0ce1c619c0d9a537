"""A repository of two variants, both measured."""

import pytest

from slimqwen.bench.latency.speedups import LATENCY_MEASURES
from tests import record_files

ITEMS = [{"task": "example_facts", "item": f"f{n}", "value": n % 2, "weight": 1} for n in range(4)] + [
    {"task": "example_prose", "item": f"p{n}", "value": 1.5, "weight": 10} for n in range(4)
]
TIMES = [{"class": "short", "error": None, **dict.fromkeys(LATENCY_MEASURES, 100.0 + n)} for n in range(12)]


@pytest.fixture
def repository(tmp_path, add_variant, quality, latency, stamps):
    """Two variants, both measured: b twice as large in every time, and without a GPU."""
    for name in ("a", "b"):
        add_variant(name, f"VLLM_MODEL=weights/{name}\n", baseline="a" if name == "b" else None)
        folder = tmp_path / "experiments" / name
        record_files.write(folder, quality | {"variant": name}, ITEMS)
        record_files.write(folder, latency | {"variant": name}, TIMES)
    return tmp_path
