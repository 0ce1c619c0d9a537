"""`slimqwen init`: makes a folder a workspace."""

from pathlib import Path
from typing import Annotated

import typer

from slimqwen import workspace
from slimqwen.cli.console import say


def init(
    folder: Annotated[Path, typer.Argument(help="made if it is not there; files in it stay as they are")],
) -> None:
    """Make a folder a workspace: the place of your own variants, texts and questions, outside this checkout."""
    for file in workspace.create_workspace(folder.expanduser()):
        say(f"written: {file}")
    say(f"next: `cd {folder}`, then `slimqwen variant new --name base --checkpoint FOLDER`")
