"""GPU models to simulate: eval/simulated_gpus.yaml."""

from collections.abc import Mapping
from pathlib import Path

from pydantic import BaseModel, ConfigDict, Field, TypeAdapter

from slimqwen.errors import SlimqwenError
from slimqwen.records import settings

FILE = Path("eval") / "simulated_gpus.yaml"
"""Relative to the repository."""


class GpuModelError(SlimqwenError):
    """A GPU model that is not listed."""


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


def read_gpu_models(root: Path) -> Mapping[str, GpuModel]:
    """The GPU models of a repository, by short name such as a10g; a SettingsError where the file cannot be used."""
    form = TypeAdapter(dict[str, GpuModel])
    missing = f"is missing; `git checkout {FILE}` restores it"
    return settings.read_yaml(root / FILE, root, form.validate_python, missing=missing)


def load_gpu_model(root: Path, name: str) -> GpuModel:
    """The GPU model with this short name; a GpuModelError that names the listed ones where there is none."""
    models = read_gpu_models(root)
    if name not in models:
        raise GpuModelError(
            f"no GPU model {name!r} in {FILE}, which lists {', '.join(sorted(models))}; choose one of them or add it"
        )
    return models[name]
