"""Every verb works on every animal for which it is meant, and refuses the others in one line that names the cure."""

import re
from pathlib import Path

import pytest

from tests.zoo.animals import ANIMALS
from tests.zoo.verbs import QUICK, WORKS, outcome


@pytest.mark.parametrize("name", ANIMALS)
def test_what_takes_seconds_works_or_says_what_to_do(tmp_path: Path, name: str) -> None:
    animal = ANIMALS[name]
    folder = animal.build(tmp_path / "animal")
    for verb, run in QUICK.items():
        empty = tmp_path / re.sub(r"\W+", "_", verb)
        empty.mkdir()
        seen = outcome(run, folder, empty)
        expected = animal.refuses.get(verb) or animal.refuses.get("*")
        assert re.search(expected, seen) if expected else seen == WORKS, f"{verb}: {seen}"
