"""A repository in small, with a store of its own and fake stages."""

import json
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from slimqwen.checkpoint.config import write_config
from slimqwen.checkpoint.tensors import NewTensor, list_tensors, write_tensors
from slimqwen.recipe import recipe_file, runner
from slimqwen.recipe.recipe_file import Recipe
from tests.recipe.fake_stages import STAGES


def first_byte(folder: Path) -> int:
    """The first byte of the first tensor of a workshop's checkpoint: the sum of all amounts added."""
    return next(list_tensors(folder)["a"].chunks())[0]


@dataclass
class Workshop:
    """A repository in small: weights/, a base in it, and a way to write recipes for it."""

    root: Path
    weights: Path = field(init=False)
    base: Path = field(init=False)
    runs: Path = field(init=False)

    def __post_init__(self) -> None:
        self.weights = self.root / "weights"
        self.base = self.weights / "base"
        self.runs = self.root / "runs.txt"
        self.base.mkdir(parents=True)
        write_config(self.base, {"architectures": ["Qwen3_5ForCausalLM"]})
        for name in ("tokenizer.json", "tokenizer_config.json"):
            (self.base / name).write_text("{}")
        names = ("a", "b", "c", "d")
        write_tensors(
            self.base / "model.safetensors",
            {name: NewTensor("U8", (64,), lambda: [bytes(64)]) for name in names},
        )

    def recipe(self, *stages: str | dict[str, dict[str, Any]], variant: str = "v") -> Recipe:
        """Write a recipe.yaml; a name stands for the stage with its defaults."""
        file = self.root / f"{variant}.yaml"
        listed = [{stage: {}} if isinstance(stage, str) else stage for stage in stages]
        content = {"description": "a test", "base": "base", "stages": listed}
        file.write_text(json.dumps(content))
        return recipe_file.read_recipe(file, STAGES)

    def add(self, amount: int, **more: Any) -> dict[str, dict[str, Any]]:
        """The stage add, its runs recorded."""
        return {"add": {"amount": amount, "runs": str(self.runs), **more}}

    def run(self, recipe: Recipe, variant: str = "v", **more: Any) -> list[runner.Outcome]:
        """Run a recipe on this store."""
        return runner.run_recipe(recipe, variant, self.weights, self.resolve, **more)

    def status(self, recipe: Recipe) -> list[runner.StageForecast]:
        """Ask what a run would do."""
        return runner.forecast_recipe(recipe, self.weights, self.resolve)

    def resolve(self, base: str) -> Path:
        """Every base is a folder under weights/."""
        return self.weights / base

    def amounts_run(self) -> list[int]:
        """The amounts of the add stages that really ran, in order."""
        return [int(line) for line in self.runs.read_text().split()] if self.runs.exists() else []

    def entries(self) -> list[str]:
        """The keys in the store."""
        store = self.weights / "store"
        return sorted(path.name for path in store.glob("[!.]*")) if store.exists() else []

    def visible(self) -> set[str]:
        """Every file that is not a tool's own, as seen from weights/."""
        return {
            path.relative_to(self.weights).as_posix()
            for path in self.weights.rglob("*")
            if not any(part.startswith(".") for part in path.relative_to(self.weights).parts)
        }
