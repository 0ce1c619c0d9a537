"""The build of `weights/tiny` from scratch: tokenizer, training, checkpoint, measurements, training record."""

import dataclasses
import json
import os
import platform
import random
import resource
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy
import tokenizers
import torch
import transformers
from transformers import PreTrainedTokenizerFast

from slimqwen.checkpoint import Manifest
from slimqwen.checkpoint.files import file_records
from slimqwen.models.mtp_head import Acceptance, DraftingModel, load_drafting_model
from slimqwen.progress import Progress, silent
from tinyworld.documents import tokenizer_texts
from tinyworld.measure import (
    ACCEPTANCE_DEPTH,
    Scores,
    answer_items,
    answer_margins,
    bits_per_byte,
    context_sweep,
    prose_acceptance,
    rounded_to_bits,
    usable_context,
    with_half_vocabulary,
    with_shuffled_head,
)
from tinyworld.model import write_checkpoint
from tinyworld.prose import chronicle
from tinyworld.tasks import QUESTION_TASKS, TaskItems, build_items
from tinyworld.tokenizer import load_tokenizer, train_tokenizer
from tinyworld.train import TrainingPlan, TrainingResult, train
from tinyworld.world import World

RECORD = "training.json"
COARSE_ROUNDING = "all linears rounded to 3 bits, one scale a row"
MILD_ROUNDING = "all linears rounded to 3 bits, groups of 32"
"""Measured for comparison; no measure has to detect it."""
HALVED_VOCABULARY = "vocabulary halved"
SHUFFLED_HEAD = "columns of the MTP head's fc shuffled"
SEEN_BY = {
    COARSE_ROUNDING: QUESTION_TASKS,
    HALVED_VOCABULARY: ("bits_per_byte",),
    SHUFFLED_HEAD: ("acceptance_length",),
}
"""Known damages, and the measures of which at least one must detect each."""

CONTEXT_TEXTS = 8
CONTEXT_TEXT_CHARACTERS = 24_000
"""Long enough for 4,096 tokens of any chronicle."""


