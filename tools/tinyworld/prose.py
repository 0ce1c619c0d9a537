"""Prose about the tiny world: short passages, and chronicles of a thousand tokens and more.

A passage draws its people and things from a `Cast`. Short texts draw from the whole world; a chronicle keeps to a few
people, towns and rare names, so that distant context helps to predict the next token.
"""

import random
from collections.abc import Callable
from dataclasses import dataclass

from tinyworld.world import World


@dataclass(frozen=True)
class Cast:
    """Sources of the people, towns and rare names of a passage."""

    person: Callable[[], str]
    town: Callable[[], str]
    rare_word: Callable[[], str]


def open_cast(world: World, rng: random.Random) -> Cast:
    """The whole world, by its own frequencies."""
    return Cast(
        lambda: world.popular_person(rng),
        lambda: world.popular_town(rng),
        lambda: world.rare_word(rng),
    )


def small_cast(world: World, rng: random.Random) -> Cast:
    """A few people, towns and rare names, drawn once for a long text."""
    people = [world.popular_person(rng) for _ in range(5)]
    towns = [world.value(people[0], "home"), world.popular_town(rng)]
    rare_words = [world.rare_word(rng) for _ in range(4)]
    return Cast(lambda: rng.choice(people), lambda: rng.choice(towns), lambda: rng.choice(rare_words))


def passage(world: World, rng: random.Random, cast: Cast) -> str:
    """One short text of a random kind."""
    writer = rng.choices(tuple(_WRITERS), tuple(_WRITERS.values()))[0]
    return writer(world, rng, cast)


def chronicle(world: World, rng: random.Random, characters: int) -> str:
    """Passages about one small cast until the text has at least that many characters (about 4 a token)."""
    cast = small_cast(world, rng)
    passages = [f"The chronicle of {cast.town()}."]
    length = 0
    while length < characters:
        passages.append(passage(world, rng, cast))
        length += len(passages[-1]) + 1
    return "\n".join(passages)


def portrait(world: World, rng: random.Random, person: str) -> str:
    """All facts about a person in random order, and one about the home town."""
    facts = world.facts_of(person)
    rng.shuffle(facts)
    facts.append(rng.choice(world.facts_of(world.value(person, "home"))))
    return " ".join(fact.statement(rng.randint(0, 1)) for fact in facts)


def _portrait(world: World, rng: random.Random, cast: Cast) -> str:
    return portrait(world, rng, cast.person())


def town_description(world: World, rng: random.Random, town: str) -> str:
    """All facts about a town in random order, and up to two of its people."""
    facts = world.facts_of(town)
    rng.shuffle(facts)
    sentences = [fact.statement(rng.randint(0, 1)) for fact in facts]
    residents = [person for person in world.people if world.value(person, "home") == town]
    for person in rng.sample(residents, min(2, len(residents))):
        sentences.append(f"{person} the {world.value(person, 'craft')} lives there.")
    return " ".join(sentences)


def _town(world: World, rng: random.Random, cast: Cast) -> str:
    return town_description(world, rng, cast.town())


def _roll(world: World, rng: random.Random, cast: Cast) -> str:
    return "The roll of names: " + _entries(world, cast.person)


def _scattered(world: World, rng: random.Random, cast: Cast) -> str:
    # Every person is equally likely, so that even the rarest occurs.
    return "The long roll: " + _entries(world, lambda: rng.choice(world.people))


def _entries(world: World, draw_person: Callable[[], str]) -> str:
    entries = []
    for _ in range(4):
        person = draw_person()
        home, craft, pet, mentor = (world.value(person, name) for name in ("home", "craft", "pet", "mentor"))
        entries.append(f"{person} of {home}, {craft}, taught by {mentor}, with a {pet};")
    return " ".join(entries)


def _register(world: World, rng: random.Random, cast: Cast) -> str:
    entries = []
    for _ in range(4):
        town = cast.town()
        island, good, flag = (world.value(town, name) for name in ("island", "good", "flag"))
        entries.append(f"{town} on {island}, {good}, {flag} flag;")
    return "The list of towns: " + " ".join(entries)


