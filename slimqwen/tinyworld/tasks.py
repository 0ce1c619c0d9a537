"""The tiny world's tests: items, prompts and scores, the same for lm-eval and for an evaluator in this process.

Five sets, written to `eval/tasks/tinyworld/*.jsonl` and committed:

- facts: a question with ten options, thinking off, the short answer generated (this world's MMLU-Pro).
- format: an instruction that code can check, thinking off (its IFEval).
- twohop: a held-out (person, relation pair), thinking on, the answer after `</think>` (its GPQA).
- margin: about fifty of the facts items by log-likelihood of every option; the margin is the right answer's
  log-probability minus the best wrong one's.
- prose: held-out texts, rare words and long ones among them, for bits per byte.

Prompts are stored as rendered by the chat template, because lm-eval hands them to a completions server as they are.
Generation is greedy and ends at `<|im_end|>`.
"""

import json
import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from slimqwen.errors import SlimqwenError
from slimqwen.tinyworld.documents import Document, choice_question, draw_options, render_prompt
from slimqwen.tinyworld.instructions import KINDS, invent_instruction, is_followed
from slimqwen.tinyworld.prose import Cast, chronicle, open_cast, passage
from slimqwen.tinyworld.tokenizer import END_OF_TEXT, THINK_END, TURN_END
from slimqwen.tinyworld.world import Fact, TwoHop, World

TASK_SEED = 20_260
TASK_FOLDER = Path("eval/tasks/tinyworld")
"""Relative to the repository root, as the YAML files beside the data say it."""

FACT_ITEMS = 1_000
TWO_HOP_ITEMS = 1_000
FORMAT_ITEMS_PER_KIND = 60
FORMAT_POOL_PER_KIND = 60
"""Instructions a kind that training never gives; the test uses the first `FORMAT_ITEMS_PER_KIND`."""
MARGIN_ITEMS = 50
PROSE_TEXTS = {"plain": 24, "rare": 24, "long": 12}

FACT_TAIL = 0.0
"""A person's facts are tested in proportion to 1 / (rank + 10) ** FACT_TAIL: 0 asks about all people alike, 1 as
often as the world speaks of them."""
TWO_HOP_TAIL = 0.0
"""The same for two-hop questions."""

GENERATION_TOKENS = {"facts": 12, "format": 40, "twohop": 48}
"""Longest answer a task allows, in tokens; the longest right answer is well below."""

Row = dict[str, Any]


class TaskDataError(SlimqwenError):
    """A task's data file is missing or unreadable, or a test item occurs in the training text."""


@dataclass(frozen=True)
class TaskItems:
    """Every test set as rows, as they are written to the data files."""

    facts: list[Row]
    format: list[Row]
    twohop: list[Row]
    margin: list[Row]
    prose: list[Row]

    def sets(self) -> dict[str, list[Row]]:
        """File stem -> rows."""
        return {
            "facts": self.facts,
            "format": self.format,
            "twohop": self.twohop,
            "margin": self.margin,
            "prose": self.prose,
        }


def build_items(world: World, seed: int = TASK_SEED) -> TaskItems:
    """All test items; a function of world and seed alone."""
    facts = _fact_rows(world, random.Random(f"{seed} facts"))
    return TaskItems(
        facts=facts,
        format=_format_rows(world, seed),
        twohop=_two_hop_rows(world, random.Random(f"{seed} twohop")),
        margin=_margin_rows(facts),
        prose=_prose_rows(world, random.Random(f"{seed} prose")),
    )


def left_out_texts(world: World, seed: int = TASK_SEED) -> frozenset[str]:
    """User messages and prose texts that training documents must not hold."""
    items = build_items(world, seed)
    pool = {instruction["question"] for instruction in _format_pool(world, seed)}
    questions = {row["question"] for rows in (items.facts, items.format, items.twohop) for row in rows}
    return frozenset(pool | questions | {row["text"] for row in items.prose})


class OverlapCheck:
    """Finds test items in training documents.

    Args:
        items: the test items.
    """

    def __init__(self, items: TaskItems) -> None:
        questions = (items.facts, items.format, items.twohop)
        self._by_prompt = {row["prompt"]: row for rows in questions for row in rows}
        self._by_text = {row["text"] + END_OF_TEXT: row["id"] for row in items.prose}

    def find(self, document: Document) -> str | None:
        """The id of an item that the document holds (same prompt and answer, or same prose text), else None."""
        first = document.parts[0].text
        row = self._by_prompt.get(first)
        if row is not None and document.parts[1].text.removesuffix(TURN_END).endswith(row["answer"]):
            return str(row["id"])
        return self._by_text.get(first)


def render_rows(rows: Sequence[Row]) -> str:
    """Rows as JSON lines."""
    return "".join(json.dumps(row, ensure_ascii=False, sort_keys=True) + "\n" for row in rows)


def write_items(items: TaskItems, folder: Path) -> None:
    """Writes every set to its .jsonl file."""
    folder.mkdir(parents=True, exist_ok=True)
    for name, rows in items.sets().items():
        (folder / f"{name}.jsonl").write_text(render_rows(rows), encoding="utf-8")


