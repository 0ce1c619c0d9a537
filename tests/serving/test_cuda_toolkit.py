"""A CUDA toolkit composed from packages, planted and real."""

import shutil
import subprocess
import sys
import sysconfig
from pathlib import Path

import pytest
import torch

from slimqwen.serving import cuda_toolkit
from slimqwen.serving.errors import ServingError

HEADERS, VERSIONED = "cuda_runtime.h", "libcudart.so.13"


def tool(path: Path) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("#!/bin/sh\n")
    path.chmod(0o755)
    return path


@pytest.fixture
def host(tmp_path, monkeypatch):
    """A host with a C++ compiler and without nvcc and ninja, its environment with NVIDIA's packages and ninja."""
    packages = tmp_path / "site-packages/nvidia/cu13"
    tool(packages / "bin/nvcc")
    for file in ("include/cuda_runtime.h", f"lib/{VERSIONED}", "lib/libcudart_static.a", "nvvm/bin/cicc"):
        (packages / file).parent.mkdir(parents=True, exist_ok=True)
        (packages / file).touch()
    tool(tmp_path / "venv/bin/ninja")
    system = tmp_path / "system"
    system.mkdir()
    for name in ("c++", "ld", "as"):
        (system / name).symlink_to(shutil.which(name))
    monkeypatch.setattr(sysconfig, "get_path", lambda name: str(tmp_path / "site-packages"))
    monkeypatch.setattr(sys, "executable", str(tmp_path / "venv/bin/python"))
    monkeypatch.setattr(cuda_toolkit, "_DEFAULT_HOME", str(tmp_path / "nowhere"))
    return {"PATH": str(system)}


def test_a_host_without_a_toolkit_gets_one_of_the_environments_packages(host, tmp_path):
    assert cuda_toolkit.missing(host) == ("nvcc", "ninja")
    added = cuda_toolkit.variables(tmp_path / "cache", host)
    assert cuda_toolkit.missing(host | added) == ()
    assert added["PATH"] == f"{host['PATH']}:{tmp_path}/venv/bin"
    home = Path(added["CUDA_HOME"])
    assert (home / "include" / HEADERS).is_file()
    assert (home / "nvvm/bin/cicc").is_file()
    # What the linker asks for is unversioned, and the driver's library is not on the machine that compiles.
    assert (home / "lib64/libcudart.so").resolve().name == VERSIONED
    said = subprocess.run(
        ["readelf", "-d", home / "lib64/stubs/libcuda.so"], capture_output=True, text=True
    ).stdout
    assert "libcuda.so.1" in said


def test_a_second_start_finds_the_toolkit_of_the_first_and_nothing_else_is_left(host, tmp_path):
    first = cuda_toolkit.variables(tmp_path / "cache", host)
    stub = Path(first["CUDA_HOME"]) / "lib64/stubs/libcuda.so"
    made = stub.stat().st_mtime_ns
    assert cuda_toolkit.variables(tmp_path / "cache", host) == first
    assert stub.stat().st_mtime_ns == made
    assert list((tmp_path / "cache").iterdir()) == [Path(first["CUDA_HOME"])]


def test_the_hosts_own_toolkit_is_used(host, tmp_path):
    tool(tmp_path / "cuda/bin/nvcc")
    tool(tmp_path / "cuda/bin/ninja")
    (tmp_path / "cuda/include").mkdir()
    (tmp_path / "cuda/include" / HEADERS).touch()
    for own in ({"CUDA_HOME": str(tmp_path / "cuda")}, {"CUDA_PATH": str(tmp_path / "cuda")}, {}):
        path = host["PATH"] if "CUDA_HOME" in own else f"{host['PATH']}:{tmp_path}/cuda/bin"
        assert "CUDA_HOME" not in cuda_toolkit.variables(tmp_path / "cache", host | own | {"PATH": path})
    assert not (tmp_path / "cache").exists()


def test_an_nvcc_on_path_without_a_toolkit_around_it_is_passed_over(host, tmp_path):
    tool(tmp_path / "stray/bin/nvcc")
    path = {"PATH": f"{host['PATH']}:{tmp_path}/stray/bin"}
    assert "nvcc" in cuda_toolkit.missing(path)
    added = cuda_toolkit.variables(tmp_path / "cache", path)
    assert (Path(added["CUDA_HOME"]) / "include" / HEADERS).is_file()
    assert cuda_toolkit.missing(path | added) == ()


def test_an_environment_for_a_cpu_composes_nothing(host, tmp_path):
    shutil.rmtree(tmp_path / "site-packages")
    assert "CUDA_HOME" not in cuda_toolkit.variables(tmp_path / "cache", host)
    assert "nvcc" in cuda_toolkit.missing(host)


def test_a_host_without_a_compiler_composes_nothing_and_says_what_is_missing(host, tmp_path):
    host["PATH"] = str(tmp_path)
    added = cuda_toolkit.variables(tmp_path / "cache", host)
    assert cuda_toolkit.missing(host | added) == ("nvcc", "a C++ compiler")
    assert not (tmp_path / "cache").exists()


def test_a_compiler_that_cannot_link_is_one_line_and_leaves_nothing(host, tmp_path):
    broken = tool(tmp_path / "broken/c++")
    broken.write_text("#!/bin/sh\necho 'cannot find crt1.o' >&2\nexit 1\n")
    host["PATH"] = str(broken.parent)
    with pytest.raises(ServingError, match=r"cannot link a library \(cannot find crt1\.o\)"):
        cuda_toolkit.variables(tmp_path / "cache", host)
    assert list((tmp_path / "cache").iterdir()) == []


@pytest.mark.skipif(torch.version.cuda is None, reason="this torch is a CPU build")
def test_the_locks_own_packages_compile_and_link_for_a_gpu_that_is_not_there(tmp_path, monkeypatch):
    monkeypatch.setattr(cuda_toolkit, "_DEFAULT_HOME", "/nowhere")
    added = cuda_toolkit.variables(tmp_path / "cache", {"PATH": "/usr/bin:/bin"})
    source = tmp_path / "kernel.cu"
    source.write_text("__global__ void add(float *x) { x[threadIdx.x] += 1; }\n")
    home = added["CUDA_HOME"]
    libraries = [f"-L{home}/lib64", f"-L{home}/lib64/stubs", "-lcudart", "-lcuda"]
    subprocess.run(
        [f"{home}/bin/nvcc", "-arch=sm_86", "-Xcompiler", "-fPIC", "-c", source, "-o", tmp_path / "k.o"],
        check=True,
    )
    subprocess.run(["c++", "-shared", tmp_path / "k.o", *libraries, "-o", tmp_path / "k.so"], check=True)
    assert (tmp_path / "k.so").stat().st_size > 0
