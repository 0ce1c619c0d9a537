"""A store of its own for every test, with a checkpoint small enough to read by eye as the base."""

from collections.abc import Callable
from pathlib import Path

import pytest

from slimqwen.checkpoint.tensors import list_tensors
from tests.recipe.workshop import Workshop


@pytest.fixture
def workshop(tmp_path: Path) -> Workshop:
    return Workshop(tmp_path)


@pytest.fixture
def first_byte() -> Callable[[Path], int]:
    """The first byte of the first tensor: the sum of all amounts added."""

    def read(folder: Path) -> int:
        return next(list_tensors(folder)["a"].chunks())[0]

    return read
