"""The twin in 16 bits of a quantised checkpoint."""

from pathlib import Path

import pytest
import torch

from slimqwen import checkpoint
from slimqwen.checkpoint.weights import read_weights, refuse_without_cpu_kernel
from slimqwen.formats.format import UnsupportedFormatError
from slimqwen.recipe import variant_recipe
from slimqwen.recipe.recipe_file import Step
from slimqwen.recipe.stage import Parameters, StageError
from slimqwen.recipe.stages import calibrate, unpack
from tests.checkpoints import TINY, stage_output, stored

CORPUS = {"path": "tinyworld", "sequences": 2, "length": 16}
NARROW = calibrate.CalibrateParameters(
    targets={"mlp": "W3A16_ASYM", "attention": "W2A16", "linear_attention": "W6A16"},
    scaling="none",
    corpus=CORPUS,
)


@pytest.fixture(scope="module")
def narrow(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return stage_output("calibrate", TINY, tmp_path_factory.mktemp("n") / "narrow", **dict(NARROW))


def test_a_width_without_a_cpu_kernel_is_refused_and_its_twin_is_not(narrow: Path, tmp_path: Path) -> None:
    with pytest.raises(
        UnsupportedFormatError, match=r"no kernel for .*; serve it on a GPU, or .* stage unpack"
    ):
        refuse_without_cpu_kernel(narrow)
    twin = stage_output("unpack", narrow, tmp_path / "twin")
    refuse_without_cpu_kernel(twin)
    assert "quantization_config" not in checkpoint.read_config(twin)
    values, packed = stored(twin), read_weights(narrow)
    assert values.keys() == stored(TINY).keys()
    quantised = [weight for weight in packed.values() if weight.is_quantised]
    assert {weight.layout.bits for weight in quantised if weight.layout} == {2, 3, 6}
    for weight in quantised:
        assert torch.equal(values[weight.name], torch.cat(list(weight.blocks())).bfloat16())
    others = set(packed) - {weight.name for weight in quantised}
    assert all(torch.equal(values[name], stored(narrow)[name]) for name in others)
    steps = [Step(calibrate.STAGE, NARROW), Step(unpack.STAGE, Parameters())]
    assert variant_recipe.unexplained_by(steps, TINY, twin) == []


def test_a_checkpoint_without_quantised_weights_has_no_twin(tmp_path: Path) -> None:
    with pytest.raises(StageError, match="has no quantised weight; remove unpack"):
        stage_output("unpack", TINY, tmp_path / "out")
