"""A few sampled outputs, for the tests of the stages that make and read them."""

from pathlib import Path

from slimqwen.recipe.stages.sample_outputs import Prompts, SampleOutputsParameters
from tests.checkpoints import stage_output

FEW = SampleOutputsParameters(
    prompts=Prompts(path="tinyworld_prompts"), texts=48, held_out=16, tokens=32, chunk=32
)


def sampled_from(source: Path, folder: Path) -> Path:
    """A checkpoint with what it says."""
    return stage_output("sample_outputs", source, folder, **dict(FEW))
