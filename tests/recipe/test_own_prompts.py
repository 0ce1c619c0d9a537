"""Prompts that need no text of the user's."""

from slimqwen.recipe.own_prompts import seeds_file
from slimqwen.text.documents import read_documents


def test_the_seeds_are_short_and_of_many_kinds() -> None:
    seeds = list(read_documents(seeds_file()))
    assert 450 < len(seeds) < 600
    texts = [seed.prompt or seed.messages[-1]["content"] for seed in seeds if seed.prompt or seed.messages]
    assert len(texts) == len(seeds)
    assert max(map(len, texts)) < 200
    assert sum(bool(seed.tools) for seed in seeds) >= 30
    assert sum(not text.isascii() for text in texts) > 80
