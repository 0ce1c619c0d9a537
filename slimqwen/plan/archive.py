"""Compile caches made without a GPU, for the first start of a variant on a GPU model.

They hold FlashInfer's libraries and Triton kernels. The graphs of torch.compile take a GPU, so the stage `bake_cache`
packs all three on a host that has one.
"""

import dataclasses
import shutil
import tempfile
from pathlib import Path

from slimqwen.checkpoint.files import MANIFEST
from slimqwen.errors import SlimqwenError
from slimqwen.plan import gpu_model, rehearsal
from slimqwen.plan.facts import Plan
from slimqwen.progress import Progress, silent
from slimqwen.serving import baked_cache
from slimqwen.variant import Variant


class NothingToCompileError(SlimqwenError):
    """The first start of the variant compiles nothing that can be compiled ahead."""


@dataclasses.dataclass(frozen=True)
class Archive:
    """A packed compile cache."""

    plan: Plan  # of the variant on the GPU model; names the libraries and kernels
    baked: baked_cache.BakedCache  # the archive's manifest, without graphs


def make_archive(
    variant: Variant, gpu_name: str, destination: Path, *, log: Path, progress: Progress = silent
) -> Archive:
    """Compile what a first start would compile and pack it with a manifest of the variant's flags.

    Args:
        variant: the variant; its checkpoint may be absent.
        destination: folder for the archive, its manifest, and a copy of the checkpoint's manifest if it exists.
        log: receives what vLLM and the compilers print.

    Raises:
        GpuModelError: the GPU model is not listed.
        NothingToCompileError: there is nothing to compile ahead.
        RehearsalError: as `rehearsal.compile_for_gpu`.
    """
    model = gpu_model.load_gpu_model(variant.root, gpu_name)
    with tempfile.TemporaryDirectory(prefix="slimqwen-compile-") as folder:
        cache_root = Path(folder)
        progress(f"compiling for {gpu_name}", 0, 0)
        plan, build = rehearsal.compile_for_gpu(variant, gpu_name, model, cache_root, log=log, kernels=True)
        if not any(cache_root.iterdir()):
            raise NothingToCompileError(
                f"{variant.name} compiles nothing on {gpu_name} that can be compiled ahead; its plan lists what it "
                f"compiles there: `slimqwen plan --kernels --variant {variant.name} --gpu {gpu_name}`"
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
