"""Checkpoints of tests: the committed one, the output of a stage, and what a test changes in a copy."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file

from slimqwen import progress
from slimqwen.checkpoint import Manifest
from slimqwen.checkpoint.files import file_records
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


def with_manifest(folder: Path) -> Path:
    """Write a manifest that says that the folder is as it should be."""
    records = file_records(folder)
    Manifest(stage="s", files=records, wall_seconds=0, peak_memory_bytes=0, versions={}).write(folder)
    return folder
