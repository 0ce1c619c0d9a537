"""Every `slimqwen …` and `make …` that a document, a setting or a message quotes is a command that parses."""

import ast
import re
import shlex

import pytest
from typer.main import get_command

from slimqwen import variant
from slimqwen.cli.app import app
from slimqwen.cli.command_list import list_verbs
from slimqwen.records import registry

ROOT = variant.repository_root()
TARGETS = set(re.findall(r"^([a-z-]+):.*##", (ROOT / "Makefile").read_text(), re.MULTILINE))
OF_VERBS = set(
    re.findall(r"^([a-z-]+): \| .*\n\t@(?:exec )?\$\(RUN\) ", (ROOT / "Makefile").read_text(), re.MULTILINE)
)
"""Targets that only run a verb: documents and messages name the verb."""
VERBS = dict(list_verbs(get_command(app), "slimqwen"))
PLACES = (
    "*.md",
    "docs/*.md",
    "deploy/**/*.md",
    "deploy/**/*.yaml",
    "experiments/*/README.md",
    "eval/**/*.yaml",
    "Dockerfile",
)
HISTORY = ROOT / "docs" / "CHANGELOG.md"
DOCUMENTS = [file for place in PLACES for file in sorted(ROOT.glob(place)) if file != HISTORY]
SOURCES = sorted((ROOT / "slimqwen").rglob("*.py"))


def quoted(text):
    """Commands between backticks, and lines of code blocks."""
    text = re.sub(r"<!-- table:.*?<!-- end -->", "", text, flags=re.DOTALL)  # tables quote records
    blocks = re.findall(r"^```(?:bash|sh|console)?\n(.*?)^```", text, re.MULTILINE | re.DOTALL)
    prose = re.sub(r"^```.*?^```", "", text, flags=re.MULTILINE | re.DOTALL)
    for command in re.findall(r"`((?:slimqwen|make) [^`]+)`", prose):
        yield " ".join(command.replace("#", "").split())
    for line in "".join(blocks).splitlines():
        if match := re.match(r"(?:\$ |[A-Z_]+=\S+ )?((?:slimqwen|make) .*)", line):
            yield match[1].partition("  #")[0].strip()


def in_messages(file):
    """Commands in the string literals of a module; what an f-string fills in counts as one word."""
    for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
        if isinstance(node, ast.JoinedStr):
            parts = [part.value if isinstance(part, ast.Constant) else "X" for part in node.values]
            yield from re.findall(r"`((?:slimqwen|make) [^`]+)`", "".join(parts))
        elif isinstance(node, ast.Constant) and isinstance(node.value, str):
            yield from re.findall(r"`((?:slimqwen|make) [^`]+)`", node.value)


def fault(command):
    """What is wrong with a command; None where it parses."""
    words = shlex.split(command.replace("…", "X"))
    if words[0] == "make":
        names = {word for word in words[1:] if "=" not in word and word != "X"}
        if named := names & OF_VERBS:
            return f"{named} runs a verb of slimqwen, which is what to name"
        return None if names <= TARGETS else f"no target {names}"
    if words[1] == "X":  # the verb of a record kind, looked up by a test of its own
        return None
    depth = next((n for n in range(len(words), 0, -1) if " ".join(words[:n]) in VERBS), 0)
    if not depth:
        group = " ".join(words)
        known_group = any(verb.startswith(f"{group} ") for verb in VERBS)
        return (
            None
            if known_group or group in ("slimqwen --help", "slimqwen --install-completion")
            else "no such verb"
        )
    verb = VERBS[" ".join(words[:depth])]
    known = {option for param in verb.params for option in param.opts} | {"--help"}
    given = [word.partition("=")[0] for word in words[depth:] if word.startswith("--")]
    unknown = [option for option in given if option not in known]
    places = sum(param.param_type_name == "argument" for param in verb.params)
    if words[depth:] and not given and not places and "--variant" not in known:
        return f"{words[depth]!r} is no verb and no option"
    return f"no option {unknown}" if unknown else None


@pytest.mark.parametrize(
    "file", [file for file in DOCUMENTS if file != HISTORY], ids=lambda file: str(file.relative_to(ROOT))
)
def test_commands_of_a_document_parse(file):
    text = file.read_text(encoding="utf-8")
    assert {command: fault(command) for command in quoted(text) if fault(command)} == {}


def test_the_verb_that_a_record_kind_names_exists():
    missing = {
        kind.kind: kind.verb
        for kind in registry.kinds().values()
        if kind.verb and f"slimqwen {kind.verb}" not in VERBS
    }
    assert missing == {}


def test_commands_of_messages_and_docstrings_parse():
    faults = {
        f"{file.relative_to(ROOT)}: {command}": fault(command)
        for file in SOURCES
        for command in in_messages(file)
        if fault(command)
    }
    assert faults == {}


def test_the_documents_quote_commands_at_all():
    assert len(list(quoted((ROOT / "README.md").read_text()))) > 15


@pytest.mark.parametrize(
    ("command", "wrong"),
    [
        ("slimqwen eval quality --variant x --full", False),
        ("slimqwen eval", False),
        ("slimqwen eval qualty --variant x", True),
        ("slimqwen eval quality --varian x", True),
        ("make install PLATFORM=cuda", False),
        ("make serve VARIANT=x", True),
        ("make servee", True),
    ],
)
def test_what_does_not_parse_is_seen(command, wrong):
    assert bool(fault(command)) is wrong
