"""Compile watch inside vLLM's processes: log for each graph whether it was compiled or loaded from the cache.

The watch is an entry point of `vllm.general_plugins`, so that engine and workers load it too. It does nothing unless
`slimqwen.serving.command` sets the environment variable `VARIABLE` to a `CachePolicy`.
"""

import logging
import os
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from typing import Any

from pydantic import BaseModel, ConfigDict

from slimqwen.vllm_plugin import vllm_log
from slimqwen.vllm_plugin.errors import PluginError
from slimqwen.vllm_plugin.patches.serving import triton_cache
from slimqwen.vllm_plugin.patches.upstream import expect, replace, require

VARIABLE = "SLIMQWEN_COMPILE_CACHE"

logger = logging.getLogger(__name__)


class CachePolicy(BaseModel):
    """How a start uses its compile cache.

    Attributes:
        required: whether the engine ends instead of compiling a graph.
        libraries: folder of the libraries of FlashInfer that were compiled ahead; the folder may be missing.
        kernels: folder of Triton's cache, which may be missing; "" on a CPU.
    """

    model_config = ConfigDict(extra="forbid", frozen=True)

    required: bool = False
    libraries: str = ""
    kernels: str = ""


def register() -> None:
    """Watch vLLM's compilations; vLLM calls this function in each of its processes.

    Raises:
        PatchError: the installed vLLM or torch is not the one for which the watch was written.
    """
    text = os.environ.get(VARIABLE)
    if not text:
        return
    cache_policy = CachePolicy.model_validate_json(text)
    vllm_log.join()
    patches = ["leave_checkpoint_path_out_of_key", "watch_compilations"]
    has_libraries = bool(cache_policy.libraries) and Path(cache_policy.libraries).is_dir()
    has_kernels = bool(cache_policy.kernels) and Path(cache_policy.kernels).is_dir()
    patches += ["load_flashinfer_libraries"] if has_libraries else []
    patches += ["find_beside_group_file"] if cache_policy.kernels else []
    patches += ["log_compilations"] if has_kernels else []
    require(*patches, of="compile cache")
    leave_checkpoint_path_out_of_key()
    watch_compilations(required=cache_policy.required)
    if has_libraries:
        load_flashinfer_libraries(Path(cache_policy.libraries))
    if cache_policy.kernels:
        triton_cache.find_beside_group_file()
    if has_kernels:
        triton_cache.log_compilations(Path(cache_policy.kernels))
    if cache_policy.required:
        # FlashInfer reads the variable before each compilation.
        os.environ["FLASHINFER_DISABLE_JIT"] = "1"


def load_flashinfer_libraries(folder: Path) -> None:
    """Make FlashInfer load the libraries in a folder as prebuilt ones.

    At every start FlashInfer checks libraries that it compiled itself with ninja, which compares times of sources and
    headers and needs a CUDA toolkit. It loads prebuilt ones as they are (`JitSpecNvcc.try_load` in
    flashinfer/jit/core.py).

    Args:
        folder: folder with <name>/<name>.so for each library.
    """
    from flashinfer.jit import env

    expect(
        "load_flashinfer_libraries",
        isinstance(getattr(env, "FLASHINFER_AOT_DIR", None), Path),
        "flashinfer has no AOT folder",
    )
    env.FLASHINFER_AOT_DIR = folder
    names = ", ".join(sorted(library.stem for library in folder.glob("*/*.so")))
    logger.info("FlashInfer libraries from the compile cache: %s", names or "none")


def watch_compilations(required: bool) -> None:
    """Log for every graph whether it was loaded or compiled, and in how many seconds.

    Args:
        required: whether to raise a PluginError when a graph is about to be compiled.
    """
    from vllm.compilation import decorators

    reasons: dict[str, str] = {}

    @contextmanager
    def monitor(
        stock: Callable[..., AbstractContextManager[None]], *arguments: Any, **keywords: Any
    ) -> Iterator[None]:
        graph = keywords.get("tag") or "model"
        # vLLM tells its monitor of a compilation, but not of an attempt to load.
        loads = not keywords.get("announce_start", True)
        if required and not loads:
            raise PluginError(
                f"REQUIRE_BAKED=1, and the baked compile cache has no usable graph {graph} "
                f"({reasons.get(graph, 'nothing was found')}); bake the cache anew with these versions, or serve "
                "without REQUIRE_BAKED"
            )
        started = time.perf_counter()
        try:
            with stock(*arguments, **keywords):
                yield
        except Exception as error:
            missing = isinstance(error, FileNotFoundError)
            reasons[graph] = "not in the cache" if missing else " ".join(str(error).split())
            raise
        how = "loaded from the compile cache" if loads else "compiled"
        why = f" ({reasons[graph]})" if not loads and graph in reasons else ""
        logger.info("Graph %s %s in %.2f s%s", graph, how, time.perf_counter() - started, why)

    names = ("vllm_config", "message", "is_encoder", "tag", "announce_start")
    replace("watch_compilations", decorators, "monitor_torch_compile", monitor, names)


def leave_checkpoint_path_out_of_key() -> None:
    """Leave the checkpoint's path out of vLLM's compile key; otherwise no cache could be moved.

    A graph depends on the checkpoint's configuration, which stays in the key. Remove this function when
    `ModelConfig.compute_hash` in vllm/config/model.py ignores `model` as it ignores `tokenizer`.
    """
    from vllm.config import model as upstream

    def compute_hash(stock: Callable[[Any], str], self: Any) -> str:
        path = self.model
        # A normal assignment would make pydantic validate the whole configuration again.
        object.__setattr__(self, "model", "")
        try:
            return stock(self)
        finally:
            object.__setattr__(self, "model", path)

    replace("leave_checkpoint_path_out_of_key", upstream.ModelConfig, "compute_hash", compute_hash)