def build_tiny(
    folder: Path, state_folder: Path, plan: TrainingPlan, progress: Progress = silent
) -> dict[str, Any]:
    """Train, write and measure the checkpoint; continue an interrupted run of the same plan.

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
    record = _record_training(unfinished, plan, result, progress)
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


def _record_training(
    folder: Path, plan: TrainingPlan, result: TrainingResult, progress: Progress
) -> dict[str, Any]:
    """Measure a written checkpoint (its bfloat16 weights, in float32) and write its training record.

    `max_position_embeddings` in config.json is set to the longest usable context.
    """
    # The written checkpoint is measured, not the float32 weights of training.
    model, tokenizer = load_drafting_model(folder), load_tokenizer(folder)
    world = World(plan.world_seed)
    items = build_items(world)
    sweep = context_sweep(model, tokenizer, _long_texts(world))
    usable = usable_context(sweep)
    _set_context(folder, usable)
    scores = _all_scores(model, tokenizer, items, progress)
    acceptance = prose_acceptance(model, tokenizer, _prose(items))
    record = {
        "description": "How the embedded checkpoint was trained and what it scores; written by `slimqwen world train`.",
        "scored_by": (
            "transformers in float32 on the stored bfloat16 weights, greedy, with the items, prompts and scorers of "
            "the lm-eval tasks in eval/tasks/tinyworld"
        ),
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
        "learning_curve": [dataclasses.asdict(point) for point in result.curve],
        "metrics": {name: _figure(score) for name, score in scores.items()}
        | {"acceptance_length": _acceptance_figure(acceptance)},
        "context_sweep": {
            "max_position_embeddings": usable,
            "points": [dataclasses.asdict(point) for point in sweep],
        },
        "test_items_in_training_text": 0,  # the trainer checks every document and stops at the first
        "sensitivity": _sensitivity(model, tokenizer, items, scores, acceptance, progress),
    }
    record["criteria"] = judge(record)
    (folder / RECORD).write_text(json.dumps(record, indent=1) + "\n", encoding="utf-8")
    return record


def judge(record: Mapping[str, Any]) -> list[dict[str, Any]]:
    """The criteria of the checkpoint, and whether its record meets them.

    Args:
        record: training record with `metrics`, `sensitivity`, `context_sweep` and `bytes`.

    Returns:
        One row per criterion: its text, the measured value, and whether it is met.
    """
    metrics = record["metrics"]
    rows: list[tuple[str, Any, bool]] = []
    for task in QUESTION_TASKS:
        mean = metrics[task]["mean"]
        rows.append((f"{task} scores between 0.55 and 0.95", mean, 0.55 <= mean <= 0.95))
    length = metrics["acceptance_length"]["mean"]
    rows.append(("acceptance length at depth 4 is at least 2.8", length, length >= 2.8))
    for damage, measures in SEEN_BY.items():
        strongest = max(
            row["standard_errors"] or 0.0
            for row in record["sensitivity"]
            if row["damage"] == damage and row["measure"] in measures
        )
        words = f"{damage}: {' or '.join(measures)} moves by at least 3 standard errors"
        rows.append((words, strongest, strongest >= 3))
    context = record["context_sweep"]["max_position_embeddings"]
    rows.append(("the context is at least 1,024 tokens", context, context >= 1_024))
    rows.append(("the weights take at most 20 MB", record["bytes"], record["bytes"] <= 20_000_000))
    return [{"criterion": words, "measured": figure, "met": met} for words, figure, met in rows]


def _prose(items: TaskItems) -> list[str]:
    return [row["text"] for row in items["prose"]]


def _all_scores(
    model: DraftingModel, tokenizer: PreTrainedTokenizerFast, items: TaskItems, progress: Progress
) -> dict[str, Scores]:
    scores = {task: answer_items(model, tokenizer, task, items[task], progress) for task in QUESTION_TASKS}
    scores["answer_margin_nats"] = answer_margins(model, tokenizer, items["margin"])
    scores["bits_per_byte"] = bits_per_byte(model, tokenizer, _prose(items))
    return scores


def _sensitivity(
    model: DraftingModel,
    tokenizer: PreTrainedTokenizerFast,
    items: TaskItems,
    scores: dict[str, Scores],
    acceptance: Acceptance,
    progress: Progress,
) -> list[dict[str, Any]]:
    """The effect of known damages on the scores: change, its standard error, and their ratio.

    Task scores, log-probability gap and bits per byte are paired by item; acceptance lengths are independent means.
    """
    rows = []

    def add(damage: str, measure: str, change: float, error: float) -> None:
        rows.append(
            {
                "damage": damage,
                "measure": measure,
                "change": round(change, 4),
                "standard_error": round(error, 4),
                "standard_errors": round(abs(change) / error, 1) if error else None,
            }
        )

    def add_paired(damage: str, measure: str, damaged: Scores) -> None:
        difference = damaged.minus(scores[measure])
        add(damage, measure, difference.mean, difference.standard_error)

    for damage, group in ((COARSE_ROUNDING, None), (MILD_ROUNDING, 32)):
        rounded = rounded_to_bits(model, bits=3, group=group)
        for measure, damaged in _all_scores(rounded, tokenizer, items, progress).items():
            add_paired(damage, measure, damaged)
    halved = bits_per_byte(*with_half_vocabulary(model, tokenizer), _prose(items))
    add_paired(HALVED_VOCABULARY, "bits_per_byte", halved)
    shuffled = prose_acceptance(with_shuffled_head(model), tokenizer, _prose(items))
    error = (shuffled.standard_error**2 + acceptance.standard_error**2) ** 0.5
    add(SHUFFLED_HEAD, "acceptance_length", shuffled.mean_length - acceptance.mean_length, error)
    return rows


def _figure(score: Scores) -> dict[str, Any]:
    return {
        "mean": round(score.mean, 4),
        "standard_error": round(score.standard_error, 4),
        "items": len(score.values),
    }


def _acceptance_figure(acceptance: Acceptance) -> dict[str, Any]:
    return {
        "mean": round(acceptance.mean_length, 4),
        "standard_error": round(acceptance.standard_error, 4),
        "depth": ACCEPTANCE_DEPTH,
        "drafts": acceptance.drafts,
        "rates": [round(rate, 4) for rate in acceptance.rates],
    }


def _long_texts(world: World) -> list[str]:
    rng = random.Random("held-out chronicles")
    return [chronicle(world, rng, CONTEXT_TEXT_CHARACTERS) for _ in range(CONTEXT_TEXTS)]


def _set_context(folder: Path, length: int) -> None:
    file = folder / "config.json"
    config = json.loads(file.read_text())
    config["max_position_embeddings"] = length
    file.write_text(json.dumps(config, indent=2, sort_keys=True) + "\n")
