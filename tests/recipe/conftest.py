"""A store of its own for every test, with a checkpoint small enough to read by eye as the base."""

from pathlib import Path

import pytest

from tests.recipe.workshop import Workshop


@pytest.fixture
def workshop(tmp_path: Path) -> Workshop:
    return Workshop(tmp_path)
