"""What was seen of every published form and verb: kept in outcomes.json, shown as a table in docs/checkpoints.md."""

import json
import os
from collections import defaultdict
from collections.abc import Mapping
from pathlib import Path

from tests import tracked_copy
from tests.zoo.published_forms import PUBLISHED_FORMS
from tests.zoo.verbs import QUICK, SLOW, WORKS

ROOT = Path(__file__).parents[2]
SEEN = Path("tests") / "zoo" / "outcomes.json"
PAGE = ROOT / "docs" / "checkpoints.md"
VERBS = tuple(dict.fromkeys([*QUICK, *SLOW]))
_BEGIN, _END = "<!-- zoo: written by `pytest -m zoo tests/zoo` -->\n", "<!-- end of zoo -->\n"

Outcomes = dict[str, dict[str, str]]
"""Published form -> verb -> `WORKS` or the message of its refusal."""


def read_outcomes(root: Path = ROOT) -> Outcomes:
    """What has been seen so far."""
    file = root / SEEN
    seen: Outcomes = json.loads(file.read_text(encoding="utf-8")) if file.is_file() else {}
    return seen


def note_outcomes(published: str, outcomes: Mapping[str, str]) -> None:
    """Keep what was seen of a published form in the checkout, and write the table anew there."""
    checkout = Path(os.environ.get(tracked_copy.CHECKOUT) or ROOT)
    seen = read_outcomes(checkout)
    seen[published] = {**seen.get(published, {}), **outcomes}
    ordered = {
        name: {verb: seen[name][verb] for verb in VERBS if verb in seen[name]}
        for name in PUBLISHED_FORMS
        if name in seen
    }
    (checkout / SEEN).write_text(json.dumps(ordered, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")
    page = checkout / PAGE.relative_to(ROOT)
    before, _, rest = page.read_text(encoding="utf-8").partition(_BEGIN)
    page.write_text(before + _BEGIN + as_markdown(ordered) + _END + rest.partition(_END)[2], encoding="utf-8")


def as_markdown(outcomes: Outcomes) -> str:
    """Published forms by the verbs that refuse them, with numbers of the messages below."""
    messages = dict.fromkeys(text for seen in outcomes.values() for text in seen.values() if text != WORKS)
    numbers = {text: number for number, text in enumerate(messages, 1)}
    forms: dict[str, list[str]] = defaultdict(list)
    for name, seen in outcomes.items():
        refused: dict[str, list[str]] = defaultdict(list)
        for verb, text in seen.items():
            if text != WORKS:
                refused[text].append(verb)
        cell = "; ".join(
            f"{'all' if len(verbs) == len(seen) else ', '.join(verbs)} ({numbers[text]})"
            for text, verbs in refused.items()
        )
        forms[cell or "none"].append(PUBLISHED_FORMS[name].form)
    rows = [f"| {'; '.join(names)} | {cell} |" for cell, names in forms.items()]
    listed = [f"{number}. {text}" for text, number in numbers.items()]
    return "\n".join(["| checkpoints | refused |", "|---|---|", *rows, "", *listed, ""])
