"""Serve a variant: read its config.env, check it, and become vLLM."""

import argparse
import os

from _console import console, errors, run

from slimqwen import variant
from slimqwen.serving import launch
from slimqwen.serving import platform as machine


def main() -> int:
    """Print the notice of what this platform leaves out, then exec vLLM, or only show the command."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--variant", required=True)
    parser.add_argument("--port", type=int, help="instead of VLLM_PORT")
    parser.add_argument(
        "--platform", choices=("cpu", "cuda"), help="instead of what the variant or this machine says"
    )
    parser.add_argument(
        "--dry-run", action="store_true", help="print the environment and the command, start nothing"
    )
    arguments = parser.parse_args()
    with errors.status("reading vLLM's flags"):
        command = launch.resolve(
            variant.load(arguments.variant), port=arguments.port, platform=arguments.platform
        )
    if command.platform != machine.detect():
        errors.print(
            f"This is the command for platform {command.platform}; this machine is {machine.detect()}."
        )
    if command.left_out:
        errors.print(
            f"Without a GPU, {arguments.variant} is served with these lines of its config.env changed:"
        )
        for line in command.left_out:
            change = f"{line.instead} instead" if line.instead is not None else "left out"
            errors.print(f"  {line.key}={line.value}: {change}: {line.why}", markup=False)
    if arguments.dry_run:
        console.print(command.as_shell(), markup=False, soft_wrap=True)
        return 0
    launch.check(command)
    os.chdir(command.variant.root)
    os.execve(command.argv[0], list(command.argv), command.process_environment())


if __name__ == "__main__":
    run(main)
