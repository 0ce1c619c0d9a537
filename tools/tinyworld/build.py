"""The build of `weights/tiny` from scratch: tokenizer, training, checkpoint, longest context, training record."""

import dataclasses
import json
import os
import platform
import random
import resource
import shutil
from pathlib import Path
from typing import Any

import numpy
import tokenizers
import torch
import transformers

from slimqwen.checkpoint import Manifest
from slimqwen.checkpoint.files import file_records
from slimqwen.models.mtp_head import load_drafting_model
from slimqwen.progress import Progress, silent
from tinyworld.context import context_sweep, usable_context
from tinyworld.documents import tokenizer_texts
from tinyworld.model import write_checkpoint
from tinyworld.prose import chronicle
from tinyworld.tokenizer import load_tokenizer, train_tokenizer
from tinyworld.train import TrainingPlan, TrainingResult, train
from tinyworld.world import World

CONTEXT_TEXTS = 8
CONTEXT_TEXT_CHARACTERS = 24_000
"""Long enough for 4,096 tokens of any chronicle."""


def build_tiny(
    folder: Path, state_folder: Path, plan: TrainingPlan, progress: Progress = silent
) -> dict[str, Any]:
    """Train and write the checkpoint; continue an interrupted run of the same plan.

    Args:
        folder: checkpoint folder, replaced as a whole at the end.
        state_folder: folder for the state of an unfinished run and for the unfinished checkpoint.

    Returns:
        The training record, as written to `training.json` in the folder.

    Raises:
        TinyworldError: the loss is not finite, test items are in the training text, or the world's text does not fill
            the vocabulary.
    """
    progress("training the tokenizer", 0, 1)
    tokenizer = train_tokenizer(tokenizer_texts(World(plan.world_seed)))
    progress("training the tokenizer", 1, 1)
    result = train(plan, tokenizer, state_folder, progress)
    unfinished = state_folder / "checkpoint"
    shutil.rmtree(unfinished, ignore_errors=True)
    write_checkpoint(result.model, tokenizer, unfinished)
    record = _record_training(unfinished, plan, result)
    Manifest(
        stage="train",
        files=file_records(unfinished),
        wall_seconds=record["wall_seconds"],
        peak_memory_bytes=resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024,
        versions=record["versions"],
        facts={"steps": plan.steps, "tokens": plan.tokens},
    ).write(unfinished)
    shutil.rmtree(folder, ignore_errors=True)
    folder.parent.mkdir(parents=True, exist_ok=True)
    unfinished.rename(folder)
    shutil.rmtree(state_folder)  # the next run starts from nothing
    return record


def _record_training(folder: Path, plan: TrainingPlan, result: TrainingResult) -> dict[str, Any]:
    """Set `max_position_embeddings` to the longest usable context and write the training record."""
    # The written checkpoint is measured, not the float32 weights of training.
    model, tokenizer = load_drafting_model(folder), load_tokenizer(folder)
    world, rng = World(plan.world_seed), random.Random("held-out chronicles")
    texts = [chronicle(world, rng, CONTEXT_TEXT_CHARACTERS) for _ in range(CONTEXT_TEXTS)]
    sweep = context_sweep(model, tokenizer, texts)
    file = folder / "config.json"
    config = json.loads(file.read_text()) | {"max_position_embeddings": usable_context(sweep)}
    file.write_text(json.dumps(config, indent=2, sort_keys=True) + "\n")
    record = {
        "description": "How the embedded checkpoint was trained; written by `python tools/tinyworld train`.",
        "plan": dataclasses.asdict(plan),
        "steps": plan.steps,
        "tokens": plan.tokens,
        "parameters": {
            "backbone": sum(parameter.numel() for parameter in model.backbone.parameters()),
            "mtp_head": sum(parameter.numel() for parameter in model.head.parameters()),
        },
        "bytes": (folder / "model.safetensors").stat().st_size,
        "wall_seconds": round(result.seconds, 1),  # of the steps, pauses of a suspended process included
        "interruptions": result.interruptions,
        "versions": {
            "python": platform.python_version(),
            "torch": torch.__version__,
            "transformers": transformers.__version__,
            "tokenizers": tokenizers.__version__,
            "numpy": numpy.__version__,
        },
        "hardware": {"machine": platform.machine(), "cpus": os.cpu_count(), "threads": plan.threads},
        "learning_curve": result.curve,
        "context_sweep": [dataclasses.asdict(point) for point in sweep],
        "test_items_in_training_text": 0,  # the trainer checks every document and stops at the first
    }
    (folder / "training.json").write_text(json.dumps(record, indent=1) + "\n", encoding="utf-8")
    return record
