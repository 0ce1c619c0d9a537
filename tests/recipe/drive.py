"""A run of a recipe of fake stages in a process that a test can kill."""

import multiprocessing
from pathlib import Path

from slimqwen.recipe import recipe_file, runner
from tests.recipe.fake_stages import STAGES
from tests.recipe.workshop import Workshop

_CONTEXT = multiprocessing.get_context("forkserver")
_CONTEXT.set_forkserver_preload([__name__])  # imported once for all runs


def start_run(workshop: Workshop, variant: str) -> multiprocessing.context.ForkServerProcess:
    """Start a run of the workshop's recipe for a variant."""
    process = _CONTEXT.Process(target=_run, args=(workshop.root, workshop.weights, workshop.base, variant))
    process.start()
    return process


def _run(root: Path, weights: Path, base: Path, variant: str) -> None:
    recipe = recipe_file.read_recipe(root / f"{variant}.yaml", STAGES)
    runner.run_recipe(recipe, variant, weights, lambda name: base)
