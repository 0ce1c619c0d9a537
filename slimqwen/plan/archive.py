"""Compile caches made without a GPU, for the first start of a variant on a GPU model.

Such a cache has FlashInfer's libraries and Triton kernels. The graphs of torch.compile need a GPU: the stage
`bake_cache` packs all three on a host with a GPU.
"""

import dataclasses
import shutil
import tempfile
from pathlib import Path

from slimqwen.checkpoint.files import MANIFEST
from slimqwen.errors import SlimqwenError
from slimqwen.plan import rehearsal
from slimqwen.plan.devices import Gpu
from slimqwen.plan.facts import Plan
from slimqwen.progress import Progress, silent
from slimqwen.serving import baked_cache
from slimqwen.variant import Variant


class NothingToCompileError(SlimqwenError):
    """The first start of the variant compiles nothing that can be compiled ahead."""


@dataclasses.dataclass(frozen=True)
class Archive:
    """A packed compile cache."""

    plan: Plan  # plan of the variant on the GPU model, which names the libraries and kernels
    baked: baked_cache.BakedCache  # manifest of the archive, which has no graphs


def make_archive(
    variant: Variant, gpu: Gpu, destination: Path, *, log: Path, progress: Progress = silent
) -> Archive:
    """Compile the libraries and kernels that a first start would compile, and pack them with a manifest.

    Args:
        variant: variant, whose checkpoint need not be here.
        gpu: GPU model of the first start.
        destination: folder for the archive, its manifest, and a copy of the checkpoint's manifest if there is one.
        log: file that receives the output of vLLM and the compilers.

    Raises:
        NothingToCompileError: there is nothing to compile ahead.
        RehearsalError: as `rehearsal.compile_for_gpu`.
    """
    with tempfile.TemporaryDirectory(prefix="slimqwen-compile-") as folder:
        cache_root = Path(folder)
        progress(f"compiling for {gpu.name}", 0, 0)
        plan, build = rehearsal.compile_for_gpu(variant, gpu, cache_root, log=log, kernels=True)
        if not any(cache_root.iterdir()):
            raise NothingToCompileError(
                f"{variant.name} compiles nothing on {gpu.name} that can be compiled ahead; see what its first start "
                f"compiles with `slimqwen plan --kernels --variant {variant.name} --gpu {gpu.name}`"
            )
        destination.mkdir(parents=True, exist_ok=True)
        progress("packing", 0, 0)
        baked = baked_cache.pack_cache(
            cache_root,
            destination,
            machine=build.machine,
            flags=build.flags,
            environment=build.environment,
            graphs={},
            libraries=build.seconds,
        )
    manifest = variant.weights / MANIFEST
    if manifest.is_file() and destination.resolve() != variant.weights.resolve():
        shutil.copyfile(manifest, destination / MANIFEST)
    return Archive(plan, baked)
