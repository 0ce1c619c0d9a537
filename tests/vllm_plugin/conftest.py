"""What the engine draws without speculation: the reference of every test of frequencies."""

from pathlib import Path

import pytest

from slimqwen.serving.in_process import engine
from tests.vllm_plugin.frequencies import DRAWS, Draws, draw, uncertain_beginnings

_TINY = Path(__file__).parents[2] / "weights" / "tiny"


@pytest.fixture(scope="session")
def beginnings() -> list[list[int]]:
    return uncertain_beginnings(_TINY)


@pytest.fixture(scope="session")
def undrafted_draws(beginnings: list[list[int]]) -> Draws:
    with engine(_TINY) as llm:
        return draw(llm, beginnings, 2 * DRAWS, seed=0)
