"""A recipe of all real stages, shortened, killed at 20 random instants, four in each stage: about a quarter of an hour.

Outside the default run: `pytest -m soak`. `test_runner.py` has the same with stages that only count.
"""

import os
import random
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from slimqwen import checkpoint, variant
from slimqwen.checkpoint import Manifest
from slimqwen.serving import baked_cache
from tests.recipe.workshop import repository_of_v

STAGES = ("calibrate", "prune_vocab", "sample_outputs", "redistill_mtp", "bake_cache")
KILLS_A_STAGE = 4
SHORT_STAGES = """
  - calibrate: {targets: [mlp], corpus: {path: tinyworld, sequences: 8, length: 64}}
  - prune_vocab: {size: 4096, corpus: {path: tinyworld, documents: 400}}
  - sample_outputs: {texts: 32, held_out: 16, tokens: 24, chunk: 16}
  - redistill_mtp: {depth: 2, steps: 8, validate_every: 2}
  - bake_cache: {prompt_tokens: [1, 64]}
"""
RUN = """
import sys
from pathlib import Path
from slimqwen.recipe import recipe_file, runner

root = Path(sys.argv[1])
recipe = recipe_file.read_recipe(root / "experiments" / "v" / "recipe.yaml")
runner.run_recipe(recipe, "v", root / "weights", lambda base: root / "weights" / base)
"""

pytestmark = [pytest.mark.soak, pytest.mark.engine, pytest.mark.timeout(3600)]


def start(root: Path) -> "subprocess.Popen[bytes]":
    with (root / "log").open("ab") as log:
        return subprocess.Popen([sys.executable, "-c", RUN, str(root)], stdout=log, stderr=log)


def content(folder: Path) -> dict[str, str]:
    """Hashes of all that has to come out the same: everything but what a compiler made and when."""
    compiled = (baked_cache.ARCHIVE, baked_cache.MANIFEST)
    files = Manifest.read(folder).files
    return {name: record.sha256 for name, record in files.items() if name not in compiled}


def made(root: Path) -> dict[str, Path]:
    """Stage -> its entry in the store, each checked to be whole."""
    entries = [folder for folder in (root / "weights" / "store").glob("[!.]*") if folder.is_dir()]
    return {checkpoint.verify(folder, "it should be whole").stage: folder for folder in entries}


def cut(root: Path, stage: str, seconds: float) -> bool:
    """Run until a stage has been at work for so long, kill the run, and say whether the stage was cut short."""
    before = STAGES[: STAGES.index(stage)]
    for name, folder in made(root).items():
        if name not in before:
            subprocess.run(["rm", "-r", str(folder)], check=True)
    (root / "weights" / "v").unlink(missing_ok=True)
    process = start(root)
    deadline = time.monotonic() + 600
    while not set(before) <= made(root).keys() and process.poll() is None and time.monotonic() < deadline:
        time.sleep(0.5)
    time.sleep(seconds)
    process.send_signal(signal.SIGKILL)
    process.communicate()
    found = made(root)
    assert set(before) <= found.keys(), (root / "log").read_text()[-2000:]
    # The link is moved when everything is there, never before.
    assert not os.path.lexists(root / "weights" / "v") or found.keys() == set(STAGES)
    return stage not in found


def test_real_stages_killed_at_any_instant_end_in_the_same_checkpoint(tmp_path: Path) -> None:
    whole, killed = (repository_of_v(tmp_path / name, SHORT_STAGES) for name in ("whole", "killed"))
    assert start(whole).wait() == 0, (whole / "log").read_text()[-2000:]
    durations = {stage: Manifest.read(folder).wall_seconds for stage, folder in made(whole).items()}
    assert durations.keys() == set(STAGES)
    rng = random.Random(0)
    cuts = dict.fromkeys(STAGES, 0)
    kills = [*STAGES * KILLS_A_STAGE]
    rng.shuffle(kills)
    for stage in kills:
        cuts[stage] += cut(killed, stage, rng.uniform(0.02, 0.98) * durations[stage])
    assert start(killed).wait() == 0, (killed / "log").read_text()[-2000:]
    assert min(cuts.values()) >= 2, cuts
    assert made(killed).keys() == set(STAGES)
    assert content(killed / "weights" / "v") == content(whole / "weights" / "v")
    facts = Manifest.read(killed / "weights" / "v").facts
    assert facts["graphs"] == 2
    baked = baked_cache.read_manifest(killed / "weights" / "v")
    assert baked is not None
    cache = tmp_path / "cache"
    baked_cache.restore_cache(killed / "weights" / "v", baked, cache)
    assert (cache / "vllm").is_dir()
    assert variant.load("v", killed).weights.is_dir()
