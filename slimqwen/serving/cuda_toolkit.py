"""CUDA toolkit for a server: the host's own, or one composed from the packages of this Python environment.

FlashInfer compiles kernels at their first use: it needs a CUDA_HOME with nvcc, headers and libraries to link with, and
ninja on PATH (flashinfer/jit/cpp_ext.py). The packages of the CUDA lock contain all of that except libcuda, which only
a driver installs, but the linker does not find their libraries, whose names end in versions. A folder of links to the
packages and a stub of libcuda make a CUDA_HOME.
"""

import hashlib
import os
import shutil
import subprocess
import sys
import sysconfig
import tempfile
from collections.abc import Mapping
from pathlib import Path

from slimqwen.serving.errors import ServingError

_DEFAULT_HOME = "/usr/local/cuda"


def variables(cache: Path, environment: Mapping[str, str] = os.environ) -> dict[str, str]:
    """Environment variables with which a process can compile CUDA code; empty if the host has nvcc and ninja.

    Args:
        cache: folder of the composed toolkit, which later starts reuse.
        environment: environment of the process without these variables.

    Raises:
        ServingError: the compiler cannot link a library.
    """
    added: dict[str, str] = {}
    path = environment.get("PATH", os.defpath)
    scripts = Path(sys.executable).parent
    if shutil.which("ninja", path=path) is None and shutil.which(str(scripts / "ninja")):
        added["PATH"] = f"{path}{os.pathsep}{scripts}"
    packages, compiler = _packages(), _compiler(environment)
    if _nvcc(environment) is None and packages is not None and compiler is not None:
        added["CUDA_HOME"] = str(_compose(packages, cache, compiler))
    return added


def missing(environment: Mapping[str, str] = os.environ) -> tuple[str, ...]:
    """Names of those of nvcc, ninja and a C++ compiler that a process with this `environment` cannot find."""
    tools = {
        "nvcc": _nvcc(environment),
        "ninja": shutil.which("ninja", path=environment.get("PATH", os.defpath)),
        "a C++ compiler": _compiler(environment),
    }
    return tuple(name for name, tool in tools.items() if tool is None)


def _nvcc(environment: Mapping[str, str]) -> str | None:
    """The nvcc that FlashInfer would run: that of CUDA_HOME, else on PATH, else of /usr/local/cuda; None without one.

    An nvcc on PATH counts only if its toolkit has headers: FlashInfer uses the folder above the nvcc's as CUDA_HOME.
    """
    home = environment.get("CUDA_HOME") or environment.get("CUDA_PATH")
    on_path = shutil.which("nvcc", path=environment.get("PATH", os.defpath))
    if on_path and not home:
        return on_path if (Path(on_path).parents[1] / "include" / "cuda_runtime.h").is_file() else None
    return shutil.which(f"{home or _DEFAULT_HOME}/bin/nvcc")


def _compiler(environment: Mapping[str, str]) -> str | None:
    return shutil.which(environment.get("CXX", "c++"), path=environment.get("PATH", os.defpath))


def _packages() -> Path | None:
    """Folder of NVIDIA's Python packages that contains nvcc; None in an environment for a CPU."""
    folders = sorted(Path(sysconfig.get_path("purelib")).glob("nvidia/cu[0-9]*"), reverse=True)
    return next((folder for folder in folders if shutil.which(str(folder / "bin" / "nvcc"))), None)


def _compose(packages: Path, cache: Path, compiler: str) -> Path:
    """Make the folder of links to the packages, or reuse the folder of an earlier start."""
    listing = "\n".join([str(packages), *sorted(file.name for file in (packages / "lib").iterdir())])
    home = cache / f"cuda-toolkit-{hashlib.sha256(listing.encode()).hexdigest()[:16]}"
    if home.is_dir():
        return home
    cache.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix=".cuda-toolkit.", dir=cache) as folder:
        new = Path(folder) / "toolkit"
        libraries = new / "lib64"
        (libraries / "stubs").mkdir(parents=True)
        for part in ("bin", "include", "nvvm"):
            (new / part).symlink_to(packages / part)
        for file in sorted((packages / "lib").iterdir()):
            (libraries / file.name).symlink_to(file)
            unversioned = libraries / f"{file.name.partition('.so')[0]}.so"
            if ".so." in file.name and not unversioned.is_symlink():
                unversioned.symlink_to(file.name)
        _link_stub(compiler, libraries / "stubs" / "libcuda.so")
        try:
            new.rename(home)
        except OSError:  # another start made it meanwhile
            if not home.is_dir():
                raise
    return home


def _link_stub(compiler: str, library: Path) -> None:
    """Link an empty libcuda: code that is linked with it loads the driver's libcuda, which has the same soname."""
    command = [compiler, "-shared", "-nostdlib", "-x", "c++", os.devnull, "-Wl,-soname,libcuda.so.1"]
    linker = subprocess.run([*command, "-o", str(library)], capture_output=True, text=True)
    if linker.returncode != 0:
        reason = (linker.stderr.strip().splitlines() or ["it printed nothing"])[-1]
        raise ServingError(
            f"{compiler} cannot link a library ({reason}); install a C++ compiler, on Debian: apt-get install g++"
        )
