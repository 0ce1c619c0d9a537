"""A simulated GPU, which responds to all that vLLM asks of a driver before the first kernel.

`simulate_gpu` makes a process see GPUs: through a libcuda whose functions all fail (so that compiled operators can be
imported), an NVML and a `torch.cuda` that return data of the GPU model, and a Triton driver that names its target.
Nothing can be launched or allocated on the GPU: models are built on torch's meta device (`slimqwen.plan.resolution`).

Call `simulate_gpu` in a separate process, before vLLM is imported: its changes are not undone.
"""

import ctypes
import subprocess
import sys
import tempfile
import types
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from slimqwen.errors import SlimqwenError
from slimqwen.plan.devices import Gpu

_CUDA_ERROR_NO_DEVICE = 100
_DRIVER_FUNCTIONS = (
    "cuGetProcAddress_v2", "cuPointerGetAttribute", "cuTensorMapEncodeTiled", "cuCtxGetCurrent", "cuCtxSetCurrent",
    "cuDeviceGetAttribute", "cuDevicePrimaryCtxRetain", "cuGetErrorString", "cuMemAddressFree", "cuMemAddressReserve",
    "cuMemCreate", "cuMemGetAllocationGranularity", "cuMemMap", "cuMemRelease", "cuMemSetAccess", "cuMemUnmap",
    "cuInit", "cuDeviceGetCount", "cuDriverGetVersion", "cuDeviceGet", "cuModuleLoadData", "cuLaunchKernelEx",
    "cuOccupancyMaxActiveClusters", "cuFuncSetAttribute", "cuFuncGetAttribute", "cuModuleGetFunction", "cuLaunchKernel",
)  # fmt: skip
_UUID = "GPU-00000000-0000-0000-0000-000000000000"
_DRIVER_VERSION = "580.95.05"  # of the first branch of drivers that supports CUDA 13.0


class SimulationError(SlimqwenError):
    """This environment cannot simulate a GPU."""


def require_cpu_build() -> None:
    """Check that vLLM can be rehearsed on a CPU.

    Raises:
        SimulationError: torch is a CUDA build.
    """
    import torch

    if torch.version.cuda is not None:
        raise SimulationError(
            "the installed torch is a CUDA build, which cannot plan for a CPU; name a GPU with --gpu, or run `make "
            "install PLATFORM=cpu` in another checkout and plan there"
        )


def simulate_gpu(gpu: Gpu, count: int = 1) -> None:
    """Make this process see `count` GPUs of one model.

    Raises:
        SimulationError: torch is a CPU build, or there is no C compiler.
    """
    import torch

    if torch.version.cuda is None:
        raise SimulationError(
            "the installed torch is a CPU build, which cannot plan for a GPU; run `make install PLATFORM=cuda` "
            "in another checkout and plan there"
        )
    _load_stub_driver()
    sys.modules["pynvml"] = _nvml(gpu, count)
    _patch_torch(gpu, count)
    import vllm.third_party.pynvml as vllm_nvml  # importing vLLM's copy of NVML does not detect the platform

    vars(vllm_nvml).update(
        {name: value for name, value in vars(_nvml(gpu, count)).items() if name[:2] != "__"}
    )
    _set_triton_driver(gpu)
    from vllm.model_executor.models import registry

    # vLLM would inspect model classes in a subprocess, which sees no GPU.
    registry._run_in_subprocess = lambda function: function()


def _load_stub_driver() -> None:
    """Load a libcuda.so.1 whose functions all fail, unless the machine has a driver."""
    try:
        ctypes.CDLL("libcuda.so.1", mode=ctypes.RTLD_GLOBAL)
        return
    except OSError:
        folder = Path(tempfile.mkdtemp(prefix="slimqwen-stub-driver-"))
    source, library = folder / "stub.c", folder / "libcuda.so.1"
    source.write_text(
        "".join(f"int {name}(void) {{ return {_CUDA_ERROR_NO_DEVICE}; }}\n" for name in _DRIVER_FUNCTIONS)
    )
    command = ["cc", "-shared", "-fPIC", "-w", "-Wl,-soname,libcuda.so.1", "-o", str(library), str(source)]
    try:
        subprocess.run(command, check=True, capture_output=True)
    except (OSError, subprocess.CalledProcessError) as error:
        raise SimulationError(
            f"no C compiler works here ({error}); install one, on Debian with `apt-get install gcc libc6-dev`"
        ) from None
    ctypes.CDLL(str(library), mode=ctypes.RTLD_GLOBAL)
    source.unlink()
    library.unlink()  # the loaded library stays mapped
    folder.rmdir()


