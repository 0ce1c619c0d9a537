"""The name of a variant stands for its option, wherever a verb takes one variant or makes one."""

import pytest
from typer.main import get_command

from slimqwen.cli.app import app
from slimqwen.cli.variant_argument import with_variant_option


@pytest.mark.parametrize(
    ("typed", "read"),
    [
        ("serve mine", "serve --variant mine"),
        ("serve --port 80 mine --dry-run", "serve --port 80 --variant mine --dry-run"),
        ("serve --dry-run mine", "serve --dry-run --variant mine"),
        ("recipe run mine --until calibrate", "recipe run --variant mine --until calibrate"),
        ("serve mine other", "serve --variant mine other"),
        ("serve --port 80", "serve --port 80"),
        ("serve --variant mine other", "serve --variant mine other"),
        ("serve --variant=mine", "serve --variant=mine"),
        ("variant new mine --base tiny", "variant new --name mine --base tiny"),
        ("variant new --base tiny --name mine", "variant new --base tiny --name mine"),
        ("compare a b", "compare a b"),
        ("variant list", "variant list"),
        ("nothing mine", "nothing mine"),
        ("", ""),
    ],
)
def test_a_name_is_read_as_the_variant(typed: str, read: str) -> None:
    assert with_variant_option(get_command(app), typed.split()) == read.split()
