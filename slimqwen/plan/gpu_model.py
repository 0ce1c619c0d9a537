"""GPU models as their drivers describe them: the part `driver` of eval/devices.yaml."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from pydantic import BaseModel, ConfigDict, Field

from slimqwen.errors import SlimqwenError
from slimqwen.records import settings

FILE = Path("eval") / "devices.yaml"
"""Relative to the repository."""


class GpuModelError(SlimqwenError):
    """A GPU model that is not listed."""


class GpuModel(BaseModel):
    """A GPU model as its driver reports it; its bandwidth and FLOP/s are those of `roofline.gpu`."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    name: str = Field(description="as nvidia-smi shows it")
    compute_capability: str = Field(pattern=r"^\d+\.\d$")
    memory_gib: float = Field(gt=0, description="what CUDA can allocate in all, in 2^30 bytes")
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
    missing = f"is missing; `git checkout {FILE}` restores it"

    def build(content: Mapping[str, Mapping[str, Any]]) -> dict[str, GpuModel]:
        return {
            name: GpuModel.model_validate(
                {
                    "name": (sheet.get("nvidia_smi") or [None])[0],
                    "compute_capability": sheet.get("compute_capability"),
                    **sheet.get("driver", {}),
                }
            )
            for name, sheet in content.items()
        }

    return settings.read_yaml(root / FILE, root, build, missing=missing)


def load_gpu_model(root: Path, name: str) -> GpuModel:
    """The GPU model with this short name; a GpuModelError that names the listed ones where there is none."""
    models = read_gpu_models(root)
    if name not in models:
        raise GpuModelError(
            f"no GPU model {name!r} in {FILE}, which lists {', '.join(sorted(models))}; choose one of them or add it"
        )
    return models[name]
