"""`slimqwen plan`: predicts how vLLM will be configured; other verbs look up its records to warn or to refuse."""

from collections.abc import Sequence
from typing import TYPE_CHECKING, Annotated

import typer

from slimqwen import variant as variants
from slimqwen.cli.console import command, console, errors, progress_bar, relative, say
from slimqwen.cli.options import OptionalVariant
from slimqwen.variant import Variant

if TYPE_CHECKING:
    from slimqwen.plan.facts import Plan
    from slimqwen.serving.checks import Trouble
    from slimqwen.serving.command import ServerCommand


def plan(
    variant: OptionalVariant = None,
    gpu: Annotated[
        list[str] | None,
        typer.Option(
            metavar="GPU", help="GPU model of eval/simulated_gpus.yaml; repeat it (default: six of them)"
        ),
    ] = None,
    all_: Annotated[bool, typer.Option("--all", help="every variant that needs a GPU")] = False,
    toolkit: Annotated[
        bool, typer.Option(help="assume that the target host has nvcc and ninja as this one does")
    ] = False,
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
            help="compile what a first start on the GPU compiles, and pack it in .cache/compiled/VARIANT-GPU",
        ),
    ] = False,
    record: Annotated[bool, typer.Option(help="write the plans into results/")] = True,
) -> None:
    """Predict how vLLM will be configured for a variant on a GPU: backends, graphs, KV cache, known trouble.

    It needs no GPU and loads no weights. Exit code 1: the server would die on one of the GPUs.
    """
    from slimqwen.plan import record as plans
    from slimqwen.plan import trouble
    from slimqwen.records import provenance

    root = variants.repository_root()
    if (variant is None) != all_:
        raise typer.BadParameter("name one variant with --variant, or take --all")
    loaded = [variant] if variant else [variants.load(name, root) for name in variants.names(root)]
    subjects = [each for each in loaded if each is variant or each.platform == "cuda"]
    if not subjects:
        raise typer.BadParameter(
            "--all plans the variants with PLATFORM=cuda, and there is none; use --variant"
        )
    if compile_:
        if variant is None or len(gpu or ()) != 1:
            raise typer.BadParameter("--compile takes one variant and one GPU: --variant and --gpu")
        _compile_ahead(variant, (gpu or [""])[0])
        return
    default = plans.DEFAULT_GPUS if subjects[0].platform == "cuda" else (plans.CPU,)
    chosen_gpus = tuple(gpu or default)
    if kernels and plans.CPU in chosen_gpus:
        raise typer.BadParameter(
            "a CPU runs no Triton kernels: name a GPU with --gpu, or leave --kernels out"
        )
    started, known = provenance.utc_now(), trouble.read_known_trouble(root)
    with progress_bar() as progress:
        made = plans.make_plans(
            subjects,
            chosen_gpus,
            hide_toolkit=not toolkit,
            kernels=kernels,
            log_folder=root / "logs",
            progress=progress,
        )
    for subject in subjects:
        found = plans.trouble_table(made[subject.name], known)
        for table in (*plans.plan_tables(subject.name, made[subject.name]), *([found] if found.rows else [])):
            console.print(table.as_rich())
        if record:
            path = plans.write_plans(subject, made[subject.name], command=command(), started=started)
            say(f"record: {relative(path)}")
    every_plan = [each for of_variant in made.values() for each in of_variant]
    dies = any(entry.effect == "dies" for each in every_plan for entry in trouble.match_trouble(each, known))
    raise typer.Exit(1 if dies else 0)


def _compile_ahead(variant: Variant, gpu: str) -> None:
    """Compile the FlashInfer libraries and Triton kernels of a first start in advance, without a GPU, and pack them.

    `slimqwen image build --cache` takes the archive; beside the checkpoint, `slimqwen serve` finds it.
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
        say(f"cannot be compiled ahead, and is compiled at its first use: {uncompiled}")
    say(f"packed: {destination / baked_cache.ARCHIVE}")


def find_recorded_plan(server: "ServerCommand") -> "tuple[Plan | None, Sequence[Trouble]]":
    """Look up the plan of a start on this machine.

    Prints one line for each known cost of the start, or one line where no plan fits a start on a GPU.

    Returns:
        The plan, and the known trouble by which the start would die.

    Raises:
        ServingError: there is no plan, and REQUIRE_PLAN=1; or the plan names a module of FlashInfer that the compile
            cache lacks, and REQUIRE_BAKED=1.
    """
    from slimqwen.plan import start
    from slimqwen.serving.errors import ServingError

    try:
        toolkit = start.has_toolkit_here(server)
        found = start.find_plan(server, start.name_gpu_here(server), toolkit=toolkit)
    except start.MissingPlanError as error:
        if server.variant.require_plan:
            raise ServingError(f"REQUIRE_PLAN=1, and {error}") from None
        # Known trouble concerns GPUs alone, so a plan would change nothing of a start on a CPU.
        if server.platform != "cpu":
            errors.print(f"{error}.", markup=False)
        return None, ()
    start.require_libraries(found, server)
    trouble = start.match_start_trouble(found, server)
    for line in trouble.costs:
        errors.print(f"Known trouble: {line}.", markup=False)
    return found, trouble.dies


def check_image_plans(server: "ServerCommand") -> None:
    """Look up the plans of an image's server, on every device that has one.

    Prints one line for each known trouble.

    Raises:
        ServingError: the plans predict that the server dies on all of these devices.
    """
    from slimqwen.plan import start
    from slimqwen.serving import checks

    # A CUDA image holds a C++ compiler, nvcc and ninja.
    plans = start.find_plans(server, toolkit=server.platform == "cuda")
    trouble = [start.match_start_trouble(each, server) for each in plans.values()]
    for entry in trouble:
        for line in (*entry.costs, *(f"{death.description}; {death.cure}" for death in entry.dies)):
            errors.print(f"Known trouble: {line}.", markup=False)
    if trouble and all(entry.dies for entry in trouble):
        checks.refuse_trouble(server, trouble[0].dies)
