"""`slimqwen plan`: predicts how vLLM will be configured; other verbs look up its records to warn or to refuse."""

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from slimqwen import variant as variants
from slimqwen.cli.console import command, console, errors, progress_bar, relative, say
from slimqwen.cli.options import OptionalVariant, VariantOption

if TYPE_CHECKING:
    from slimqwen.plan.facts import Plan
    from slimqwen.serving.checks import Trouble
    from slimqwen.serving.command import ServerCommand

app = typer.Typer(
    help="Predict how vLLM will be configured for a variant on a GPU; needs no GPU, loads no weights."
)


@app.callback(invoke_without_command=True)
def plan(
    context: typer.Context,
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
    record: Annotated[bool, typer.Option(help="write the plans into results/")] = True,
) -> None:
    """Predict how vLLM will be configured for a variant on a GPU: backends, graphs, KV cache, known trouble."""
    if context.invoked_subcommand:
        return
    from slimqwen.analysis import plan as plans
    from slimqwen.records import store

    root = variants.repository_root()
    if (variant is None) != all_:
        raise typer.BadParameter("name one variant with --variant, or take --all")
    loaded = [variant] if variant else [variants.load(name, root) for name in variants.names(root)]
    subjects = [each for each in loaded if each is variant or each.platform == "cuda"]
    if not subjects:
        raise typer.BadParameter(
            "--all plans the variants with PLATFORM=cuda, and there is none; use --variant"
        )
    default = plans.DEFAULT_GPUS if subjects[0].platform == "cuda" else (plans.CPU,)
    chosen_gpus = tuple(gpu or default)
    if kernels and plans.CPU in chosen_gpus:
        raise typer.BadParameter(
            "a CPU runs no Triton kernels: name a GPU with --gpu, or leave --kernels out"
        )
    with progress_bar() as progress:
        records = plans.make(
            subjects,
            chosen_gpus,
            command=command(),
            hide_toolkit=not toolkit,
            kernels=kernels,
            log_folder=root / "logs",
            progress=progress,
        )
    would_die = False
    for plan_record in records:
        path = store.write(root / "results", plan_record) if record else None
        for table in plan_record.tables(path or root):
            console.print(table.as_rich())
        if path is not None:
            say(f"record: {relative(path)}")
        would_die |= any(trouble.effect == "dies" for trouble in plan_record.trouble)
    raise typer.Exit(1 if would_die else 0)


@app.command("compile")
def compile_ahead(
    variant: VariantOption,
    gpu: Annotated[str, typer.Option(metavar="GPU", help="GPU model of eval/simulated_gpus.yaml")],
    folder: Annotated[
        Path | None,
        typer.Option(help="folder of the archive and its manifest (default: .cache/compiled/VARIANT-GPU)"),
    ] = None,
) -> None:
    """Compile the FlashInfer libraries and Triton kernels of a first start in advance, without a GPU, and pack them.

    `slimqwen image build --cache` takes the archive; beside the checkpoint, `slimqwen serve` finds it.
    """
    from slimqwen.plan import archive
    from slimqwen.serving import baked_cache

    destination = folder or variant.root / ".cache" / "compiled" / f"{variant.name}-{gpu}"
    log = variant.root / "logs" / f"compile-{variant.name}-{gpu}.log"
    with progress_bar() as progress:
        packed = archive.make(variant, gpu, destination, log=log, progress=progress)
    for name, seconds in packed.baked.libraries.items():
        say(f"{name}: compiled in {seconds:g} s")
    say(f"Triton kernels: {len(packed.baked.kernels)} forms")
    uncompiled = ", ".join(module.module for module in packed.plan.jit if not module.libraries)
    if uncompiled:
        say(f"cannot be compiled ahead, and is compiled at its first use: {uncompiled}")
    say(f"packed: {destination / baked_cache.ARCHIVE}")


@app.command()
def compare(
    first: Annotated[Path, typer.Argument(metavar="FIRST", help="record of plans in results/")],
    second: Annotated[Path, typer.Argument(metavar="SECOND", help="another, or the same one")],
    gpu: Annotated[
        tuple[str, str] | None,
        typer.Option(
            metavar="GPU GPU", help="GPUs of the first and the second record (default: those that both have)"
        ),
    ] = None,
) -> None:
    """Compare the plans of two records, of two vLLM versions or two GPUs: changed flags, backends, graphs."""
    from slimqwen.analysis import plan_comparison
    from slimqwen.analysis.plan import PlanRecord
    from slimqwen.records import store

    records = store.read(first, PlanRecord), store.read(second, PlanRecord)
    for pair in plan_comparison.pairs(*records, gpu):
        console.print(plan_comparison.changes_table(*pair).as_rich())


@app.command()
def starts() -> None:
    """List the server starts here that had a plan, and where the engine differed from it."""
    from slimqwen.analysis import start_plan

    console.print(start_plan.starts_table(variants.repository_root()).as_rich())


def consult(server: "ServerCommand") -> "tuple[Plan | None, Sequence[Trouble]]":
    """Look up the plan of a start on this machine.

    Prints one line for each known cost of the start, or one line where no plan fits a start on a GPU.

    Returns:
        The plan, and the known trouble by which the start would die.

    Raises:
        ServingError: there is no plan, and REQUIRE_PLAN=1; or the plan names a module of FlashInfer that the compile
            cache lacks, and REQUIRE_BAKED=1.
    """
    from slimqwen.analysis import start_plan
    from slimqwen.analysis.plan import MissingPlanError
    from slimqwen.serving.errors import ServingError

    try:
        plan = start_plan.find(
            server, start_plan.gpu_here(server), toolkit=start_plan.has_toolkit_here(server)
        )
    except MissingPlanError as error:
        if server.require_plan:
            raise ServingError(f"REQUIRE_PLAN=1, and {error}") from None
        # Known trouble concerns GPUs alone, so a plan would change nothing of a start on a CPU.
        if server.platform != "cpu":
            errors.print(f"{error}.", markup=False)
        return None, ()
    start_plan.require_libraries(plan, server)
    trouble = start_plan.start_trouble(plan, server)
    for line in trouble.costs:
        errors.print(f"Known trouble: {line}.", markup=False)
    return plan, trouble.dies


def consult_target(server: "ServerCommand") -> None:
    """Look up the plans of an image's server, on every device that has one.

    Prints one line for each known trouble.

    Raises:
        ServingError: the plans predict that the server dies on all of these devices.
    """
    from slimqwen.analysis import start_plan
    from slimqwen.serving import checks

    # A CUDA image holds a C++ compiler, nvcc and ninja.
    plans = start_plan.find_all(server, toolkit=server.platform == "cuda")
    trouble = [start_plan.start_trouble(plan, server) for plan in plans.values()]
    for start in trouble:
        for line in (*start.costs, *(f"{death.description}; {death.cure}" for death in start.dies)):
            errors.print(f"Known trouble: {line}.", markup=False)
    if trouble and all(start.dies for start in trouble):
        checks.refuse_trouble(server, trouble[0].dies)
