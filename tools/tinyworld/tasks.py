"""The test items of the tiny world, which eval/tasks/tinyworld/scoring.py scores.

Five sets, written to `eval/tasks/tinyworld/*.jsonl` and committed:

- facts: a question with ten options, thinking off, short generated answer (like MMLU-Pro).
- format: an instruction whose answer code can check, thinking off (like IFEval).
- twohop: a held-out (person, relation pair), thinking on, answer after `</think>` (like GPQA).
- margin: fifty of the facts items, scored by the log-probability of every option; the answer log-probability gap is
  the right option's log-probability minus the best wrong one's.
- prose: held-out texts, some with rare words and some long, for bits per byte.

Prompts are stored as rendered by the chat template, because lm-eval sends them unchanged to a completions server.
Generation is greedy and ends at `<|im_end|>`.
"""

import json
import random
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from tinyworld.documents import Document, choice_question, draw_options, render_prompt
from tinyworld.instructions import KINDS, invent_instruction
from tinyworld.prose import Cast, chronicle, open_cast, passage
from tinyworld.tokenizer import END_OF_TEXT, TURN_END
from tinyworld.world import Fact, TwoHop, World

TASK_SEED = 20_260
TASK_FOLDER = Path("eval/tasks/tinyworld")
"""Relative to the repository root, as in the YAML files beside the data."""

FACT_ITEMS = 1_000
TWO_HOP_ITEMS = 1_000
FORMAT_ITEMS_PER_KIND = 60
MARGIN_ITEMS = 50
PROSE_TEXTS = {"plain": 24, "rare": 24, "long": 12}

QUESTION_TASKS = ("facts", "format", "twohop")
"""Tasks whose items are questions with a generated answer."""

Row = dict[str, Any]
TaskItems = dict[str, list[Row]]
"""The rows of every test set by its name."""


def build_items(world: World) -> TaskItems:
    """All test items; they depend only on the world."""
    facts = _fact_rows(world, random.Random(f"{TASK_SEED} facts"))
    return {
        "facts": facts,
        "format": _format_rows(world),
        "twohop": _two_hop_rows(world, random.Random(f"{TASK_SEED} twohop")),
        "margin": _margin_rows(facts),
        "prose": _prose_rows(world, random.Random(f"{TASK_SEED} prose")),
    }


def left_out_texts(world: World) -> frozenset[str]:
    """User messages and prose texts that training documents must not contain."""
    items = build_items(world)
    questions = {row["question"] for task in QUESTION_TASKS for row in items[task]}
    return frozenset(questions | {row["text"] for row in items["prose"]})


class OverlapCheck:
    """Finds test items in training documents."""

    def __init__(self, items: TaskItems) -> None:
        self._by_prompt = {row["prompt"]: row for task in QUESTION_TASKS for row in items[task]}
        self._by_text = {row["text"] + END_OF_TEXT: row["id"] for row in items["prose"]}

    def find(self, document: Document) -> str | None:
        """The id of an item in the document (same prompt and answer, or same prose text), or None."""
        first = document.parts[0].text
        row = self._by_prompt.get(first)
        if row is not None and document.parts[1].text.removesuffix(TURN_END).endswith(row["answer"]):
            return str(row["id"])
        return self._by_text.get(first)


def write_items(items: TaskItems, folder: Path) -> None:
    """Write every set to its .jsonl file."""
    folder.mkdir(parents=True, exist_ok=True)
    for name, rows in items.items():
        lines = [json.dumps(row, ensure_ascii=False, sort_keys=True) + "\n" for row in rows]
        (folder / f"{name}.jsonl").write_text("".join(lines), encoding="utf-8")


def _drawn(rng: random.Random, candidates: Sequence[Any], count: int) -> list[Any]:
    """A random sample without replacement, in random order; drawn by keys, as the committed items were."""
    keyed = [(rng.expovariate(1.0), index) for index in range(len(candidates))]
    drawn = [candidates[index] for _, index in sorted(keyed)[:count]]
    rng.shuffle(drawn)
    return drawn


def _fact_rows(world: World, rng: random.Random) -> list[Row]:
    rows = []
    drawn: list[Fact] = _drawn(rng, world.facts, FACT_ITEMS)
    for number, fact in enumerate(drawn):
        options = draw_options(world, fact, rng)
        question = choice_question(fact, options)
        rows.append(
            {
                "id": f"facts-{number:04d}",
                "question": question,
                "prompt": render_prompt(question, thinking=False),
                "options": options,
                "answer": fact.value,
                "entity": fact.entity,
                "attribute": fact.attribute,
            }
        )
    return rows


def _format_rows(world: World) -> list[Row]:
    by_kind = [_format_rows_of_kind(world, kind) for kind in KINDS]
    # The kinds take turns, so that the first items are of every kind.
    return [row for turn in zip(*by_kind, strict=True) for row in turn]


def _format_rows_of_kind(world: World, kind: str) -> list[Row]:
    rng = random.Random(f"{TASK_SEED} format {kind}")
    rows: dict[str, Row] = {}
    while len(rows) < FORMAT_ITEMS_PER_KIND:
        instruction = invent_instruction(world, rng, kind)
        if instruction.question not in rows:
            rows[instruction.question] = {
                "id": f"format-{kind}-{len(rows):02d}",
                "kind": kind,
                "question": instruction.question,
                "prompt": render_prompt(instruction.question, thinking=False),
                "answer": instruction.answer,
                # As text, because kinds differ in their arguments and a table column has one type.
                "arguments": json.dumps(instruction.arguments, sort_keys=True),
            }
    return list(rows.values())


def _two_hop_rows(world: World, rng: random.Random) -> list[Row]:
    drawn: list[TwoHop] = _drawn(rng, list(world.two_hops(held_out=True)), TWO_HOP_ITEMS)
    return [
        {
            "id": f"twohop-{number:04d}",
            "question": hop.question,
            "prompt": render_prompt(hop.question, thinking=True),
            "answer": hop.answer,
            "reasoning": hop.reasoning,
            "entity": hop.first.entity,
            "relations": [hop.first.attribute, hop.second.attribute],
        }
        for number, hop in enumerate(drawn)
    ]


def _margin_rows(facts: Sequence[Row]) -> list[Row]:
    return [
        {
            "id": row["id"].replace("facts", "margin"),
            "prompt": row["prompt"],
            # With the end token, so that an option that is the beginning of another is scored as a whole.
            "options": [option + TURN_END for option in row["options"]],
            "gold": row["options"].index(row["answer"]),
        }
        for row in facts[:MARGIN_ITEMS]
    ]


def _prose_rows(world: World, rng: random.Random) -> list[Row]:
    everyone = open_cast(world, rng)
    strange = Cast(everyone.person, everyone.town, lambda: rng.choice(world.rare_words))
    texts = [("plain", passage(world, rng, everyone)) for _ in range(PROSE_TEXTS["plain"])]
    while len(texts) < PROSE_TEXTS["plain"] + PROSE_TEXTS["rare"]:
        text = passage(world, rng, strange)
        if any(word in text for word in ("herb ", "ship ", "song, ")):
            texts.append(("rare", text))
    texts += [("long", chronicle(world, rng, rng.randint(3_000, 6_000))) for _ in range(PROSE_TEXTS["long"])]
    return [
        {"id": f"prose-{number:02d}", "kind": kind, "text": text} for number, (kind, text) in enumerate(texts)
    ]
