"""Checkpoints of tests: the committed one, the output of a stage, and what a test changes in a copy."""

import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from slimqwen import progress
from slimqwen.checkpoint import Manifest
from slimqwen.checkpoint.files import file_records
from slimqwen.models import language_model
from slimqwen.recipe.registry import STAGES

TINY = Path(__file__).parents[1] / "weights" / "tiny"


def stage_output(stage: str, source: Path, destination: Path, **parameters: Any) -> Path:
    """Run a stage in this process into a new folder."""
    destination.mkdir()
    STAGES[stage].run(source, destination, STAGES[stage].parameters(**parameters), progress.silent)
    return destination


def stored(folder: Path) -> dict[str, torch.Tensor]:
    """The tensors of a checkpoint of one file."""
    tensors: dict[str, torch.Tensor] = load_file(folder / "model.safetensors")
    return tensors


@contextmanager
def edited_tensors(folder: Path) -> Iterator[dict[str, torch.Tensor]]:
    """The tensors of a checkpoint of one file, written back when the block ends."""
    tensors = stored(folder)
    yield tensors
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})


def count_layers_in_memory(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """A list that gets, whenever a part of a language model is loaded, the number of its layers that are in memory."""
    layers: weakref.WeakSet[torch.nn.Module] = weakref.WeakSet()
    counts: list[int] = []
    load_part = language_model._load_part

    def load_and_count(*arguments: Any) -> Any:
        model = load_part(*arguments)
        layers.update(model.model.layers)
        counts.append(len(layers))
        return model

    monkeypatch.setattr(language_model, "_load_part", load_and_count)
    return counts


def with_manifest(folder: Path) -> Path:
    """Write a manifest that says that the folder is as it should be."""
    records = file_records(folder)
    Manifest(stage="s", files=records, wall_seconds=0, peak_memory_bytes=0, versions={}).write(folder)
    return folder
