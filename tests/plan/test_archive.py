"""FlashInfer's libraries and Triton's kernels compiled without a GPU: packed, named by the plan, loaded elsewhere."""

import json
import os
import shutil
import subprocess
import sys

import pytest

from slimqwen import variant
from slimqwen.plan import archive as archives
from slimqwen.plan import rehearsal, trouble
from slimqwen.plan.devices import read_gpu
from slimqwen.serving import baked_cache
from tests.plan.example import needs_cuda_build

ROOT = variant.repository_root()
pytestmark = [pytest.mark.engine, needs_cuda_build]
NAME = "cyankiwi-best"
BASE = "cyankiwi"  # of its recipe, which gives the dimensions
LOAD = """
import json, sys
from pathlib import Path
from slimqwen.plan import devices, simulated_gpu
from slimqwen.vllm_plugin import compile_watch
simulated_gpu.simulate_gpu(devices.read_gpu("a10g", Path(sys.argv[1])))
from flashinfer.jit.sampling import gen_sampling_module
compile_watch.load_flashinfer_libraries(Path(sys.argv[2]))
spec = gen_sampling_module()
loads = hasattr(spec.build_and_load(), "top_k_top_p_sampling_from_probs")
print(json.dumps([spec.is_aot, loads, str(spec.get_library_path())]))
"""


@pytest.fixture(scope="module")
def root(tmp_path_factory):
    """A repository whose variant takes FlashInfer for sampling alone, the quicker of its libraries."""
    root = tmp_path_factory.mktemp("repository")
    shutil.copytree(ROOT / "eval", root / "eval")
    shutil.copytree(ROOT / "weights" / "tiny", root / "weights" / "tiny")
    for name in {*variant.load(NAME).lineage, BASE}:
        shutil.copytree(ROOT / "experiments" / name, root / "experiments" / name)
    config = root / "experiments" / NAME / "config.env"
    lines = [line for line in config.read_text().splitlines() if "FLASHINFER_SAMPLER" not in line]
    config.write_text("\n".join([*lines, "VLLM_USE_FLASHINFER_SAMPLER=1"]) + "\n")
    return root


@pytest.fixture(scope="module")
def archive(root):
    subject = variant.load(NAME, root)
    return archives.make_archive(subject, read_gpu("a10g", ROOT), subject.weights, log=root / "build.log")


def plan(root):
    subject, a10g = variant.load(NAME, root), read_gpu("a10g", root)
    planned = rehearsal.rehearse_variant(subject, a10g, log=root / "plan.log", kernels=True)
    assert planned.error is None, (root / "plan.log").read_text()[-2000:]
    return planned


def test_the_plan_of_a_variant_with_the_archive_says_that_nothing_is_left_to_compile(root, archive):
    assert list(archive.baked.libraries) == ["sampling"]
    assert archive.baked.machine["compute capability"] == "8.6"
    planned = plan(root)
    assert [(module.libraries, module.baked) for module in planned.jit] == [(["sampling"], True)]
    assert not [
        entry
        for entry in trouble.match_trouble(planned, trouble.read_known_trouble(ROOT))
        if entry.effect == "dies"
    ]
    assert planned.kernels.forms == len(archive.baked.kernels) > 100
    assert planned.kernels.compiled_at_start == 0


def test_triton_compiles_no_kernel_anew_from_the_restored_archive(root, archive, tmp_path):
    checkout = tmp_path / "checkout"
    shutil.copytree(root, checkout, ignore=shutil.ignore_patterns(".cache"))
    baked_cache.restore_cache(variant.load(NAME, root).weights, archive.baked, tmp_path / "cache")
    kernels = checkout / ".cache" / "triton"
    kernels.parent.mkdir()
    (tmp_path / "cache" / baked_cache.KERNELS).rename(kernels)
    plan(checkout)
    # A compilation leaves its steps, which an archive has not, except where the kernel does not compile.
    assert {path.name for path in kernels.iterdir()} == archive.baked.kernels
    assert not list(kernels.rglob("*.ptx"))


def test_without_the_archive_a_first_start_compiles_every_form(root, archive):
    weights = variant.load(NAME, root).weights
    for name in (baked_cache.ARCHIVE, baked_cache.MANIFEST):
        (weights / name).rename(root / name)
    try:
        planned = plan(root)
    finally:
        for name in (baked_cache.ARCHIVE, baked_cache.MANIFEST):
            (root / name).rename(weights / name)
    assert planned.kernels.compiled_at_start == planned.kernels.forms == len(archive.baked.kernels)


def test_flashinfer_loads_the_restored_library_where_it_may_compile_nothing(root, archive, tmp_path):
    baked_cache.restore_cache(variant.load(NAME, root).weights, archive.baked, tmp_path / "cache")
    folder = tmp_path / "cache" / baked_cache.LIBRARIES
    forbidden = {"FLASHINFER_DISABLE_JIT": "1", "FLASHINFER_WORKSPACE_BASE": str(tmp_path)}
    ended = subprocess.run(
        [sys.executable, "-c", LOAD, str(ROOT), str(folder)],
        env={**os.environ, **forbidden},
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert ended.returncode == 0, ended.stderr
    path = str(folder / "sampling" / "sampling.so")
    assert json.loads(ended.stdout.splitlines()[-1]) == [True, True, path]