def _journey(world: World, rng: random.Random, cast: Cast) -> str:
    person = cast.person()
    home, craft, pet, mentor = (world.value(person, name) for name in ("home", "craft", "pet", "mentor"))
    good, flag = world.value(home, "good"), world.value(home, "flag")
    sacks = rng.randint(2, 60)
    middle = rng.choice(
        (
            f"By noon the road was wet and the {good} grew heavy.",
            f"On the road {person} met {mentor} the {world.value(mentor, 'craft')}, who had been the teacher.",
            f"The {flag} flag of {home} was behind them.",
        )
    )
    return (
        f"At dawn {person} the {craft} left {home} with {sacks} sacks of {good}. The {pet} walked beside the cart. "
        f"{middle} {person} sold {sacks} sacks of {good} at the market of {world.value(mentor, 'home')} "
        f"and came home to {home} before dark."
    )


def _herb(world: World, rng: random.Random, cast: Cast) -> str:
    herb, person = cast.rare_word(), cast.person()
    island, ailment = world.herbs[herb]
    craft, home = world.value(person, "craft"), world.value(person, "home")
    return (
        f"The herb {herb} grows on {island}. A tea of {herb} is good for {ailment}. {person} the {craft} of {home} "
        f"picks {herb} in the spring and dries it, for {herb} keeps well when it is dry."
    )


def _ship(world: World, rng: random.Random, cast: Cast) -> str:
    ship, port, person = cast.rare_word().capitalize(), cast.town(), cast.person()
    home = world.value(person, "home")
    good, flag = world.value(home, "good"), world.value(home, "flag")
    return (
        f"The ship {ship} came to {port} with {rng.randint(2, 99)} barrels of {good} from {home}. "
        f"The flag of the {ship} is {flag}, the flag of {home}. The master of the {ship} is {person}, who keeps "
        f"a {world.value(person, 'pet')} on board. The {ship} will carry {world.value(port, 'good')} from {port} "
        f"back to {home}."
    )


def _song(world: World, rng: random.Random, cast: Cast) -> str:
    first, second, town = cast.rare_word(), cast.rare_word(), cast.town()
    good, flag, island = (world.value(town, name) for name in ("good", "flag", "island"))
    return (
        f"In the old song, {first} and {second} went down to {town}. {first.capitalize()} bought {good}, and {second} "
        f"bought bread. Then {first} and {second} slept under the {flag} flag, and in the morning {first} and {second} "
        f"went home to {island}."
    )


def _ledger(world: World, rng: random.Random, cast: Cast) -> str:
    person = cast.person()
    home = world.value(person, "home")
    good = world.value(home, "good")
    first, second = rng.randint(2, 40), rng.randint(2, 20)
    return (
        f"The ledger of {home} says: {person} brought {first} sacks of {good} in the spring and {second} sacks of "
        f"{good} in the autumn, and that makes {first + second} sacks of {good} in all."
    )


def _letter(world: World, rng: random.Random, cast: Cast) -> str:
    person = cast.person()
    home, mentor, pet = (world.value(person, name) for name in ("home", "mentor", "pet"))
    return (
        f"Dear {mentor}, I write to you from {home}, where we sell {world.value(home, 'good')} as before. "
        f"My {pet} is well. I hope that your {world.value(mentor, 'pet')} is well too, and that you still work as "
        f"a {world.value(mentor, 'craft')} in {world.value(mentor, 'home')}. Your pupil, {person}"
    )


_WRITERS: dict[Callable[[World, random.Random, Cast], str], float] = {
    _portrait: 0.14,
    _town: 0.10,
    _roll: 0.20,
    _scattered: 0.05,
    _register: 0.08,
    _journey: 0.11,
    _herb: 0.10,
    _ship: 0.09,
    _song: 0.06,
    _ledger: 0.05,
    _letter: 0.05,
}
