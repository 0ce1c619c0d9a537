"""Checks whether .venv is up to date with this checkout, and starts the installer."""

import hashlib
import importlib.metadata
import json
import os
import platform
import sys
from pathlib import Path
from typing import NoReturn

from slimqwen.workspace import installation_root

_STAMP, _MADE_FOR = "slimqwen-install.json", "slimqwen-made-for"  # scripts/install.py writes both


def describe_outdated(environment: Path, program: Path) -> str | None:
    """Say in one line why an environment must be installed again; None if it need not, or this project did not make it.

    Args:
        environment: folder of the running Python's environment.
        program: path by which the running program was called.
    """
    environment, called_in = environment.resolve(), program.resolve().parent.parent
    if not (environment / _MADE_FOR).is_file():
        return None
    if called_in != environment and (called_in / _MADE_FOR).is_file():
        return f"{called_in} is a copy of {environment} and runs the code of that one"
    try:
        stamp = json.loads((environment / _STAMP).read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return f"the installation of {environment} has not ended"
    if Path(stamp["folder"], environment.name).resolve() != environment:
        return f"{environment} was made in {stamp['folder']}"
    if stamp["python"] != platform.python_version():
        return f"{environment} was made with Python {stamp['python']}, this is {platform.python_version()}"
    if not isinstance(stamp["ingredients"], dict):
        return f"{environment} was made by an earlier scripts/install.py"
    files = {name: installation_root() / name for name in stamp["ingredients"]}
    changed = [
        name
        for name, file in files.items()
        if file.is_file() and hashlib.sha256(file.read_bytes()).hexdigest() != stamp["ingredients"][name]
    ]
    return f"{environment} was made before {', '.join(changed)} changed" if changed else None


def become_installer(options: list[str]) -> NoReturn:
    """Replace this process by scripts/install.py, which fills the environment of this package.

    Args:
        options: command-line options of that script.
    """
    script = installation_root() / "scripts" / "install.py"
    # The Python that made the environment: the one in it would replace its own packages.
    python = getattr(sys, "_base_executable", sys.executable)
    os.execv(python, [python, str(script), *options])


def outdated() -> str | None:
    """Say in one line why this process's environment must be installed again; None if it need not."""
    return describe_outdated(Path(sys.prefix), Path(sys.argv[0]))


def describe_version() -> str:
    """Version of this package, and the commit of the checkout or from which the wheel was built."""
    from slimqwen.records.git import git_state  # needs packages, which may not be installed yet

    state = git_state(installation_root())
    commit = (
        f"commit {state.commit[:12]}{', changed since' if state.dirty else ''}"
        if state.commit
        else "its commit is not known"
    )
    return f"slimqwen {importlib.metadata.version('slimqwen')}, {commit}"
