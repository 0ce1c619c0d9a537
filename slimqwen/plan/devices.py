"""The GPUs of eval/devices.yaml: figures from their data sheets and drivers."""

import math
import re
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from pydantic import Field, PositiveFloat, PositiveInt, ValidationError

from slimqwen.errors import SlimqwenError, suggest_name
from slimqwen.formats.format import Precision
from slimqwen.records.record import Block
from slimqwen.records.settings import read_settings
from slimqwen.workspace import locate

FILE = Path("eval") / "devices.yaml"
"""Relative to the repository."""

CPU = "cpu"
"""Name of the device of a plan for a CPU, which the file does not list."""

DESCRIPTION = "memory=16,bandwidth=448,capability=8.9"
"""An example of a GPU that the command line describes instead of naming it."""

_LEAST_CAPABILITY = (7, 5)
"""vLLM's CUDA kernels are compiled for this compute capability and higher ones."""

_DRIVER_SHARE = 0.96
"""Assumed share of a data sheet's memory that CUDA can allocate, where no report says more."""

_SHARED_MEMORY_KIB = {"7.5": 64, "8.0": 163, "8.6": 99, "8.7": 163, "8.9": 99, "12.0": 99, "12.1": 99}
"""The most shared memory that one block may opt into, 2^10 bytes (CUDA programming guide); 227 where none is listed."""

_DESCRIBED_MULTIPROCESSORS = 40
"""Multiprocessors of a GPU that is described without them; sizes of grids depend on them, choices of kernels do not."""

_OTHER_MAKERS = re.compile(
    r"\b(amd|radeon|instinct|mi\d{2,3}x?|rx[ -]?\d{4}|gfx\d+|intel|arc|iris|gaudi\d?|apple|m[1-5])\b",
    re.IGNORECASE,
)
_OLDER_NVIDIA = re.compile(
    r"\b(gtx[ -]?(7|9|10)\d\d|titan (x|xp|v)|(tesla )?[kmpv]\d{2,3}s?|quadro [kmp]\d+|gv100|gp100|xavier)\b",
    re.IGNORECASE,
)
# Words of product names that tell no two GPUs apart, in nvidia-smi's spelling and in people's.
_FILLERS = re.compile(
    r"\b(nvidia|geforce|rtx|quadro|tesla|jetson|generation|blackwell|workstation|edition|gpu|graphics|mobile)\b"
)
_LAPTOP = re.compile(r"\b(laptop|mobile|notebook)\b")


class UnknownGpuError(SlimqwenError):
    """The GPU is not listed in eval/devices.yaml, or its name stands for several."""


class UnservedGpuError(SlimqwenError):
    """vLLM, as this project installs it, has no kernels for the GPU."""


class Peaks(Block):
    """Dense peak of the matrix units in TFLOP/s; None for a precision without units of its own."""

    bf16: PositiveFloat = Field(description="bfloat16 and float16, TFLOP/s")
    fp8: PositiveFloat | None = Field(
        default=None, description="both operands in 8-bit floating point, TFLOP/s"
    )
    int8: PositiveFloat | None = Field(default=None, description="both operands in 8-bit integers, TOP/s")


class Driver(Block):
    """What the driver of a GPU states about it."""

    memory_gib: PositiveFloat | None = Field(
        default=None, description="what CUDA can allocate in all, in 2^30 bytes; None where no report says"
    )
    multiprocessors: PositiveInt


