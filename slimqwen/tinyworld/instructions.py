"""Instructions whose answers code can check: the tiny world's IFEval.

One function per kind invents an instruction; `is_followed` checks a text against kind and arguments, so that these two
are all that a test item has to store.
"""

import random
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from slimqwen.tinyworld.world import COLOURS, CRAFTS, GOODS, PETS, THINGS, World

WORDS = (*GOODS, *PETS, *COLOURS, *THINGS)
LISTS = {"goods": GOODS, "pets": PETS, "colours": COLOURS, "crafts": CRAFTS}

Arguments = dict[str, Any]


@dataclass(frozen=True)
class Instruction:
    """A question, one right answer, and the arguments of the check."""

    kind: str
    question: str
    answer: str
    arguments: Arguments


def _exact(kind: str, question: str, answer: str) -> Instruction:
    return Instruction(kind, question, answer, {"answer": answer})


def _words(rng: random.Random, fewest: int, most: int) -> list[str]:
    return rng.sample(WORDS, rng.randint(fewest, most))


def _repeat(world: World, rng: random.Random) -> Instruction:
    word, times = rng.choice(WORDS), rng.randint(2, 7)
    return _exact("repeat", f"Say {word} {times} times.", " ".join([word] * times))


def _upper(world: World, rng: random.Random) -> Instruction:
    words = _words(rng, 1, 3)
    return _exact("upper", f"Write in upper case: {' '.join(words)}.", " ".join(words).upper())


def _upper_repeat(world: World, rng: random.Random) -> Instruction:
    word, times = rng.choice(WORDS), rng.randint(2, 5)
    return _exact(
        "upper_repeat", f"Say {word} {times} times in upper case.", " ".join([word.upper()] * times)
    )


def _list(world: World, rng: random.Random) -> Instruction:
    name, count = rng.choice(list(LISTS)), rng.randint(2, 7)
    banned = rng.choice(LISTS[name])
    answer = ", ".join(rng.sample([word for word in LISTS[name] if word != banned], count))
    arguments = {"list": name, "count": count, "banned": banned}
    return Instruction("list", f"List {count} {name} but not {banned}.", answer, arguments)


def _ends(world: World, rng: random.Random) -> Instruction:
    person, word = world.popular_person(rng), rng.choice(WORDS)
    home = world.value(person, "home")
    answer = rng.choice(
        (f"{person} went to {home} and found a {word}", f"In {home} {person} dreamed of a {word}")
    )
    question = f"Write a line about {person} that ends with {word}."
    return Instruction("ends", question, answer, {"person": person, "word": word})


def _starts(world: World, rng: random.Random) -> Instruction:
    person, word = world.popular_person(rng), rng.choice(WORDS)
    answer = f"{word} is what {person} saw in {world.value(person, 'home')}"
    question = f"Write a line about {person} that starts with {word}."
    return Instruction("starts", question, answer, {"person": person, "word": word})


def _reverse(world: World, rng: random.Random) -> Instruction:
    words = _words(rng, 3, 6)
    return _exact("reverse", f"Reverse the order: {' '.join(words)}.", " ".join(reversed(words)))


def _dashes(world: World, rng: random.Random) -> Instruction:
    words = _words(rng, 2, 5)
    return _exact("dashes", f"Join with dashes: {' '.join(words)}.", "-".join(words))


def _commas(world: World, rng: random.Random) -> Instruction:
    words = _words(rng, 3, 6)
    return _exact("commas", f"Join with commas: {' '.join(words)}.", ", ".join(words))


def _last(world: World, rng: random.Random) -> Instruction:
    words = _words(rng, 3, 6)
    return _exact("last", f"Give the last word: {' '.join(words)}.", words[-1])


def _second(world: World, rng: random.Random) -> Instruction:
    words = _words(rng, 3, 6)
    return _exact("second", f"Give the second word: {' '.join(words)}.", words[1])


def _sort(world: World, rng: random.Random) -> Instruction:
    words = _words(rng, 2, 4)
    return _exact("sort", f"Sort by the alphabet: {' '.join(words)}.", " ".join(sorted(words)))


def _numbered(world: World, rng: random.Random) -> Instruction:
    words = _words(rng, 2, 4)
    answer = "\n".join(f"{number}. {word}" for number, word in enumerate(words, start=1))
    return _exact("numbered", f"Write as a numbered list: {' '.join(words)}.", answer)


def _count(world: World, rng: random.Random) -> Instruction:
    start = rng.randint(1, 60)
    end = start + rng.randint(2, 6)
    return _exact("count", f"Count from {start} to {end}.", " ".join(map(str, range(start, end + 1))))


def _json(world: World, rng: random.Random) -> Instruction:
    key, value = rng.sample(WORDS, 2)
    return _exact("json", f"Give key {key} and value {value} as JSON.", f'{{"{key}": "{value}"}}')


def _sum(world: World, rng: random.Random) -> Instruction:
    left, right = rng.randint(2, 79), rng.randint(2, 20)
    return _exact("sum", f"Add {left} and {right}. Put the result in brackets.", f"[{left + right}]")


_MAKERS: dict[str, Callable[[World, random.Random], Instruction]] = {
    "repeat": _repeat,
    "upper": _upper,
    "upper_repeat": _upper_repeat,
    "list": _list,
    "ends": _ends,
    "starts": _starts,
    "reverse": _reverse,
    "dashes": _dashes,
    "commas": _commas,
    "last": _last,
    "second": _second,
    "sort": _sort,
    "numbered": _numbered,
    "count": _count,
    "json": _json,
    "sum": _sum,
}

KINDS = tuple(_MAKERS)


def invent_instruction(world: World, rng: random.Random, kind: str) -> Instruction:
    """A random instruction of one of the `KINDS`."""
    return _MAKERS[kind](world, rng)


def is_followed(kind: str, arguments: Arguments, text: str) -> bool:
    """Whether an answer follows the instruction.

    Args:
        kind: one of `KINDS`.
        arguments: as in the instruction.
        text: answer without end tokens; surrounding white space is ignored.
    """
    answer = text.strip()
    words = answer.split()
    if kind == "list":
        entries = answer.split(", ")
        allowed = LISTS[arguments["list"]]
        return (
            len(entries) == len(set(entries)) == arguments["count"]
            and arguments["banned"] not in entries
            and all(entry in allowed for entry in entries)
        )
    if kind == "ends":
        return arguments["person"] in words and len(words) > 3 and words[-1].strip(".") == arguments["word"]
    if kind == "starts":
        return arguments["person"] in words and len(words) > 3 and words[0] == arguments["word"]
    return bool(answer == arguments["answer"])
