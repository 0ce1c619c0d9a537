"""A store of its own for every test, with a checkpoint small enough to read by eye as the base."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.identity import coverage_by_keys
from tests.recipe.workshop import Workshop


@pytest.fixture
def keys_cover_what_stages_execute(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """Fails the test in which a stage executes a function that its content key leaves out."""
    with coverage_by_keys.every_stage_covered(tmp_path_factory.mktemp("calls")):
        yield


@pytest.fixture
def workshop(tmp_path: Path, keys_cover_what_stages_execute: None) -> Workshop:
    return Workshop(tmp_path)