class Gpu(Block):
    """A GPU: the figures of its data sheet and of its driver, as the first lines of eval/devices.yaml explain them."""

    name: str
    nvidia_smi: tuple[str, ...] = Field(min_length=1, description="product names that nvidia-smi prints")
    memory_bandwidth_gb_per_s: PositiveFloat
    memory_gib: PositiveFloat
    compute_capability: str = Field(pattern=r"^\d+\.\d$")
    dense_peak_tflops: Peaks | None = Field(default=None, description="None where it is not known")
    source: str = Field(min_length=1, description="the data sheet")
    note: str | None = None
    driver: Driver

    @property
    def bandwidth(self) -> float:
        """Memory bandwidth, bytes per second."""
        return self.memory_bandwidth_gb_per_s * 1e9

    @property
    def capability(self) -> tuple[int, int]:
        """Major and minor compute capability."""
        return _as_numbers(self.compute_capability)

    def peak(self, precision: Precision) -> float:
        """Peak FLOP/s; the 16-bit peak for a precision without units of its own, infinity where none is known."""
        peaks = self.dense_peak_tflops
        if peaks is None:
            return math.inf
        return (getattr(peaks, precision) or peaks.bf16) * 1e12

    @property
    def default_max_num_seqs(self) -> int:
        """Default of vLLM's --max-num-seqs (`EngineArgs.get_batch_defaults`)."""
        is_large = self.memory_gib >= 70 and not any("a100" in name.lower() for name in self.nvidia_smi)
        return 1024 if is_large else 256

    @property
    def cuda_memory_gib(self) -> float:
        """Memory that CUDA can allocate, in 2^30 bytes: as its driver states it, else 96 % of the data sheet's."""
        return self.driver.memory_gib or round(_DRIVER_SHARE * self.memory_gib, 2)

    @property
    def cuda_memory_bytes(self) -> int:
        """Memory that CUDA can allocate, bytes."""
        return int(self.cuda_memory_gib * 2**30)

    @property
    def shared_memory_bytes(self) -> int:
        """Most shared memory that a thread block can have, bytes, by compute capability."""
        return _SHARED_MEMORY_KIB.get(self.compute_capability, 227) * 2**10

    @property
    def is_served(self) -> bool:
        """Whether vLLM has kernels for this compute capability."""
        return self.capability >= _LEAST_CAPABILITY

    def with_memory(self, memory_gib: float) -> "Gpu":
        """The same GPU, of which CUDA can allocate this much memory, in 2^30 bytes."""
        return self.model_copy(
            update={"driver": self.driver.model_copy(update={"memory_gib": round(memory_gib, 2)})}
        )


class _Described(Block):
    """A GPU that the command line describes: `memory=16,bandwidth=448,capability=8.9`."""

    memory: PositiveFloat = Field(description="GiB")
    bandwidth: PositiveFloat = Field(description="10^9 bytes a second")
    capability: str = Field(pattern=r"^\d+\.\d$")
    multiprocessors: PositiveInt = _DESCRIBED_MULTIPROCESSORS
    tflops: PositiveFloat | None = Field(default=None, description="dense peak in 16 bits")


def read_gpus(root: Path) -> dict[str, Gpu]:
    """All GPUs of a repository's eval/devices.yaml by their short names, such as a10g.

    Raises:
        SettingsError: the file is missing or breaks the schema.
    """
    text = read_settings(locate(FILE, root), root)
    entries = text.validate(dict[str, dict[str, Any]], text.content)
    return text.validate(dict[str, Gpu], {name: {"name": name, **entries[name]} for name in entries})


def read_gpu(name: str, root: Path) -> Gpu:
    """Find a GPU by its name, or make one from a description.

    Args:
        name: a short name in eval/devices.yaml, nvidia-smi's product name, either of them without what all GPUs share
            ("RTX 3060 Laptop"), or a description: memory=16,bandwidth=448,capability=8.9 (GiB, GB/s).

    Raises:
        SettingsError: eval/devices.yaml is missing or breaks the schema.
        UnknownGpuError: no GPU has the name, several have it and differ in memory, or the description is malformed.
        UnservedGpuError: vLLM has no kernels for the GPU: it is not by NVIDIA, or too old.
    """
    gpus = read_gpus(root)
    found = (
        [_describe(name)] if "=" in name else [gpus[name]] if name in gpus else _match(name, gpus.values())
    )
    if len(found) == 1:
        refuse_capability(found[0].name, found[0].compute_capability)
        return found[0]
    if found:
        sizes = " or ".join(f"{gpu.memory_gib:g}" for gpu in found)
        raise UnknownGpuError(
            f"{name} is sold with {sizes} GB; name {' or '.join(gpu.name for gpu in found)}"
        )
    if _OTHER_MAKERS.search(name):
        raise UnservedGpuError(
            f"{name} is not served: the vLLM of this project runs on GPUs of NVIDIA, compute capability 7.5 or higher, "
            "not on those of AMD, Intel or Apple; name another with --gpu"
        )
    if _OLDER_NVIDIA.search(name):
        raise UnservedGpuError(_too_old(name, "a lower one"))
    otherwise = f"describe it: `--gpu {DESCRIPTION}`"
    hint = suggest_name(name.lower().replace(" ", "-"), gpus, otherwise)
    raise UnknownGpuError(
        f"there is no GPU {name!r} in {FILE}; {hint}" + ("" if hint == otherwise else f" Or {otherwise}")
    )


