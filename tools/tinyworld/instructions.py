"""Instructions whose answers code can check: the tiny world's IFEval.

One function per kind invents an instruction; eval/tasks/tinyworld/scoring.py checks an answer by kind and arguments.
"""

import random
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from tinyworld.world import COLOURS, CRAFTS, GOODS, PETS, THINGS, World

WORDS = (*GOODS, *PETS, *COLOURS, *THINGS)
LISTS = {"goods": GOODS, "pets": PETS, "colours": COLOURS, "crafts": CRAFTS}

Arguments = dict[str, Any]


@dataclass(frozen=True)
class Instruction:
    """A question, one right answer, and the arguments of the check."""

    question: str
    answer: str
    arguments: Arguments


_Maker = Callable[[World, random.Random], Instruction]


def _exact(question: str, answer: str) -> Instruction:
    return Instruction(question, answer, {"answer": answer})


def _on_words(request: str, fewest: int, most: int, answer: Callable[[list[str]], str]) -> _Maker:
    """Instructions to do something with a few words."""

    def make(world: World, rng: random.Random) -> Instruction:
        words = rng.sample(WORDS, rng.randint(fewest, most))
        return _exact(f"{request}: {' '.join(words)}.", answer(words))

    return make


def _repeat(world: World, rng: random.Random) -> Instruction:
    word, times = rng.choice(WORDS), rng.randint(2, 7)
    return _exact(f"Say {word} {times} times.", " ".join([word] * times))


def _upper_repeat(world: World, rng: random.Random) -> Instruction:
    word, times = rng.choice(WORDS), rng.randint(2, 5)
    return _exact(f"Say {word} {times} times in upper case.", " ".join([word.upper()] * times))


def _list(world: World, rng: random.Random) -> Instruction:
    name, count = rng.choice(list(LISTS)), rng.randint(2, 7)
    banned = rng.choice(LISTS[name])
    answer = ", ".join(rng.sample([word for word in LISTS[name] if word != banned], count))
    arguments = {"list": name, "count": count, "banned": banned}
    return Instruction(f"List {count} {name} but not {banned}.", answer, arguments)


def _ends(world: World, rng: random.Random) -> Instruction:
    person, word = world.popular_person(rng), rng.choice(WORDS)
    home = world.value(person, "home")
    answer = rng.choice(
        (f"{person} went to {home} and found a {word}", f"In {home} {person} dreamed of a {word}")
    )
    question = f"Write a line about {person} that ends with {word}."
    return Instruction(question, answer, {"person": person, "word": word})


def _starts(world: World, rng: random.Random) -> Instruction:
    person, word = world.popular_person(rng), rng.choice(WORDS)
    answer = f"{word} is what {person} saw in {world.value(person, 'home')}"
    question = f"Write a line about {person} that starts with {word}."
    return Instruction(question, answer, {"person": person, "word": word})


def _count(world: World, rng: random.Random) -> Instruction:
    start = rng.randint(1, 60)
    end = start + rng.randint(2, 6)
    return _exact(f"Count from {start} to {end}.", " ".join(map(str, range(start, end + 1))))


def _json(world: World, rng: random.Random) -> Instruction:
    key, value = rng.sample(WORDS, 2)
    return _exact(f"Give key {key} and value {value} as JSON.", f'{{"{key}": "{value}"}}')


def _sum(world: World, rng: random.Random) -> Instruction:
    left, right = rng.randint(2, 79), rng.randint(2, 20)
    return _exact(f"Add {left} and {right}. Put the result in brackets.", f"[{left + right}]")


def _numbered(words: list[str]) -> str:
    return "\n".join(f"{number}. {word}" for number, word in enumerate(words, start=1))


_MAKERS: dict[str, _Maker] = {
    "repeat": _repeat,
    "upper": _on_words("Write in upper case", 1, 3, lambda words: " ".join(words).upper()),
    "upper_repeat": _upper_repeat,
    "list": _list,
    "ends": _ends,
    "starts": _starts,
    "reverse": _on_words("Reverse the order", 3, 6, lambda words: " ".join(reversed(words))),
    "dashes": _on_words("Join with dashes", 2, 5, "-".join),
    "commas": _on_words("Join with commas", 3, 6, ", ".join),
    "last": _on_words("Give the last word", 3, 6, lambda words: words[-1]),
    "second": _on_words("Give the second word", 3, 6, lambda words: words[1]),
    "sort": _on_words("Sort by the alphabet", 2, 4, lambda words: " ".join(sorted(words))),
    "numbered": _on_words("Write as a numbered list", 2, 4, _numbered),
    "count": _count,
    "json": _json,
    "sum": _sum,
}

KINDS = tuple(_MAKERS)


def invent_instruction(world: World, rng: random.Random, kind: str) -> Instruction:
    """A random instruction of one of the `KINDS`."""
    return _MAKERS[kind](world, rng)
