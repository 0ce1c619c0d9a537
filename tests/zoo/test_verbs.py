"""Every verb works on the published forms for which it is meant, and refuses others in one line that names the cure."""

import re
from collections.abc import Mapping
from pathlib import Path

import pytest

from tests.zoo.outcomes import PAGE, as_markdown, note_outcomes, read_outcomes
from tests.zoo.published_forms import PUBLISHED_FORMS, SAME_TENSORS
from tests.zoo.verbs import ASKED, FORMATS, QUICK, SLOW, WORKS, Verb, outcome


def seen_outcomes(name: str, verbs: Mapping[str, Verb], tmp_path: Path) -> dict[str, str]:
    """What the verbs make of a published form, each as it should."""
    published = PUBLISHED_FORMS[name]
    folder = published.build(tmp_path / "published")
    seen = {}
    for verb, run in verbs.items():
        empty = tmp_path / re.sub(r"\W+", "_", verb)
        empty.mkdir()
        seen[verb] = outcome(run, folder, empty)
        expected = published.refuses.get(verb) or published.refuses.get("*")
        assert re.search(expected, seen[verb]) if expected else seen[verb] == WORKS, f"{verb}: {seen[verb]}"
    return seen


@pytest.mark.parametrize("name", PUBLISHED_FORMS)
def test_what_takes_seconds_works_or_says_what_to_do(tmp_path: Path, name: str) -> None:
    stages = SAME_TENSORS.get(name, ASKED)
    asked = {verb: run for verb, run in ASKED.items() if verb not in stages}
    seen = seen_outcomes(name, {**QUICK, **asked}, tmp_path)
    # What is seen here is what the page says, where it says it.
    listed = read_outcomes().get(name, {})
    assert {verb: listed[verb] for verb in seen if verb in listed} == {
        verb: seen[verb] for verb in seen if verb in listed
    }


@pytest.mark.zoo
@pytest.mark.engine
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("name", PUBLISHED_FORMS)
def test_every_verb_works_or_says_what_to_do(tmp_path: Path, name: str) -> None:
    verbs = {
        verb: run
        for verb, run in SLOW.items()
        if (PUBLISHED_FORMS[name].on_cpu and verb not in ("gate of a recipe", "bake_cache"))
        or name in FORMATS
    }
    seen = seen_outcomes(name, QUICK, tmp_path / "quick")
    note_outcomes(name, seen | seen_outcomes(name, verbs, tmp_path / "slow"))


def test_the_page_shows_what_was_seen() -> None:
    seen = read_outcomes()
    if not seen:
        pytest.skip("no table yet: `pytest -m zoo tests/zoo` writes it")
    assert list(seen) == list(PUBLISHED_FORMS), "run `pytest -m zoo tests/zoo`"
    assert as_markdown(seen) in PAGE.read_text(encoding="utf-8")
