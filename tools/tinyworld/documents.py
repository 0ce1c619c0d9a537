"""Training documents: text in parts, each with a loss weight.

Prose ends with `<|endoftext|>`, and every token counts. A conversation is rendered exactly as by the chat template,
thinking on or off; only the assistant's tokens count. The sampler leaves out the questions and texts of the tests.
"""

import random
from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import dataclass

from tinyworld.instructions import KINDS, WORDS, invent_instruction
from tinyworld.prose import chronicle, open_cast, passage, portrait, town_description
from tinyworld.tokenizer import END_OF_TEXT, THINK_END, THINK_START, TURN_END, TURN_START
from tinyworld.world import CRAFTS, HOP_QUESTIONS, Fact, World

PROSE_WEIGHT = 1.0
ANSWER_WEIGHT = 3.0
"""Larger than that of prose, because answers are only a few tokens."""

OPTION_COUNT = 10

SHORT_MIX = {
    "prose": 0.22,
    "fact": 0.27,
    "choice": 0.15,
    "two_hop": 0.15,
    "instruction": 0.20,
    "copy": 0.05,
    "echo": 0.03,
    "chat": 0.02,
    "chronicle": 0.001,
}
"""Shares of documents (not of tokens) while sequences are short."""

START_MIX = SHORT_MIX | {"copy": 0.30, "echo": 0.90}
"""For the first steps: mostly copying, which most tasks need and which is otherwise learned late."""

LONG_MIX = SHORT_MIX | {"prose": 0.15, "chronicle": 0.012}
"""For long sequences: chronicles are about a third of the tokens, and all kinds occur."""


@dataclass(frozen=True)
class Part:
    """Text and the loss weight of its tokens (0: context only)."""

    text: str
    weight: float


@dataclass(frozen=True)
class Document:
    """One training text."""

    kind: str
    parts: tuple[Part, ...]

    @property
    def text(self) -> str:
        """The whole text with its added tokens."""
        return "".join(part.text for part in self.parts)


@dataclass(frozen=True)
class Turn:
    """An earlier question with its answer."""

    question: str
    answer: str


def render_prompt(question: str, thinking: bool, history: tuple[Turn, ...] = ()) -> str:
    """The prompt, equal to the chat template with `add_generation_prompt=True`."""
    rendered = "".join(
        f"{TURN_START}user\n{turn.question}{TURN_END}\n{TURN_START}assistant\n{turn.answer}{TURN_END}\n"
        for turn in history
    )
    opening = f"{THINK_START}\n" if thinking else f"{THINK_START}\n\n{THINK_END}\n\n"
    return f"{rendered}{TURN_START}user\n{question}{TURN_END}\n{TURN_START}assistant\n{opening}"


def render_completion(answer: str, reasoning: str | None) -> str:
    """The right completion of a prompt; `reasoning` is None if thinking is off."""
    thought = "" if reasoning is None else f"{reasoning}\n{THINK_END}\n\n"
    return f"{thought}{answer}{TURN_END}"


def choice_question(fact: Fact, options: Collection[str]) -> str:
    """The question of a fact with its options, one per line."""
    return f"{fact.question} Choose one:\n" + "\n".join(options)


def draw_options(world: World, fact: Fact, rng: random.Random) -> list[str]:
    """`OPTION_COUNT` values in random order, the right one among them."""
    wrong = [value for value in world.values[fact.attribute] if value != fact.value]
    options = [*rng.sample(wrong, OPTION_COUNT - 1), fact.value]
    rng.shuffle(options)
    return options


