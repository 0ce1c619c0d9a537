"""This host: its platform (cpu or cuda), cores and memory, and what its user and libraries need of the environment."""

import importlib.util
import math
import os
import pwd
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Literal

import psutil

from slimqwen import cgroup

Platform = Literal["cpu", "cuda"]

TORCH_VARIABLE = re.compile(
    r"(OMP|MKL)_NUM_THREADS|(TORCH|TORCHINDUCTOR|TORCHDYNAMO|PYTORCH|TRITON)_[A-Z0-9_]+"
)
"""Environment variables that torch and Triton read; those of vLLM are listed by vLLM itself."""


def detect() -> Platform:
    """Return "cuda" if torch sees a GPU, else "cpu"."""
    # Importing torch takes seconds, so only the functions that need it do so.
    import torch

    return "cuda" if torch.cuda.is_available() else "cpu"


def has_nvidia_driver() -> bool:
    """Whether an NVIDIA driver is loaded, a sign of a GPU that costs no import of torch."""
    return Path("/proc/driver/nvidia/version").exists()


def is_gpu_build() -> bool:
    """Whether the installed torch, and therefore vLLM, is a build for GPUs."""
    import torch

    return torch.version.cuda is not None


def has_avx512() -> bool:
    """Whether this CPU has the AVX-512 instructions that some CPU kernels of vLLM need."""
    import torch

    return bool(torch.cpu._is_avx512_supported())


def allowed_cpus() -> int:
    """Logical CPUs that this process may use, at least 1: by its affinity or its container's quota, rounded up."""
    affinity = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    quota = cgroup.cpu_quota()
    return affinity if quota is None else max(1, min(affinity, math.ceil(quota)))


def physical_cores() -> int:
    """Physical cores that this process may use, at least 1: the number of OpenMP threads at which vLLM is fastest."""
    return min(psutil.cpu_count(logical=False) or 1, allowed_cpus())


def total_memory() -> int:
    """Bytes of this machine's memory, or of its container's limit if that is lower."""
    return int(min(psutil.virtual_memory().total, cgroup.memory_limit()))


def available_memory() -> int:
    """Bytes that this process can still allocate, by the machine's memory and its container's limit."""
    return int(min(psutil.virtual_memory().available, cgroup.available_memory()))


def user_variables(environment: Mapping[str, str], root: Path) -> dict[str, str]:
    """Return HOME and USER for a user without a writable home or without a name; empty for other users.

    Libraries need both, but containers often run under a user id without an account (`docker run --user`, OpenShift).

    Args:
        environment: environment of the process that will get the variables; what it has already is left out.
        root: the repository; such a user's home is its folder .cache/home.
    """
    variables = {}
    try:
        user = pwd.getpwuid(os.getuid())
    except KeyError:
        user = None
        if not any(environment.get(name) for name in ("LOGNAME", "USER", "LNAME", "USERNAME")):
            variables["USER"] = str(os.getuid())
    home = environment.get("HOME") or (user.pw_dir if user else "")
    if not home or not os.access(home, os.W_OK):
        variables["HOME"] = str(root / ".cache" / "home")
    return variables


def preloaded_libraries(environment: Mapping[str, str]) -> dict[str, str]:
    """LD_PRELOAD with torch's OpenMP library, as vLLM's CPU platform sets it for its workers (vllm/platforms/cpu.py).

    Args:
        environment: environment of the process to start.

    Returns:
        An empty dictionary if an OpenMP library is preloaded already or LD_PRELOAD cannot name torch's.
    """
    preloaded = environment.get("LD_PRELOAD", "")
    torch = importlib.util.find_spec("torch")
    if re.search("lib(gomp|omp|iomp)", preloaded) or torch is None or torch.origin is None:
        return {}
    package = Path(torch.origin).parent
    folders = (package.parent / "torch.libs", package / "lib")
    # LD_PRELOAD cannot name such a path: the loader splits it at spaces and colons.
    libraries = [
        path for folder in folders for path in folder.glob("libgomp*.so*") if not re.search("[ :]", str(path))
    ]
    return {"LD_PRELOAD": ":".join(filter(None, [preloaded, *map(str, libraries[:1])]))} if libraries else {}


def is_stray(key: str) -> bool:
    """Whether a variable of the caller's shell must not reach a server, because it would change what is measured.

    It is so for VLLM_* and TORCHINDUCTOR_*, except VLLM_API_KEY.
    """
    return key.startswith(("VLLM_", "TORCHINDUCTOR_")) and key != "VLLM_API_KEY"
