from pathlib import Path

import pytest
import torch
from tinyworld.tasks import build_items
from tinyworld.tokenizer import load_tokenizer
from tinyworld.world import World

from slimqwen.models.mtp_head import load_drafting_model

TINY = Path(__file__).parents[2] / "weights" / "tiny"


@pytest.fixture(scope="module", autouse=True)
def one_thread():
    """Steps of a tiny model are too short to share: on a busy machine two threads mostly wait for each other."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(scope="session")
def world():
    return World()


@pytest.fixture(scope="session")
def items(world):
    return build_items(world)


@pytest.fixture(scope="session")
def tiny_folder():
    return TINY


@pytest.fixture(scope="session")
def tokenizer():
    return load_tokenizer(TINY)


@pytest.fixture(scope="session")
def tiny_model():
    return load_drafting_model(TINY)
