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
    parser.add_argument(
        "--require-baked",
        choices=("1",),
        help="refuse to serve without the baked compile cache, as REQUIRE_BAKED=1 in its config.env does",
    )
    parser.add_argument(
        "--allow-unsafe",
        choices=("1",),
        help="serve in engine modes that `make check-engine` found unsafe, as ALLOW_UNSAFE=1 in its config.env does",
    )
    arguments = parser.parse_args()
    with errors.status("reading vLLM's flags"):
        command = launch.resolve(
            variant.load(arguments.variant),
            port=arguments.port,
            platform=arguments.platform,
            require_baked=arguments.require_baked is not None,
            allow_unsafe=arguments.allow_unsafe is not None,
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
    if command.cache is not None and command.cache.baked is not None:
        errors.print(f"Baked compile cache: {_fitness(command.cache)}.", markup=False)
    if arguments.dry_run:
        console.print(command.as_shell(), markup=False, soft_wrap=True)
        return 0
    launch.prepare(command)
    os.chdir(command.variant.root)
    os.execve(command.argv[0], list(command.argv), command.process_environment())


def _fitness(cache: launch.CompileCache) -> str:
    if cache.usable:
        return "fits this machine and these flags; the log says graph by graph whether it was loaded"
    return f"not used, vLLM will compile: {'; '.join(cache.differences)}"


if __name__ == "__main__":
    run(main)
