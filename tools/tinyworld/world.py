"""The tiny world: a group of isles with towns and people, all of it a function of one seed.

It has about 3,800 facts with a long tail: a few people are mentioned often and most seldom, so that a model of the
tiny model's size knows the frequent facts well and the rare ones only partly. That makes damage to the model visible.
"""

import random
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate


def _words(text: str) -> tuple[str, ...]:
    return tuple(text.split())


GOODS = _words("salt wool iron tar grain honey glass cloth timber copper oil wine pepper silk clay coal")
CRAFTS = _words(
    "smith weaver baker sailor potter mason tailor miller scribe hunter fisher farmer tanner brewer cooper healer"
)
PETS = _words("goat hound raven cat mule hare owl fox otter swan toad badger falcon pony crab stoat")
COLOURS = _words("red blue green black white gold silver purple brown orange yellow grey")
AILMENTS = _words("coughs fevers burns aches rashes chills cramps sores")
THINGS = _words(
    "stone river lantern bridge candle basket ladder hammer window garden barrel anchor feather mirror needle ribbon "
    "kettle saddle shovel trumpet meadow harbour tower forest valley market kitchen cellar chimney wagon pillow"
)

PERSON_ATTRIBUTES = ("home", "craft", "pet", "mentor")
TOWN_ATTRIBUTES = ("island", "good", "flag")

STATEMENTS = {
    "home": ("{} lives in {}.", "{} has a house in {}."),
    "craft": ("{} works as a {}.", "{} earns a living as a {}."),
    "pet": ("{} keeps a {}.", "{} owns a {}."),
    "mentor": ("{} was taught by {}.", "{} learned everything from {}."),
    "island": ("{} lies on {}.", "{} is a town of {}."),
    "good": ("{} sells {}.", "The people of {} trade in {}."),
    "flag": ("{} flies a {} flag.", "The flag of {} is {}."),
}
"""The two forms of a fact's statement; the first is used in reasoning."""

QUESTIONS = {
    "home": "Where does {} live?",
    "craft": "What is the craft of {}?",
    "pet": "What pet does {} keep?",
    "mentor": "Who taught {}?",
    "island": "On which island is {}?",
    "good": "What does {} sell?",
    "flag": "What is the flag of {}?",
}

HOP_QUESTIONS = {
    ("home", "island"): "On which island is the home of {}?",
    ("home", "good"): "What does the home of {} sell?",
    ("home", "flag"): "What is the flag of the home of {}?",
    ("mentor", "home"): "Where does the teacher of {} live?",
    ("mentor", "craft"): "What is the craft of the teacher of {}?",
    ("mentor", "pet"): "What pet does the teacher of {} keep?",
}
"""Questions that need two facts; the key names the relations in order."""

_ONSETS = _words("b d f g h k l m n p r s t v z br dr gr kr st tr sk")
_VOWELS = _words("a e i o u ai ea")
_CODAS = _words("n r l m s th k nd rn x")


@dataclass(frozen=True)
class Fact:
    """One fact of the world."""

    entity: str
    attribute: str
    value: str

    @property
    def question(self) -> str:
        """The question for the value."""
        return QUESTIONS[self.attribute].format(self.entity)

    def statement(self, form: int = 0) -> str:
        """The fact as a sentence, in one of the two forms of `STATEMENTS`."""
        return STATEMENTS[self.attribute][form].format(self.entity, self.value)


@dataclass(frozen=True)
class TwoHop:
    """A question whose answer needs two facts."""

    first: Fact
    second: Fact

    @property
    def question(self) -> str:
        """The question for the second fact's value, which names only the first fact's entity."""
        return HOP_QUESTIONS[self.first.attribute, self.second.attribute].format(self.first.entity)

    @property
    def reasoning(self) -> str:
        """Both facts in order: the chain of thought."""
        return f"{self.first.statement()} {self.second.statement()}"

    @property
    def answer(self) -> str:
        """The second fact's value."""
        return self.second.value


