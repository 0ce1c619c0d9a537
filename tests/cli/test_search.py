"""`slimqwen sweep`: list options take several words."""

import pytest
from typer.main import get_command

from slimqwen.cli.app import app


def options(*words):
    """The options of a command line, without running it."""
    command = get_command(app).commands["sweep"]
    return command.make_context("sweep", list(words), resilient_parsing=True).params


@pytest.mark.parametrize(
    "words",
    [
        "--variants a b --ray auto --measure gate latency",
        "--measure gate --measure latency --variants a --variants b --ray auto",
    ],
)
def test_lists_are_words_or_repeated_options(words):
    given = options(*words.split())
    assert given["variant"] == ["a", "b"]
    assert [each.value for each in given["measure"]] == ["gate", "latency"]
    assert (given["ray"], given["parts"]) == ("auto", 1)
