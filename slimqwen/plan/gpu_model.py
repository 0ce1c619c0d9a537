"""GPU models as their drivers describe them: the part `driver` of eval/devices.yaml."""

from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any, TypeVar

from pydantic import BaseModel, ConfigDict, Field

from slimqwen.errors import SlimqwenError, suggest_name
from slimqwen.records.settings import read_settings

Device = TypeVar("Device")
Devices = TypeVar("Devices")

FILE = Path("eval") / "devices.yaml"
"""Relative to the repository."""


class GpuModelError(SlimqwenError):
    """The GPU model is not listed in eval/devices.yaml."""


class _Driver(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)

    memory_gib: float = Field(gt=0, description="what CUDA can allocate in all, in 2^30 bytes")
    multiprocessors: int = Field(gt=0)
    shared_memory_kib: int = Field(gt=0, description="the most that one block may opt into, in 2^10 bytes")


class _Device(BaseModel):
    nvidia_smi: tuple[str, ...] = Field(min_length=1)
    compute_capability: str = Field(pattern=r"^\d+\.\d$")
    driver: _Driver


class GpuModel(_Driver):
    """A GPU model as its driver reports it; `roofline.gpu` has its bandwidth and FLOP/s."""

    name: str = Field(description="as nvidia-smi shows it")
    compute_capability: str

    @property
    def capability(self) -> tuple[int, int]:
        """Major and minor compute capability."""
        major, _, minor = self.compute_capability.partition(".")
        return int(major), int(minor)

    @property
    def memory_bytes(self) -> int:
        """Total memory in bytes."""
        return int(self.memory_gib * 2**30)


def read_devices(root: Path, form: type[Devices], *, leave_out: Collection[str] = ()) -> Devices:
    """Read eval/devices.yaml as `form`, a mapping by short names such as a10g.

    Args:
        form: the type of the whole mapping; an entry has its short name as `name` too.
        leave_out: keys of an entry that `form` does not know.

    Raises:
        SettingsError: the file is missing or breaks the schema.
    """
    text = read_settings(root / FILE, root)
    entries = text.validate(dict[str, dict[str, Any]], text.content)
    kept = {
        name: {"name": name, **{key: fields[key] for key in fields if key not in leave_out}}
        for name, fields in entries.items()
    }
    return text.validate(form, kept)


def find_device(devices: Mapping[str, Device], name: str) -> Device:
    """The device with a short name; raises a GpuModelError with a similar name if there is none."""
    if name in devices:
        return devices[name]
    hint = suggest_name(name, devices)
    raise GpuModelError(f"there is no GPU {name!r} in {FILE}; {hint}")


def find_name(shown: str, root: Path) -> str | None:
    """The short name of the GPU that nvidia-smi calls `shown`; None if eval/devices.yaml does not list it."""
    devices = read_devices(root, dict[str, _Device])
    return next((name for name, device in devices.items() if shown in device.nvidia_smi), None)


def read_gpu_models(root: Path) -> dict[str, GpuModel]:
    """The GPU models of a repository by short name; raises as `read_devices`."""
    return {
        name: GpuModel(
            name=device.nvidia_smi[0],
            compute_capability=device.compute_capability,
            **device.driver.model_dump(),
        )
        for name, device in read_devices(root, dict[str, _Device]).items()
    }


def load_gpu_model(root: Path, name: str) -> GpuModel:
    """The GPU model with this short name; raises as `read_devices` and `find_device`."""
    return find_device(read_gpu_models(root), name)
