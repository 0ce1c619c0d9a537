"""Run a recipe of fake stages in a process that a test can kill: drive.py RECIPE VARIANT WEIGHTS BASE_FOLDER."""

import sys
from pathlib import Path

from slimqwen.recipe import recipe_file, runner
from tests.recipe.fake_stages import STAGES

if __name__ == "__main__":
    recipe, variant, weights, base = sys.argv[1:]
    read = recipe_file.read_recipe(Path(recipe), STAGES)
    runner.run_recipe(read, variant, Path(weights), lambda name: Path(base))
