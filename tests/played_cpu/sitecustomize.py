"""Have every Python process of a test run take the CPU for one of a lower kind.

Python itself imports this module where its folder is in PYTHONPATH, so that it reaches each server, engine and worker.
What is played is what torch says in Python: by it vLLM chooses its library and its kernels. Torch's own kernels follow
only as far as `tests/cpu_kinds.py` can tell them by environment variables.
"""

import importlib.abc
import importlib.machinery
import os
import sys
from types import MappingProxyType, ModuleType

VARIABLE = "SLIMQWEN_PLAYED_CPU"
"""Environment variable with the kind to be played."""

LACKS = {
    "amx": (),
    "avx512_bf16": ("amx",),
    "avx512": ("amx", "avx512_bf16", "avx512_fp16"),
    "avx2": ("amx", "avx512", "avx10", "avx_vnni"),
}
"""Kinds of CPU by vLLM's choices, best first, and how the names of the capabilities begin that each is without."""


def hide_capabilities(torch: ModuleType, kind: str) -> None:
    """Have torch say what a CPU of that kind has, at most what this one has."""
    present = torch.cpu.get_capabilities()
    played = MappingProxyType(
        {name: value and not name.startswith(LACKS[kind]) for name, value in present.items()}
    )
    torch.cpu.get_capabilities = lambda: played


class _PlayingLoader(importlib.abc.Loader):
    def __init__(self, loader: importlib.abc.Loader, kind: str) -> None:
        self._loader, self._kind = loader, kind

    def create_module(self, spec: importlib.machinery.ModuleSpec) -> ModuleType | None:
        return self._loader.create_module(spec)

    def exec_module(self, module: ModuleType) -> None:
        self._loader.exec_module(module)
        hide_capabilities(module, self._kind)


class PlayedTorch(importlib.abc.MetaPathFinder):
    """Finds torch, which plays the kind as soon as it is imported."""

    def __init__(self, kind: str) -> None:
        self._kind = kind

    def find_spec(self, name, path=None, target=None):
        if name != "torch":
            return None
        spec = importlib.machinery.PathFinder.find_spec(name, path, target)
        if spec is not None and spec.loader is not None:
            spec.loader = _PlayingLoader(spec.loader, self._kind)
        return spec


if __name__ == "sitecustomize" and os.environ.get(VARIABLE):
    sys.meta_path.insert(0, PlayedTorch(os.environ[VARIABLE]))