class World:
    """Entities, their facts, and how often each is mentioned.

    Args:
        seed: seed of all names and facts.
        people: number of people; each has four facts.
        towns: number of towns; each has three facts.
        rare_words: number of herb, ship and song names; most occur only a few times in a training run.
    """

    def __init__(self, seed: int = 7, people: int = 900, towns: int = 80, rare_words: int = 3000) -> None:
        rng = random.Random(seed)
        taken = {*GOODS, *CRAFTS, *PETS, *COLOURS, *AILMENTS, *THINGS}

        def new_word(fewest: int, most: int) -> str:
            while True:
                word = _invent_word(rng, fewest, most)
                if word not in taken and 4 <= len(word) <= 10:
                    taken.add(word)
                    return word

        self.islands = tuple(new_word(1, 2).capitalize() for _ in range(12))
        self.towns = tuple(new_word(1, 2).capitalize() for _ in range(towns))
        self.people = tuple(new_word(1, 2).capitalize() for _ in range(people))
        self.rare_words = tuple(new_word(2, 3) for _ in range(rare_words))
        """Most frequent first."""
        self.values: dict[str, tuple[str, ...]] = {
            "home": self.towns,
            "craft": CRAFTS,
            "pet": PETS,
            "mentor": self.people,
            "island": self.islands,
            "good": GOODS,
            "flag": COLOURS,
        }
        """All possible values of each attribute."""
        self._facts: dict[tuple[str, str], Fact] = {}
        for entity in (*self.towns, *self.people):
            for attribute in self._attributes(entity):
                pool = self.values[attribute]
                if attribute == "mentor":
                    pool = tuple(other for other in pool if other != entity)
                self._facts[entity, attribute] = Fact(entity, attribute, rng.choice(pool))
        self.herbs = {word: (rng.choice(self.islands), rng.choice(AILMENTS)) for word in self.rare_words}
        """Herb by name: the island where it grows, the ailment that it cures."""
        # Facts and question forms of held-out questions are known from training: every person keeps one trained
        # question by home and one by teacher.
        self._held_out = {(person, kind) for person in self.people for kind in _some_hop_kinds(rng)}
        self._people_odds = list(accumulate(1 / (rank + 10) for rank in range(people)))
        self._town_odds = list(accumulate(1 / (rank + 10) ** 0.5 for rank in range(towns)))
        self._rare_odds = list(accumulate(1 / (rank + 12) ** 0.8 for rank in range(rare_words)))

    def _attributes(self, entity: str) -> tuple[str, ...]:
        return TOWN_ATTRIBUTES if entity in self.towns else PERSON_ATTRIBUTES

    @property
    def facts(self) -> tuple[Fact, ...]:
        """Every fact about towns and people."""
        return tuple(self._facts.values())

    def fact(self, entity: str, attribute: str) -> Fact:
        """One fact; KeyError if the world does not have it."""
        return self._facts[entity, attribute]

    def facts_of(self, entity: str) -> list[Fact]:
        """All facts about a person or a town."""
        return [self.fact(entity, attribute) for attribute in self._attributes(entity)]

    def value(self, entity: str, attribute: str) -> str:
        """The value of one fact."""
        return self.fact(entity, attribute).value

    def two_hops(self, held_out: bool) -> list[TwoHop]:
        """All two-hop questions that training never asks (`held_out`), or all that it may ask."""
        return [
            self.two_hop(person, *kind)
            for person in self.people
            for kind in HOP_QUESTIONS
            if ((person, kind) in self._held_out) == held_out
        ]

    def two_hop(self, person: str, first: str, second: str) -> TwoHop:
        """The question that follows relation `first` from a person, then `second`."""
        step = self.fact(person, first)
        return TwoHop(step, self.fact(step.value, second))

    def is_held_out(self, hop: TwoHop) -> bool:
        """Whether training must not ask this question."""
        return (hop.first.entity, (hop.first.attribute, hop.second.attribute)) in self._held_out

    def popular_person(self, rng: random.Random) -> str:
        """A random person, weighted by frequency (1 / (rank + 10))."""
        return _draw(rng, self.people, self._people_odds)

    def popular_town(self, rng: random.Random) -> str:
        """A random town, weighted by frequency."""
        return _draw(rng, self.towns, self._town_odds)

    def rare_word(self, rng: random.Random) -> str:
        """A random herb, ship or song name, weighted by frequency; the last are very rare."""
        return _draw(rng, self.rare_words, self._rare_odds)


def _draw(rng: random.Random, pool: Sequence[str], odds: Sequence[float]) -> str:
    return rng.choices(pool, cum_weights=odds)[0]


def _some_hop_kinds(rng: random.Random) -> list[tuple[str, str]]:
    """All question kinds except one by home and one by teacher."""
    kinds = list(HOP_QUESTIONS)
    trained = {rng.choice([kind for kind in kinds if kind[0] == relation]) for relation in ("home", "mentor")}
    return [kind for kind in kinds if kind not in trained]


def _invent_word(rng: random.Random, fewest: int, most: int) -> str:
    syllables = rng.randint(fewest, most)
    body = "".join(rng.choice(_ONSETS) + rng.choice(_VOWELS) for _ in range(syllables))
    return body + rng.choice(_CODAS) if rng.random() < 0.6 else body + rng.choice(_ONSETS[:15]) + "a"
