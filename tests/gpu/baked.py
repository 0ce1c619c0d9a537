"""Step e: bake a compile cache, and start from its archive, with the archive and the plan required."""

import shutil
import time
from pathlib import Path
from typing import Any

from slimqwen import variant as variants
from slimqwen.plan import rehearsal
from slimqwen.plan.devices import Gpu
from slimqwen.processes import spawner
from slimqwen.progress import silent
from slimqwen.recipe.stages.bake_cache import BakeCacheParameters, bake_compile_cache
from slimqwen.serving import baked_cache
from slimqwen.serving.command import ServerCommand
from slimqwen.serving.server import free_port
from tests.gpu.plans import read_comparison, started_as_planned
from tests.gpu.steps import Here
from tests.recipe.repository_of_v import CONFIG, make_repository_of_v


def run(here: Here) -> str:
    """Bake in a repository of its own below .cache/, and start there."""
    with spawner.share_spawner():
        return bake_and_start(here, here.root / ".cache" / "gpu-check")


def bake_and_start(here: Here, place: Path) -> str:
    """Bake below a folder, then start from there; returns what was seen, in a line."""
    baked = here.part("bake", lambda: bake(here, place / "baked"))
    assert "failure" not in baked, baked["failure"]
    started = here.part("start from it", lambda: start_from_archive(place / "baked", here.gpu))
    assert "failure" not in started, started["failure"]
    return (
        f"{baked['graphs']} graphs and {baked['libraries']} libraries baked: compiled in {baked['compile_seconds']} s, "
        f"loaded in {baked['load_seconds']} s; a start with archive and plan required takes "
        f"{started['seconds']:.0f} s, {started['loaded']} graphs loaded, {started['facts']} facts as planned"
    )


def bake(here: Here, root: Path) -> dict[str, Any]:
    """Run the stage on the embedded model, in a repository of its own; its facts."""
    shutil.rmtree(root, ignore_errors=True)
    make_repository_of_v(root, "  - bake_cache: {}\n", config(here.gpu))
    shutil.copytree(here.root / "eval", root / "eval")
    lengths = (1, 64, 300) if here.gpu else (1,)
    parameters = BakeCacheParameters(config=root / "experiments" / "v" / "config.env", prompt_tokens=lengths)
    destination = root / "weights" / "v"
    destination.mkdir()
    return {**bake_compile_cache(root / "weights" / "tiny", destination, parameters, silent)}


def config(gpu: Gpu | None) -> str:
    """config.env of the variant; on a GPU its memory is left to vLLM, but for the space of a small cache."""
    return f"{CONFIG}VLLM_GPU_MEMORY_UTILIZATION=0.2\n" if gpu else CONFIG


def start_from_archive(root: Path, gpu: Gpu | None) -> dict[str, Any]:
    """Start the baked checkpoint where only its archive and its plan let it start: nothing unpacked is left."""
    shutil.rmtree(root / ".cache", ignore_errors=True)
    subject = variants.load("v", root).with_lines({"REQUIRE_BAKED": "1"})
    plan = rehearsal.rehearse_variant(subject, gpu, log=root / "logs" / "plan.log")
    command = ServerCommand.resolve(subject, port=free_port(), platform="cuda" if gpu else "cpu")
    began, log = time.monotonic(), root / "logs" / "vllm.log"
    with started_as_planned(command, plan, log=log, required=True):
        seconds = time.monotonic() - began
    graphs = baked_cache.read_graphs(log.read_text(encoding="utf-8", errors="replace"))
    assert graphs, "the start names no graph"
    assert all(graph.loaded for graph in graphs), f"compiled in spite of the archive: {graphs}"
    assert not read_comparison(log)["differences"]
    facts = log.read_text(encoding="utf-8", errors="replace").split("all of ")[-1].split()[0]
    return {"seconds": seconds, "loaded": len(graphs), "facts": int(facts)}
