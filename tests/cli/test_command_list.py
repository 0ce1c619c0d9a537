"""docs/commands.md."""

from typer.main import get_command

from slimqwen import variant
from slimqwen.cli.app import app
from slimqwen.cli.command_list import render_commands
from slimqwen.cli.stage_list import render_stages

ROOT = variant.repository_root()


def test_the_list_of_commands_is_up_to_date():
    assert (ROOT / "docs" / "commands.md").read_text(encoding="utf-8") == render_commands(get_command(app))
    assert (ROOT / "docs" / "stages.md").read_text(encoding="utf-8") == render_stages()
