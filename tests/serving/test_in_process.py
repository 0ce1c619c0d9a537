"""vLLM in this process: what it refuses to load is one line."""

import shutil
from pathlib import Path

import pytest
from safetensors.torch import load_file, save_file

from slimqwen.serving.errors import ServingError
from slimqwen.serving.in_process import served_arguments, try_out
from tests.zoo.animals import ANIMALS

TINY = Path(__file__).parents[2] / "weights" / "tiny"

pytestmark = pytest.mark.engine


def test_a_whole_checkpoint_answers() -> None:
    try_out(TINY)


def test_of_a_multimodal_checkpoint_the_language_model_is_loaded_alone(tmp_path: Path) -> None:
    """It has no preprocessor files, without which vLLM does not load a vision tower."""
    try_out(ANIMALS["multimodal-bare"].build(tmp_path / "animal"))


def test_an_engine_with_a_server_s_flags_loads_what_the_server_loads() -> None:
    assert served_arguments({"language-model-only": True})["language_model_only"] is True
    assert served_arguments({})["language_model_only"] is False


def test_a_checkpoint_with_a_tensor_of_another_shape_is_refused_in_one_line(tmp_path: Path) -> None:
    folder = tmp_path / "tiny"
    shutil.copytree(TINY, folder)
    tensors = load_file(folder / "model.safetensors")
    tensors["mtp.fc.weight"] = tensors["mtp.fc.weight"][:, :100].contiguous()
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(ServingError, match="vLLM does not serve it"):
        try_out(folder)