def _nvml(gpu: Gpu, count: int) -> types.ModuleType:
    """A module with the functions of pynvml that vLLM calls."""
    nvml: Any = types.ModuleType("pynvml")
    nvml.NVMLError = type("NVMLError", (Exception,), {})
    nvml.NVML_P2P_CAPS_INDEX_NVLINK, nvml.NVML_P2P_STATUS_OK = 2, 0
    memory = types.SimpleNamespace(total=gpu.cuda_memory_bytes, free=gpu.cuda_memory_bytes, used=0)
    answers: dict[str, Any] = {
        "nvmlInit": None, "nvmlShutdown": None, "nvmlDeviceGetCount": count, "nvmlDeviceGetHandleByIndex": 0,
        "nvmlDeviceGetIndex": 0, "nvmlDeviceGetName": gpu.nvidia_smi[0], "nvmlDeviceGetUUID": _UUID,
        "nvmlDeviceGetCudaComputeCapability": gpu.capability, "nvmlDeviceGetMemoryInfo": memory,
        "nvmlDeviceGetNumaNodeId": 0, "nvmlDeviceGetP2PStatus": 1, "nvmlSystemGetDriverVersion": _DRIVER_VERSION,
        "nvmlDeviceGetPciInfo": types.SimpleNamespace(busId="00000000:00:1E.0"),
    }  # fmt: skip
    _set_answers(nvml, answers)
    nvml.nvmlDeviceGetCpuAffinity = lambda handle, size: [1] * size
    return nvml  # type: ignore[no-any-return]


def _patch_torch(gpu: Gpu, count: int) -> None:
    import torch

    major, minor = gpu.capability
    properties = types.SimpleNamespace(
        name=gpu.nvidia_smi[0], major=major, minor=minor, total_memory=gpu.cuda_memory_bytes,
        multi_processor_count=gpu.driver.multiprocessors, is_integrated=0, L2_cache_size=6 * 2**20, warp_size=32,
        gcnArchName="", regs_per_multiprocessor=65536, uuid="0", pci_domain_id=0, pci_bus_id=0, pci_device_id=30,
        max_threads_per_multi_processor=1536 if gpu.capability in ((8, 6), (8, 9), (12, 0)) else 2048,
        shared_memory_per_block=48 * 2**10, shared_memory_per_block_optin=gpu.shared_memory_bytes,
        shared_memory_per_multiprocessor=gpu.shared_memory_bytes + 2**10,
    )  # fmt: skip
    answers: dict[str, Any] = {
        "is_available": True, "device_count": count, "_device_count_nvml": count, "current_device": 0,
        "set_device": None, "init": None, "_lazy_init": None, "is_initialized": False,
        "get_device_capability": gpu.capability, "get_device_name": gpu.nvidia_smi[0],
        "get_device_properties": properties, "synchronize": None, "empty_cache": None,
        "mem_get_info": (gpu.cuda_memory_bytes, gpu.cuda_memory_bytes), "is_bf16_supported": major >= 8,
        "get_arch_list": [f"sm_{major}{minor}"],
    }  # fmt: skip
    _set_answers(torch.cuda, answers)
    for name in ("Stream", "Event"):
        setattr(torch.cuda, name, _Stream)
    for name in ("current_stream", "default_stream"):
        setattr(torch.cuda, name, lambda device=None: _Stream())
    # torch.accelerator asks the driver from C++, without torch.cuda.
    accelerator: dict[str, Any] = {
        "is_available": True, "device_count": count, "current_accelerator": torch.device("cuda"),
        "current_device_index": 0, "set_device_index": None,
    }  # fmt: skip
    _set_answers(torch.accelerator, accelerator)


def _set_answers(module: Any, answers: Mapping[str, Any]) -> None:
    """Replace functions of a module: name -> constant that the function returns, whatever its arguments are."""
    for name, answer in answers.items():
        setattr(module, name, lambda *arguments, answer=answer, **keywords: answer)


class _Stream:
    """A CUDA stream or event on which nothing runs."""

    def __init__(self, *arguments: Any, **keywords: Any) -> None:
        self.cuda_stream = self.device_index = 0

    def __getattr__(self, name: str) -> Any:
        return lambda *arguments, **keywords: None


def _set_triton_driver(gpu: Gpu) -> None:
    """Give Triton a driver that names the GPU as the target to compile for."""
    from triton.backends.compiler import GPUTarget
    from triton.backends.nvidia.driver import CudaDriver
    from triton.runtime import driver

    major, minor = gpu.capability
    properties = {
        "max_shared_mem": gpu.shared_memory_bytes, "multiprocessor_count": gpu.driver.multiprocessors,
        "max_num_regs": 65536, "warpSize": 32, "sm_clock_rate": 1_700_000, "mem_clock_rate": 6_000_000,
        "mem_bus_width": 384,
    }  # fmt: skip

    class SimulatedDriver(CudaDriver):  # type: ignore[misc]
        def __init__(self) -> None:
            self.utils = types.SimpleNamespace(get_device_properties=lambda device: properties)
            self.get_current_device = lambda: 0
            self.get_current_stream = lambda device: 0
            self.get_device_capability = lambda device=0: gpu.capability
            self.set_current_device = lambda device: None

        def get_current_target(self) -> GPUTarget:
            return GPUTarget("cuda", 10 * major + minor, 32)

        @staticmethod
        def is_active() -> bool:
            return True

    driver.set_active(SimulatedDriver())
