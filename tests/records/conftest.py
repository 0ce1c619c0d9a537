import subprocess

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


@pytest.fixture
def repository(tmp_path):
    def git(*words):
        subprocess.run(
            ["git", "-C", str(tmp_path), "-c", "user.name=x", "-c", "user.email=x@example.org", *words],
            check=True,
            capture_output=True,
        )

    (tmp_path / "code.py").write_text("1\n")
    git("init")
    git("add", ".")
    git("commit", "-m", "first")
    return tmp_path
