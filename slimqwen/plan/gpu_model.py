"""GPU models as their drivers describe them: the part `driver` of eval/devices.yaml."""

import difflib
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, TypeVar

from pydantic import BaseModel, ConfigDict, Field

from slimqwen.errors import SlimqwenError
from slimqwen.records import settings

Device = TypeVar("Device")

FILE = Path("eval") / "devices.yaml"
"""Relative to the repository."""


class GpuModelError(SlimqwenError):
    """The GPU model is not listed in eval/devices.yaml."""


class GpuModel(BaseModel):
    """A GPU model as its driver reports it; `roofline.gpu` has its bandwidth and FLOP/s."""

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


def read_devices(root: Path, build: Callable[[str, dict[str, Any]], Device]) -> dict[str, Device]:
    """Read eval/devices.yaml: short name of a device, such as a10g, -> the result of `build(name, fields)`.

    Raises:
        SettingsError: the file is missing or breaks the schema.
    """
    return settings.read_yaml(
        root / FILE,
        root,
        lambda content: {str(name): build(str(name), fields) for name, fields in content.items()},
        missing=f"is missing; `git checkout {FILE}` restores it",
    )


def find_device(devices: Mapping[str, Device], name: str) -> Device:
    """The device with a short name; raises a GpuModelError with similar names if there is none."""
    if name in devices:
        return devices[name]
    hint = ", ".join(difflib.get_close_matches(name, devices, cutoff=0.4)) or ", ".join(devices)
    raise GpuModelError(f"there is no GPU {name!r} in {FILE}; choose {hint}")


def find_name(shown: str, root: Path) -> str | None:
    """The short name of the GPU that nvidia-smi calls `shown`; None if eval/devices.yaml does not list it."""
    names = read_devices(root, lambda _, fields: fields["nvidia_smi"])
    return next((name for name, those in names.items() if shown in those), None)


def read_gpu_models(root: Path) -> dict[str, GpuModel]:
    """The GPU models of a repository by short name; raises as `read_devices`."""

    def build(_: str, fields: dict[str, Any]) -> GpuModel:
        return GpuModel.model_validate(
            {
                "name": (fields.get("nvidia_smi") or [None])[0],
                "compute_capability": fields.get("compute_capability"),
                **fields.get("driver", {}),
            }
        )

    return read_devices(root, build)


def load_gpu_model(root: Path, name: str) -> GpuModel:
    """The GPU model with this short name; raises as `read_devices` and `find_device`."""
    return find_device(read_gpu_models(root), name)