def find_gpu(shown: str, root: Path, memory_gib: float | None = None) -> Gpu | None:
    """Find the GPU that nvidia-smi calls `shown`; None if eval/devices.yaml does not list it.

    Args:
        memory_gib: memory that the driver states, in 2^30 bytes. Of several GPUs with the name the one whose memory is
            nearest is taken; with None, the smallest.

    Raises:
        SettingsError: eval/devices.yaml is missing or breaks the schema.
    """
    found = [gpu for gpu in read_gpus(root).values() if shown in gpu.nvidia_smi]
    return min(found, key=lambda gpu: abs(gpu.memory_gib - (memory_gib or 0)), default=None)


def refuse_capability(name: str, capability: str) -> None:
    """Raise UnservedGpuError for a compute capability, such as "7.0", that vLLM has no kernels for."""
    if _as_numbers(capability) < _LEAST_CAPABILITY:
        raise UnservedGpuError(_too_old(name, capability))


def _too_old(name: str, capability: str) -> str:
    return (
        f"{name} is not served: vLLM needs compute capability 7.5 or higher (GeForce RTX 20, T4 and later), and it has "
        f"{capability}; name another with --gpu"
    )


def _as_numbers(capability: str) -> tuple[int, int]:
    major, _, minor = capability.partition(".")
    return int(major), int(minor)


def _match(name: str, gpus: Iterable[Gpu]) -> list[Gpu]:
    """The GPUs whose short name or product name says the same as `name`."""
    wanted = _plain(name)

    def says(gpu: Gpu) -> set[str]:
        plain = {_plain(each) for each in (gpu.name, *gpu.nvidia_smi)}
        return plain | {f"{each}{gpu.memory_gib:g}gb" for each in plain}

    return [gpu for gpu in gpus if wanted in says(gpu)]


def _plain(name: str) -> str:
    """A name without what product names share, spaces and dashes: NVIDIA GeForce RTX 3060 Laptop GPU is 3060laptop."""
    words = name.lower().replace("-", " ").replace("_", " ")
    laptop = "laptop" if _LAPTOP.search(words) else ""
    # "rtx4090" is one word.
    kept = _FILLERS.sub(" ", re.sub(r"\brtx(?=[a-z]?\d)", "rtx ", _LAPTOP.sub(" ", words)))
    return "".join(re.findall(r"[a-z0-9.]+", kept)) + laptop


def _describe(text: str) -> Gpu:
    """The GPU that a description such as `DESCRIPTION` gives; raises UnknownGpuError for a wrong one."""
    pairs = [part.partition("=") for part in text.lower().split(",")]
    # People write 16GB, 448 GB/s and 12.
    given = {key.strip(): re.sub(r"[ a-z/]+$", "", value.strip()) for key, _, value in pairs}
    if given.get("capability", "").isdigit():
        given["capability"] += ".0"
    try:
        described = _Described.model_validate(given)
    except ValidationError as error:
        first = error.errors()[0]
        raise UnknownGpuError(
            f"--gpu {text}: {'.'.join(map(str, first['loc']))}: {first['msg'].lower()}; the keys are "
            f"{', '.join(_Described.model_fields)}, as in `--gpu {DESCRIPTION}`"
        ) from None
    return Gpu(
        name=text,
        nvidia_smi=(text,),
        memory_bandwidth_gb_per_s=described.bandwidth,
        memory_gib=described.memory,
        compute_capability=described.capability,
        dense_peak_tflops=Peaks(bf16=described.tflops) if described.tflops else None,
        source="the command line",
        driver=Driver(multiprocessors=described.multiprocessors),
    )
