"""Triton kernels that are compiled instead of launched, and the choices of autotuners that a GPU cannot run.

Triton's own compiler and its ptxas make machine code for the target that the active driver names
(`slimqwen.plan.simulated_gpu`); no GPU is needed. A kernel with an autotuner is compiled with each of its choices.
Triton tells ptxas the number of threads of a block, so the code never needs more registers than the GPU has.
"""

import contextlib
import itertools
import operator
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from unittest.mock import patch

from slimqwen.plan.devices import Gpu
from slimqwen.plan.facts import LostChoice, TritonKernel

_TENSOR_MEMORY_COLUMNS = 512  # of compute capability 10.x, as in triton/compiler/compiler.py


@dataclass(frozen=True)
class Compilation:
    """One kernel, compiled for one signature with one choice of its autotuner."""

    kernel: str  # module of vLLM, and name
    choice: str  # choice of the autotuner, such as "BV=64 num_warps=4"; empty without autotuner
    launch: int  # number of the launch, which runs the fastest of the choices compiled for it
    shared_bytes: int = 0  # shared memory of a block
    tensor_memory_columns: int = 0  # columns of tensor memory of a block
    folder: str = ""  # folder in Triton's cache, named by a hash of all inputs; empty if compilation failed
    error: str | None = None

    def obstacle(self, shared_limit_bytes: int) -> str | None:
        """Why a GPU with `shared_limit_bytes` of shared memory per block cannot run the kernel; None if it can."""
        if self.error is not None:
            return self.error
        if self.shared_bytes > shared_limit_bytes:
            return f"needs {self.shared_bytes} bytes of shared memory, the GPU has {shared_limit_bytes}"
        if self.tensor_memory_columns > _TENSOR_MEMORY_COLUMNS:
            return (
                f"needs {self.tensor_memory_columns} columns of tensor memory, "
                f"the GPU has {_TENSOR_MEMORY_COLUMNS}"
            )
        return None


def summarise_kernels(compilations: Sequence[Compilation], gpu: Gpu) -> list[TritonKernel]:
    """The kernels, ordered by name, each with the choices that a GPU cannot run."""
    limit = gpu.shared_memory_bytes
    kernel_name = operator.attrgetter("kernel")
    groups = itertools.groupby(sorted(compilations, key=kernel_name), kernel_name)
    return [_summary(name, list(group), limit) for name, group in groups]


def _summary(kernel: str, compilations: Sequence[Compilation], shared_limit_bytes: int) -> TritonKernel:
    runnable_launches: set[int] = set()
    lost: list[LostChoice] = []
    for compilation in compilations:
        reason = compilation.obstacle(shared_limit_bytes)
        if reason is None:
            runnable_launches.add(compilation.launch)
        else:
            lost.append(LostChoice(choice=compilation.choice, reason=reason))
    launches = {compilation.launch for compilation in compilations}
    return TritonKernel(
        kernel=kernel,
        compiled=len(compilations),
        lost=list(dict.fromkeys(lost)),
        runs=launches == runnable_launches,
    )


@contextlib.contextmanager
def compiled_not_launched() -> Iterator[list[Compilation]]:
    """Compile each Triton kernel instead of launching it, for the target of Triton's active driver.

    Yields:
        List that grows with each compilation; a kernel that is launched again is not listed again.
    """
    from triton.runtime.autotuner import Autotuner
    from triton.runtime.jit import JITFunction

    compilations: list[Compilation] = []
    kernels: dict[int, Any] = {}  # id() -> kernel, kept alive so that no id is used twice
    launch, choice, tuning = 0, "", False
    compile_or_launch = JITFunction.run

    def run(self: Any, *arguments: Any, grid: Any = None, warmup: bool = False, **keywords: Any) -> Any:
        nonlocal launch
        launch += not tuning
        name = f"{self.__module__}.{self.__name__}"
        try:
            kernel = compile_or_launch(self, *arguments, grid=grid, warmup=True, **keywords)
        except Exception as error:  # an autotuner skips a choice that does not compile
            reason = " ".join(f"{type(error).__name__}: {error}".split())[:300]
            compilations.append(Compilation(name, choice, launch, error=reason))
            return None
        if id(kernel) not in kernels:
            kernels[id(kernel)] = kernel
            compilations.append(_compilation(name, choice, launch, kernel))
        return kernel

    def tune(self: Any, *arguments: Any, **keywords: Any) -> None:
        nonlocal launch, choice, tuning
        # `prune_configs` reads `nargs`, which the autotuner's own `run` sets too.
        self.nargs = dict(zip(self.arg_names, arguments, strict=False))
        launch += 1
        tuning = True
        try:
            for config in self.prune_configs(keywords):
                choice = _choice_text(config)
                self.fn.run(*arguments, **{**keywords, **config.all_kwargs(), "warmup": True})
        finally:
            choice, tuning = "", False

    with patch.object(JITFunction, "run", run), patch.object(Autotuner, "run", tune):
        yield compilations


def _choice_text(config: Any) -> str:
    """A choice of an autotuner as text, with all that distinguishes it from others."""
    words = {**config.kwargs, "num_warps": config.num_warps, "num_stages": config.num_stages}
    return " ".join(f"{name}={value}" for name, value in words.items())


def _compilation(name: str, choice: str, launch: int, kernel: Any) -> Compilation:
    from triton.runtime.cache import get_cache_manager

    metadata = kernel.metadata
    return Compilation(
        name,
        choice,
        launch,
        shared_bytes=metadata.shared,
        tensor_memory_columns=getattr(metadata, "tmem_size", None) or 0,
        folder=Path(get_cache_manager(kernel.hash).cache_dir).name,
    )
