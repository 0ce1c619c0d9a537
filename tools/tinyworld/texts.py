"""The texts of the world in eval/texts, which recipes and workloads read.

`tinyworld` is what stands between two `<|endoftext|>` of the training text: whole conversations, then a piece of prose.
`tinyworld_prompts` are beginnings of documents, for sampling; `tinyworld_passages` are stories, for workloads. Readers
choose the order of the documents by a seed. The files are written so that the seeds of eval/ and of the recipes give
the order in which the world made them.
"""

import json
import random
from collections.abc import Iterable, Iterator
from itertools import islice
from pathlib import Path
from typing import Any

from tinyworld.documents import LONG_MIX, SHORT_MIX, DocumentSampler
from tinyworld.prose import open_cast, passage
from tinyworld.tasks import left_out_texts
from tinyworld.tokenizer import END_OF_TEXT
from tinyworld.world import World

CALIBRATION_SEED = 0
PROMPTS_SEED = 1
PASSAGES_SEED = 20261121
"""Of the section acceptance in eval/gates/tinyworld.yaml."""

PROMPTS_MIX = SHORT_MIX | {"prose": 0.6, "chat": 0.3, "echo": 0.0, "copy": 0.0}
"""More prose and chat: answers of a single word say little about drafting."""


def write_texts(folder: Path) -> None:
    """Write the three files."""
    world = World()
    left_out = left_out_texts(world)
    folder.mkdir(parents=True, exist_ok=True)
    documents = islice(DocumentSampler(world, left_out, LONG_MIX).stream(CALIBRATION_SEED), 2_000)
    *pieces, _ = "".join(document.text for document in documents).split(END_OF_TEXT)
    order = list(range(len(pieces)))
    random.Random(CALIBRATION_SEED).shuffle(order)  # as the stage `calibrate` does
    unshuffled = [""] * len(pieces)
    for piece, position in zip(pieces, order, strict=True):
        unshuffled[position] = piece
    _write(folder / "tinyworld.jsonl", ({"text": piece} for piece in unshuffled))
    prompts = islice(DocumentSampler(world, left_out, PROMPTS_MIX).stream(PROMPTS_SEED), 1_800)
    beginnings = ({"prompt" if len(each.parts) > 1 else "text": each.parts[0].text} for each in prompts)
    _write(folder / "tinyworld_prompts.jsonl", beginnings)
    passages = list(islice(_passages(world, PASSAGES_SEED), 6_000))
    start = random.Random(PASSAGES_SEED).randrange(len(passages))  # as `slimqwen.text.prompts.documents` does
    _write(
        folder / "tinyworld_passages.jsonl",
        ({"text": text} for text in passages[-start:] + passages[:-start]),
    )


def _passages(world: World, seed: int) -> Iterator[str]:
    rng = random.Random(seed)
    while True:
        yield passage(world, rng, open_cast(world, rng))


def _write(file: Path, rows: Iterable[dict[str, Any]]) -> None:
    file.write_text("".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows), encoding="utf-8")
