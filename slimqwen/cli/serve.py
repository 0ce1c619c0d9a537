"""`slimqwen serve`: reads a variant's config.env, checks it, and replaces itself with vLLM."""

import os
from typing import TYPE_CHECKING, Annotated, Literal

import typer

from slimqwen.cli.console import from_here, relative, say, waiting, warn
from slimqwen.cli.options import PlatformName, TrustedCache, VariantOption
from slimqwen.errors import SlimqwenError
from slimqwen.variant import DRAFTS_NOTE, making_command

if TYPE_CHECKING:
    from slimqwen.serving.command import CompileCache


def serve(
    variant: VariantOption,
    port: Annotated[int | None, typer.Option(min=1, max=65535, help="TCP port instead of VLLM_PORT")] = None,
    host: Annotated[
        str | None,
        typer.Option(metavar="ADDRESS", help="address instead of VLLM_HOST; 0.0.0.0: every interface"),
    ] = None,
    platform: PlatformName = None,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="print environment and command only")] = False,
    require_baked: Annotated[
        Literal["1"] | None,
        typer.Option(help="refuse to serve without the baked compile cache, as REQUIRE_BAKED=1 does"),
    ] = None,
    trust_cache: TrustedCache = None,
    require_plan: Annotated[
        Literal["1"] | None,
        typer.Option(
            envvar="REQUIRE_PLAN",
            help="refuse to serve without a plan, or if the engine differs from its plan",
        ),
    ] = None,
    allow_unsafe: Annotated[
        Literal["1"] | None,
        typer.Option(help="serve despite known trouble, as ALLOW_UNSAFE=1 does"),
    ] = None,
    allow_open: Annotated[
        Literal["1"] | None,
        typer.Option(help="serve other machines without an API key, as ALLOW_OPEN=1 does"),
    ] = None,
) -> None:
    """Serve a variant with vLLM, as the model "default"."""
    from slimqwen import host as machine
    from slimqwen.plan import start
    from slimqwen.serving import baked_cache, chat_template, checks, cuda_toolkit
    from slimqwen.serving.command import ServerCommand
    from slimqwen.serving.server import prepare

    options = {
        "REQUIRE_BAKED": require_baked,
        "REQUIRE_PLAN": require_plan,
        "ALLOW_UNSAFE": allow_unsafe,
        "ALLOW_OPEN": allow_open,
        "VLLM_HOST": host,
    }
    variant = variant.with_lines({key: value for key, value in options.items() if value})
    if not dry_run:  # what takes no vLLM to find out is found out first
        checks.check_platform(variant, platform)
        variant.require_weights()
        if trust_cache:
            baked_cache.import_archive(variant.root, variant.weights / baked_cache.ARCHIVE, trust_cache)
    # As the shell left them: the import of vLLM and its patches set variables of this process.
    shell = {key: value for key, value in os.environ.items() if key.startswith("VLLM_")}
    with waiting("reading vLLM's flags"):
        command = ServerCommand.resolve(variant, port=port, platform=platform)
    lines = {key: setting.value for key, setting in variant.settings.items()}
    served = {**lines, **command.environment, "VLLM_PORT": str(command.port)}
    ignored = (key for key, value in shell.items() if machine.is_stray(key) and served.get(key) != value)
    # This program sets VLLM_LOGGING_LEVEL when it starts.
    if unused := sorted(key for key in ignored if key != "VLLM_LOGGING_LEVEL"):
        warn(
            f"Not used, because only config.env decides how {variant.name} is served: {', '.join(unused)} of this shell"
            f"{' (--port N sets a port)' if 'VLLM_PORT' in unused else ''}."
        )
    if command.platform != machine.detect():
        warn(f"This is the command for platform {command.platform}; this machine is {machine.detect()}.")
    if command.platform_changes:
        warn(f"Without a GPU, {variant.name} is served with these lines of its config.env changed:")
        for line in command.platform_changes:
            change = f"{line.replacement} instead" if line.replacement is not None else "left out"
            warn(f"  {line.key}={line.value}: {change}: {line.why}")
    if command.cache is not None and command.cache.baked is not None:
        origin = baked_cache.find_origin(command.variant.root, command.cache.baked) or "of unknown origin"
        warn(f"Compile cache {origin}: {_fitness(command.cache)}.")
    if dry_run:
        try:
            checks.check_address(command)
        except SlimqwenError as error:  # the key need not be in this shell
            warn(f"A start would be refused: {from_here(str(error))}.")
        weights = command.variant.weights
        if weights.is_dir():
            checks.check_weights(command)
            if command.platform == machine.detect():
                checks.check_memory(command)
        else:  # the command can be shown without weights
            warn(f"{relative(weights)} is missing: {making_command(weights, command.variant.root)}")
        say(command.as_shell())
        return
    plan, trouble = start.find_recorded_plan(command, warn)
    prepare(command, trouble)
    if variant.drafts:
        warn(f"{DRAFTS_NOTE}.")
    if needed := chat_template.suggest_tool_choice(command.variant, command.flags):
        warn(f"The chat template takes tools; requests with tool_choice auto need {needed}.")
    if plan is not None:
        command = command.compared_with_plan(start.expect_facts(plan, required=variant.require_plan))
    os.chdir(command.variant.root)
    environment = command.process_environment()
    if command.platform == "cuda" and (missing := cuda_toolkit.missing(environment)):
        warn(
            f"This host has no {' and no '.join(missing)}: kernels that FlashInfer compiles at first use would "
            "fail. On Debian: apt-get install g++."
        )
    os.execve(command.argv[0], list(command.argv), environment)


def _fitness(cache: "CompileCache") -> str:
    if cache.usable:
        return "fits this machine and these flags; the log says for each graph whether it was loaded"
    return f"not used, so vLLM compiles: {'; '.join(cache.differences)}"
