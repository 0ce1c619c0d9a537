"""`slimqwen init` makes a folder a workspace, `slimqwen install` fills the environment of an installed package."""

from pathlib import Path
from typing import Annotated, Literal

import typer

from slimqwen import workspace
from slimqwen.cli.console import say
from slimqwen.cli.installed import become_installer


def init(
    folder: Annotated[
        Path, typer.Argument(help="made if it is not there; files in it stay as they are")
    ] = Path(),
) -> None:
    """Make a folder a workspace: the place of your own variants, texts and questions; by default the working folder."""
    for file in workspace.create_workspace(folder.expanduser()):
        say(f"written: {file}")
    enter = "" if folder.expanduser().resolve() == Path.cwd() else f"`cd {folder}`, then "
    say(f"next: {enter}`slimqwen variant new --name base --checkpoint FOLDER`")


def install(
    platform: Annotated[
        Literal["cpu", "cuda"] | None,
        typer.Option(help="by default cuda if an NVIDIA GPU is found, else cpu"),
    ] = None,
    extras: Annotated[
        list[str] | None, typer.Option(metavar="ray", help="an optional part to add; may be repeated")
    ] = None,
    source: Annotated[
        Path | None,
        typer.Option("--from", metavar="FOLDER", help="folder of `make pack`: no network is used"),
    ] = None,
) -> None:
    """Put the pinned packages into the environment of this package; in a checkout the same as `make install`."""
    options = [*(["--platform", platform] if platform else []), *(["--from", str(source)] if source else [])]
    become_installer([*options, *(["--extras", *extras] if extras else [])])