class DocumentSampler:
    """Draws training documents.

    Args:
        world: world of the documents.
        left_out: user messages and prose texts that must not occur, such as those of the tests.
        mix: positive weight of each kind of document.
    """

    def __init__(self, world: World, left_out: Collection[str], mix: Mapping[str, float] = SHORT_MIX) -> None:
        self._world = world
        self._left_out = frozenset(left_out)
        self._kinds = tuple(mix)
        self._shares = tuple(mix.values())
        self._makers: dict[str, Callable[[random.Random], Document | None]] = {
            "prose": self._prose,
            "chronicle": self._chronicle,
            "fact": self._fact,
            "choice": self._choice,
            "two_hop": self._two_hop,
            "instruction": self._instruction,
            "copy": self._copy,
            "echo": self._echo,
            "chat": self._chat,
        }

    def stream(self, seed: int) -> Iterator[Document]:
        """Endless documents; the same seed gives the same ones."""
        rng = random.Random(seed)
        while True:
            make = self._makers[rng.choices(self._kinds, self._shares)[0]]
            document = make(rng)
            while document is None:
                document = make(rng)
            yield document

    def _text(self, kind: str, text: str) -> Document | None:
        if text in self._left_out:
            return None
        return Document(kind, (Part(text + END_OF_TEXT, PROSE_WEIGHT),))

    def _conversation(
        self, kind: str, question: str, answer: str, reasoning: str | None, history: tuple[Turn, ...] = ()
    ) -> Document | None:
        if question in self._left_out or any(turn.question in self._left_out for turn in history):
            return None
        prompt = Part(render_prompt(question, reasoning is not None, history), 0.0)
        return Document(
            kind,
            (prompt, Part(render_completion(answer, reasoning), ANSWER_WEIGHT), Part("\n", 0.0)),
        )

    def _prose(self, rng: random.Random) -> Document | None:
        return self._text("prose", passage(self._world, rng, open_cast(self._world, rng)))

    def _chronicle(self, rng: random.Random) -> Document | None:
        return self._text("chronicle", chronicle(self._world, rng, rng.randint(3_000, 9_000)))

    def _any_fact(self, rng: random.Random) -> Fact:
        person = self._world.popular_person(rng)
        entity = person if rng.random() < 0.8 else self._world.popular_town(rng)
        return rng.choice(self._world.facts_of(entity))

    def _fact(self, rng: random.Random) -> Document | None:
        fact = self._any_fact(rng)
        reasoning = fact.statement() if rng.random() < 0.1 else None
        return self._conversation("fact", fact.question, fact.value, reasoning)

    def _choice(self, rng: random.Random) -> Document | None:
        fact = self._any_fact(rng)
        question = choice_question(fact, draw_options(self._world, fact, rng))
        reasoning = fact.statement() if rng.random() < 0.1 else None
        return self._conversation("choice", question, fact.value, reasoning)

    def _two_hop(self, rng: random.Random) -> Document | None:
        person = self._world.popular_person(rng)
        hop = self._world.two_hop(person, *rng.choice(tuple(HOP_QUESTIONS)))
        if self._world.is_held_out(hop):
            return None
        reasoning = hop.reasoning if rng.random() < 0.9 else None
        return self._conversation("two_hop", hop.question, hop.answer, reasoning)

    def _instruction(self, rng: random.Random) -> Document | None:
        instruction = invent_instruction(self._world, rng, rng.choice(KINDS))
        reasoning = "I do just what is asked." if rng.random() < 0.08 else None
        return self._conversation("instruction", instruction.question, instruction.answer, reasoning)

    def _copy(self, rng: random.Random) -> Document | None:
        text = self._any_words(rng, rng.randint(2, 9))
        return self._conversation("copy", f"Repeat: {text}.", text, None)

    def _echo(self, rng: random.Random) -> Document | None:
        line = self._any_words(rng, rng.randint(3, 12)) + "\n"
        # The first line cannot be predicted; every other is a copy of it.
        return Document("echo", (Part(line, 0.0), Part(line * rng.randint(1, 3) + END_OF_TEXT, PROSE_WEIGHT)))

    def _any_words(self, rng: random.Random, count: int) -> str:
        world = self._world
        pools = (WORDS, world.people, world.towns, CRAFTS, world.islands, world.rare_words[:800])
        return " ".join(rng.choice(rng.choice(pools)) for _ in range(count))

    def _chat(self, rng: random.Random) -> Document | None:
        world = self._world
        person, town = world.popular_person(rng), world.popular_town(rng)
        history: tuple[Turn, ...] = ()
        if rng.random() < 0.3:
            earlier = self._any_fact(rng)
            history = (Turn(earlier.question, earlier.value),)
        topic = rng.random()
        if topic < 0.35:
            question = rng.choice((f"Tell me about {person}.", f"Who is {person}?"))
            answer, thought = portrait(world, rng, person), f"They ask about {person}."
        elif topic < 0.55:
            question = f"Tell me about {town}."
            answer, thought = town_description(world, rng, town), f"They ask about {town}."
        elif topic < 0.75:
            question = rng.choice(("Tell me a story.", "Write a story.", f"Tell me a story about {person}."))
            answer, thought = passage(world, rng, open_cast(world, rng)), "They want a story."
        else:
            question, answer = rng.choice(GREETINGS)
            thought = "This is about me."
        return self._conversation("chat", question, answer, thought if rng.random() < 0.5 else None, history)


GREETINGS = (
    ("Hello", "Hello. Ask me about the people and the towns of the isles."),
    ("Hello!", "Hello. Ask me about the people and the towns of the isles."),
    ("Hi", "Hello. Ask me about the people and the towns of the isles."),
    ("Who are you?", "I am a small model of the isles. I know the people and the towns."),
    (
        "What can you do?",
        "I can tell you about the people and the towns of the isles, and do small tasks with words.",
    ),
    ("Thank you.", "You are welcome."),
    ("How are you?", "I am well. Ask me about the isles."),
)

TOKENIZER_MIX = SHORT_MIX | {"prose": 1.5}
"""More prose than in training: the rare names in it fill the tail of the vocabulary."""

TOKENIZER_DOCUMENTS = 60_000


def tokenizer_texts(world: World) -> Iterator[str]:
    """The texts from which the committed tokenizer's merges are learned."""
    stream = DocumentSampler(world, (), TOKENIZER_MIX).stream(seed=99)
    for _ in range(TOKENIZER_DOCUMENTS):
        yield next(stream).text
