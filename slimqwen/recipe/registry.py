"""The stages that a recipe can name: all modules of stages/, each imported when its stage is first used."""

import importlib
from collections.abc import Iterator, Mapping
from pathlib import Path

from slimqwen.recipe.stage import Stage


class _Stages(Mapping[str, Stage]):
    """Stages by name; stages/<name>.py defines each as STAGE."""

    def __init__(self) -> None:
        self._names = sorted(file.stem for file in Path(__file__).parent.glob("stages/[!_]*.py"))

    def __getitem__(self, name: str) -> Stage:
        if name not in self._names:
            raise KeyError(name)
        stage: Stage = importlib.import_module(f"slimqwen.recipe.stages.{name}").STAGE
        return stage

    def __iter__(self) -> Iterator[str]:
        return iter(self._names)

    def __len__(self) -> int:
        return len(self._names)


STAGES: Mapping[str, Stage] = _Stages()
