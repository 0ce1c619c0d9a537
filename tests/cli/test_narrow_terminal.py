"""Tables of every verb in a narrow terminal: no figure that a wide one shows is cut."""

import re

import pytest

from slimqwen import variant as variants
from slimqwen.cli import console
from slimqwen.records import store

FIGURE = re.compile(r"(?<![\w.,-])-?\d[\d,]*\.\d+(?![\w.])")
VERBS = (
    "fit qwen3.5-27b --gpu rtx-3090",
    "fit qwen3.5-4b",
    "variant list",
    "compare tiny tiny-best",
    "fit qwen3.5-4b-best --gpu a10g --waterfall",
    "recipe run cyankiwi-best --dry-run",
)


@pytest.fixture
def said(monkeypatch, run_here):
    """said(width, command): what a command says in a terminal of this width."""

    def at(width, words):
        monkeypatch.setattr(console.console, "_width", width)
        return run_here(*words.split())[1]

    return at


@pytest.mark.parametrize("verb", VERBS)
def test_a_verb_cuts_no_figure(said, verb):
    figures = set(FIGURE.findall(said(400, verb)))
    assert figures
    for width in (80, 60):
        text = said(width, verb)
        assert not {figure for figure in figures if figure not in text}
        assert "…" not in text


RECORDS = sorted(
    path
    for names in ("*/plan_*.json", "*/search_*.json", "tiny-best/*_*.json")
    for path in (variants.repository_root() / "experiments").glob(names)
)


@pytest.mark.parametrize("path", RECORDS, ids=lambda path: path.stem)
def test_a_record_cuts_no_figure(monkeypatch, path):
    def shown(width):
        monkeypatch.setattr(console.console, "_width", width)
        with console.console.capture() as captured:
            for table in store.read_record(path).tables(path):
                console.console.print(table.as_rich())
        return captured.get()

    figures = set(FIGURE.findall(shown(400)))
    for width in (80, 60):
        assert not {figure for figure in figures if figure not in shown(width)}


def test_colours_forced_into_a_file_come_without_movements_of_the_cursor(monkeypatch, run_here):
    monkeypatch.setattr(console.console, "_force_terminal", True)
    with console.progress_bar() as progress:
        progress("subject: activity", 1, 2)
    _, text, _ = run_here("variant", "list")
    assert not re.search(r"\x1b\[[0-9;?]*[A-HJKhl]", text)
