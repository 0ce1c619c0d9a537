"""Checkpoints of tests: the committed one, the output of a stage, and what a test changes in a copy."""

import json
import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from slimqwen import progress
from slimqwen.checkpoint import Manifest, draft_head
from slimqwen.checkpoint.files import file_records
from slimqwen.checkpoint.tensors import INDEX, NewTensor
from slimqwen.models import language_model
from slimqwen.recipe.registry import STAGES

TINY = Path(__file__).parents[1] / "weights" / "tiny"


def new_tensor(dtype: str, shape: tuple[int, ...], content: bytes) -> NewTensor:
    """A tensor of these bytes, to be written."""
    return NewTensor(dtype, shape, lambda: [content])


def stage_output(stage: str, source: Path, destination: Path, **parameters: Any) -> Path:
    """Run a stage in this process into a new folder."""
    destination.mkdir()
    STAGES[stage].run(source, destination, STAGES[stage].parameters(**parameters), progress.silent)
    return destination


def stored(folder: Path) -> dict[str, torch.Tensor]:
    """The tensors of a checkpoint of one shard, and those of its draft head."""
    tensors: dict[str, torch.Tensor] = load_file(folder / "model.safetensors")
    if (folder / draft_head.FILE).is_file():
        tensors |= load_file(folder / draft_head.FILE)
    return tensors


@contextmanager
def edited_tensors(folder: Path) -> Iterator[dict[str, torch.Tensor]]:
    """The tensors of a checkpoint of one shard, written back when the block ends, a draft head into its own file."""
    tensors = stored(folder)
    yield tensors
    head = {name: tensors[name] for name in tensors if name.startswith(draft_head.PREFIX)}
    listed = {name: tensor for name, tensor in tensors.items() if name not in head}
    save_file(listed, folder / "model.safetensors", metadata={"format": "pt"})
    (folder / draft_head.FILE).unlink(missing_ok=True)
    if head:
        save_file(head, folder / draft_head.FILE, metadata={"format": "pt"})
        index = {"metadata": {}, "weight_map": dict.fromkeys(sorted(listed), "model.safetensors")}
        (folder / INDEX).write_text(json.dumps(index))


def in_old_layout(folder: Path) -> Path:
    """Put the draft head of a checkpoint into its only shard, as earlier versions did."""
    tensors = stored(folder)
    (folder / draft_head.FILE).unlink()
    (folder / INDEX).unlink()
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    return folder


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