def load_rows(name: str, folder: Path = TASK_FOLDER) -> list[Row]:
    """The committed rows of one set.

    Raises:
        TaskDataError: there is no such file, or a line of it is no JSON.
    """
    file = folder / f"{name}.jsonl"
    try:
        return [json.loads(line) for line in file.read_text(encoding="utf-8").splitlines()]
    except FileNotFoundError as missing:
        raise TaskDataError(
            f"{file}: no such task data; run `make tiny-tasks` in the repository"
        ) from missing
    except json.JSONDecodeError as broken:
        raise TaskDataError(f"{file}: {broken}; restore it from git") from broken


def score_answer(task: str, row: Mapping[str, Any], text: str) -> bool:
    """Whether a generated text answers an item.

    Args:
        task: "facts", "format" or "twohop".
        row: the item.
        text: what was generated after the prompt, end mark or not.
    """
    answer = text.split(TURN_END)[0].split(END_OF_TEXT)[0]
    if task == "format":
        return is_followed(row["kind"], json.loads(row["arguments"]), answer)
    if task == "twohop":
        # An answer only counts once the thinking is closed.
        _, closed, answer = answer.partition(THINK_END)
        if not closed:
            return False
    return answer.strip() == str(row["answer"])


def margin(log_likelihoods: Sequence[float], gold: int) -> float:
    """The right option's log-probability minus the best wrong one's, in nats."""
    return log_likelihoods[gold] - max(value for index, value in enumerate(log_likelihoods) if index != gold)


def _popular_sample(
    world: World, chance: random.Random, candidates: Sequence[tuple[str, Any]], count: int, tail: float
) -> list[Any]:
    """Draws without replacement, a candidate's weight following its person's rank (towns: the middle rank)."""
    rank = {person: place for place, person in enumerate(world.people)}
    middle = len(world.people) // 2
    # Exponential keys with rate = weight: the smallest `count` are a weighted sample without replacement.
    keyed = [
        (chance.expovariate(1.0) * (rank.get(entity, middle) + 10) ** tail, index)
        for index, (entity, _) in enumerate(candidates)
    ]
    drawn = [candidates[index][1] for _, index in sorted(keyed)[:count]]
    # The keys put the likeliest first; a run over the first items must meet a fair sample.
    chance.shuffle(drawn)
    return drawn


def _fact_rows(world: World, chance: random.Random) -> list[Row]:
    candidates = [(fact.entity, fact) for fact in world.facts]
    rows = []
    drawn: list[Fact] = _popular_sample(world, chance, candidates, FACT_ITEMS, FACT_TAIL)
    for number, fact in enumerate(drawn):
        options = draw_options(world, fact, chance)
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


def _format_pool(world: World, seed: int) -> list[Row]:
    rows: list[Row] = []
    for kind in KINDS:
        chance = random.Random(f"{seed} format {kind}")
        questions: set[str] = set()
        while len(questions) < FORMAT_POOL_PER_KIND:
            instruction = invent_instruction(world, chance, kind)
            if instruction.question in questions:
                continue
            rows.append(
                {
                    "id": f"format-{kind}-{len(questions):02d}",
                    "kind": kind,
                    "question": instruction.question,
                    "prompt": render_prompt(instruction.question, thinking=False),
                    "answer": instruction.answer,
                    # As text, because every kind has other arguments and a table has one type a column.
                    "arguments": json.dumps(instruction.arguments, sort_keys=True),
                }
            )
            questions.add(instruction.question)
    return rows


def _format_rows(world: World, seed: int) -> list[Row]:
    pool = _format_pool(world, seed)
    # Kind after kind in turn, so that the first items are of every kind.
    return [
        pool[kind * FORMAT_POOL_PER_KIND + place]
        for place in range(FORMAT_ITEMS_PER_KIND)
        for kind in range(len(KINDS))
    ]


def _two_hop_rows(world: World, chance: random.Random) -> list[Row]:
    candidates = [(hop.first.entity, hop) for hop in world.two_hops(held_out=True)]
    drawn: list[TwoHop] = _popular_sample(world, chance, candidates, TWO_HOP_ITEMS, TWO_HOP_TAIL)
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
            # With the end mark, so that an option that begins like another is judged whole.
            "options": [option + TURN_END for option in row["options"]],
            "gold": row["options"].index(row["answer"]),
        }
        for row in facts[:MARGIN_ITEMS]
    ]


def _prose_rows(world: World, chance: random.Random) -> list[Row]:
    everyone = open_cast(world, chance)
    strange = Cast(everyone.person, everyone.town, lambda: chance.choice(world.rare_words))
    texts = [("plain", passage(world, chance, everyone)) for _ in range(PROSE_TEXTS["plain"])]
    while len(texts) < PROSE_TEXTS["plain"] + PROSE_TEXTS["rare"]:
        text = passage(world, chance, strange)
        if any(word in text for word in ("herb ", "ship ", "song, ")):
            texts.append(("rare", text))
    texts += [
        ("long", chronicle(world, chance, chance.randint(3_000, 6_000))) for _ in range(PROSE_TEXTS["long"])
    ]
    return [
        {"id": f"prose-{place:02d}", "kind": kind, "text": text} for place, (kind, text) in enumerate(texts)
    ]
