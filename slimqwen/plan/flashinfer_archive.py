"""Libraries of FlashInfer for a variant on a GPU model, compiled on any host and packed as a compile cache.

The half of baking that takes no GPU; the stage `bake_cache` does both on a host with one.
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


class NoLibrariesError(SlimqwenError):
    """A variant that loads no library which could be compiled ahead."""


@dataclasses.dataclass(frozen=True)
class LibraryArchive:
    """What was packed.

    Attributes:
        plan: of the variant on the GPU model, by which the libraries were chosen.
        baked: the archive's manifest, without graphs.
    """

    plan: Plan
    baked: baked_cache.BakedCache


def make(
    variant: Variant, gpu_name: str, destination: Path, *, log: Path, progress: Progress = silent
) -> LibraryArchive:
    """Compile the libraries that a variant's plan names and pack them with a manifest of the variant's flags.

    Args:
        variant: the variant; its checkpoint need not be here.
        gpu_name: short name of the GPU model.
        destination: folder for the archive, its manifest, and a copy of the checkpoint's manifest where there is one.
        log: receives what vLLM and the compilers print.
        progress: receives (activity, variants done, variants).

    Raises:
        GpuModelError: the GPU model is not listed.
        NoLibrariesError: there is nothing to compile ahead.
        RehearsalError: a compiler is missing or failed, vLLM refuses the variant, it compiles no graphs, or torch is
            a CPU build.
    """
    model = gpu_model.load(variant.root, gpu_name)
    with tempfile.TemporaryDirectory(prefix="slimqwen-libraries-") as folder:
        plan, build = rehearsal.build_libraries(
            variant.root,
            variant.name,
            gpu_name,
            model,
            Path(folder) / baked_cache.LIBRARIES,
            log=log,
            progress=progress,
        )
        if not build.seconds:
            raise NoLibrariesError(
                f"{variant.name} loads no library of FlashInfer on {gpu_name} that can be compiled ahead; its plan "
                f"says what is compiled there: `slimqwen plan --variant {variant.name} --gpu {gpu_name}`"
            )
        destination.mkdir(parents=True, exist_ok=True)
        progress("packing", 0, 0)
        baked = baked_cache.pack(
            Path(folder),
            destination,
            machine=build.machine,
            device=model.name,
            flags=build.flags,
            environment=build.environment,
            graphs={},
            libraries=build.seconds,
        )
    manifest = variant.weights / MANIFEST
    if manifest.is_file() and destination.resolve() != variant.weights.resolve():
        shutil.copyfile(manifest, destination / MANIFEST)
    return LibraryArchive(plan, baked)
