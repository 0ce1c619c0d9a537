"""What the tests of several stages begin with."""

from pathlib import Path

import pytest

from tests.checkpoints import TINY
from tests.recipe.stages.sampling import sampled_from


@pytest.fixture(scope="session")
def sampled(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The tiny model and what it says."""
    return sampled_from(TINY, tmp_path_factory.mktemp("sampled") / "tiny")
