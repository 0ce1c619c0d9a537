"""vLLM in this process: what it refuses to load is one line."""

import shutil
from pathlib import Path

import pytest
from safetensors.torch import load_file, save_file

from slimqwen.serving.errors import ServingError
from slimqwen.serving.in_process import try_out

TINY = Path(__file__).parents[2] / "weights" / "tiny"

pytestmark = pytest.mark.engine


def test_a_whole_checkpoint_answers() -> None:
    try_out(TINY)


def test_a_checkpoint_with_a_tensor_of_another_shape_is_refused_in_one_line(tmp_path: Path) -> None:
    folder = tmp_path / "tiny"
    shutil.copytree(TINY, folder)
    tensors = load_file(folder / "model.safetensors")
    tensors["mtp.fc.weight"] = tensors["mtp.fc.weight"][:, :100].contiguous()
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(ServingError, match="vLLM does not serve it"):
        try_out(folder)
