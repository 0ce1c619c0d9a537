"""GPU models to simulate: eval/simulated_gpus.yaml."""

from collections.abc import Mapping
from pathlib import Path

from pydantic import BaseModel, ConfigDict, Field

from slimqwen.errors import SlimqwenError
from slimqwen.plan import yaml_file

FILE = Path("eval") / "simulated_gpus.yaml"
"""Relative to the repository."""


class GpuModelError(SlimqwenError):
    """A GPU model that is not listed, or a list that cannot be read."""


class GpuModel(BaseModel):
    """A GPU model, as a driver describes it."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    name: str = Field(description="as nvidia-smi shows it")
    compute_capability: str = Field(pattern=r"^\d+\.\d$")
    memory_gib: float = Field(gt=0, description="total that nvidia-smi shows, in 2^30 bytes")
    multiprocessors: int = Field(gt=0)
    shared_memory_kib: int = Field(gt=0, description="the most that one block may opt into, in 2^10 bytes")

    @property
    def capability(self) -> tuple[int, int]:
        """Major and minor compute capability."""
        major, _, minor = self.compute_capability.partition(".")
        return int(major), int(minor)

    @property
    def memory_bytes(self) -> int:
        """Total memory in bytes."""
        return int(self.memory_gib * 2**30)


def read(root: Path) -> Mapping[str, GpuModel]:
    """The GPU models of a repository, by short name such as a10g.

    Raises:
        GpuModelError: the file is missing, is not YAML, or breaks its schema.
    """
    return yaml_file.read(root, FILE, dict[str, GpuModel], GpuModelError)


def load(root: Path, name: str) -> GpuModel:
    """The GPU model with this short name.

    Raises:
        GpuModelError: the file does not list it; the message names the models that it lists.
    """
    models = read(root)
    if name not in models:
        raise GpuModelError(
            f"no GPU model {name!r} in {FILE}, which lists {', '.join(sorted(models))}; choose one of them or add it"
        )
    return models[name]
