"""`slimqwen plan`: predicts vLLM's configuration; other verbs look up its records to warn or to refuse a start."""

from collections.abc import Sequence
from typing import TYPE_CHECKING, Annotated

import typer

from slimqwen.cli.console import command, console, errors, progress_bar, relative, say
from slimqwen.cli.options import VariantOption
from slimqwen.variant import Variant

if TYPE_CHECKING:
    from slimqwen.plan.facts import Plan
    from slimqwen.serving.checks import Trouble
    from slimqwen.serving.command import ServerCommand


def plan(
    variant: VariantOption,
    gpu: Annotated[
        list[str] | None,
        typer.Option(metavar="GPU", help="GPU of eval/devices.yaml; may be repeated (default: six of them)"),
    ] = None,
    kernels: Annotated[
        bool,
        typer.Option(
            "--kernels",
            help="compile the Triton kernels that a simulated GPU would run (a minute per GPU model)",
        ),
    ] = False,
    compile_: Annotated[
        bool,
        typer.Option(
            "--compile",
            help="compile what a first start on the GPU would compile, and pack it in .cache/compiled/VARIANT-GPU",
        ),
    ] = False,
    record: Annotated[
        bool,
        typer.Option("--record", help="write the plans as records into results/, where starts look for them"),
    ] = False,
) -> None:
    """Predict how vLLM will be configured for a variant on a GPU: backends, graphs, KV cache, known trouble.

    A prediction needs no GPU and loads no weights. Exit code 1: on one of the GPUs a start would be refused.
    """
    from slimqwen.plan import record as plans
    from slimqwen.plan import trouble
    from slimqwen.plan.devices import CPU
    from slimqwen.records import provenance
    from slimqwen.serving import platform as machine

    gpus = tuple(
        gpu or (plans.DEFAULT_GPUS if variant.platform == "cuda" or machine.is_gpu_build() else (CPU,))
    )
    if compile_:
        if len(gpus) != 1 or gpus == (CPU,):
            raise typer.BadParameter("--compile works for one GPU at a time; name it with --gpu")
        _compile_ahead(variant, gpus[0])
        return
    if kernels and CPU in gpus:
        raise typer.BadParameter("a CPU runs no Triton kernels; name a GPU with --gpu, or omit --kernels")
    started, known = provenance.utc_now(), trouble.read_known_trouble(variant.root)
    with progress_bar() as progress:
        made = plans.make_plans(variant, gpus, kernels=kernels, progress=progress)
    found = plans.trouble_table(made, known)
    for table in (*plans.plan_tables(variant.name, made), *([found] if found.rows else [])):
        console.print(table.as_rich())
    if record:
        path = plans.write_plans(variant, made, command=command(), started=started)
        say(f"record: {relative(path)}")
    refused = any(entry.prevents_start for each in made for entry in trouble.match_trouble(each, known))
    raise typer.Exit(1 if refused else 0)


def _compile_ahead(variant: Variant, gpu: str) -> None:
    """Compile FlashInfer libraries and Triton kernels for a first start on a GPU, without a GPU, and pack them.

    `slimqwen image build --cache` puts the archive into an image; `slimqwen serve` finds it beside the checkpoint.
    """
    from slimqwen.plan import archive
    from slimqwen.serving import baked_cache

    destination = variant.root / ".cache" / "compiled" / f"{variant.name}-{gpu}"
    log = variant.root / "logs" / f"compile-{variant.name}-{gpu}.log"
    with progress_bar() as progress:
        packed = archive.make_archive(variant, gpu, destination, log=log, progress=progress)
    for name, seconds in packed.baked.libraries.items():
        say(f"{name}: compiled in {seconds:g} s")
    say(f"Triton kernels: {len(packed.baked.kernels)} forms")
    uncompiled = ", ".join(module.module for module in packed.plan.jit if not module.libraries)
    if uncompiled:
        say(f"cannot be compiled ahead; the server compiles it at its first use: {uncompiled}")
    say(f"packed: {destination / baked_cache.ARCHIVE}")


def find_recorded_plan(server: "ServerCommand") -> "tuple[Plan | None, Sequence[Trouble]]":
    """Look up the recorded plan of a start on this machine.

    Prints one line for each known trouble that only costs time or memory, or one if no plan fits a start on a GPU.

    Returns:
        The plan (None without one), and the known trouble for which the start is refused; without a plan only trouble
        that follows from the flags.

    Raises:
        ServingError: there is no plan, and REQUIRE_PLAN=1.
    """
    from slimqwen.plan import start
    from slimqwen.serving.errors import ServingError

    try:
        found = start.find_plan(server, start.name_gpu_here(server))
    except start.MissingPlanError as error:
        if server.variant.require_plan:
            raise ServingError(f"REQUIRE_PLAN=1, but {error}") from None
        # Known trouble on a CPU follows from the flags, so a start there needs no plan.
        if server.platform != "cpu":
            errors.print(f"{error}.", markup=False)
        return None, start.match_flag_trouble(server).dies
    trouble = start.match_start_trouble(found, server, compiles=start.compiles_here(server))
    for line in trouble.costs:
        errors.print(f"Known trouble: {line}.", markup=False)
    return found, trouble.dies
