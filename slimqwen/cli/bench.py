"""`slimqwen bench`: is a variant fast?"""

from typing import TYPE_CHECKING, Annotated

import typer

from slimqwen import variant as variants
from slimqwen.cli.console import command, console, progress_bar, say, show_record
from slimqwen.cli.options import (
    EvenIfBusy,
    Port,
    Rounds,
    VariantOption,
    WorkloadName,
)
from slimqwen.variant import Variant

if TYPE_CHECKING:
    from slimqwen.bench.workload import Workload

app = typer.Typer(help="Is a variant fast? Latency, start-up.", no_args_is_help=True)


@app.command()
def latency(
    variant: VariantOption,
    against: Annotated[
        list[Variant] | None,
        typer.Option(
            metavar="NAME",
            help="further variant to time in turns, each on fresh servers; may be repeated",
            parser=variants.load,
        ),
    ] = None,
    baseline: Annotated[
        bool, typer.Option("--baseline", help="time the variant's baseline, too, in turns and first")
    ] = False,
    workload: WorkloadName = None,
    rounds: Annotated[int | None, typer.Option(help="rounds, instead of the workload's")] = None,
    port: Port = None,
    even_if_busy: EvenIfBusy = False,
    guidellm: Annotated[
        bool,
        typer.Option(
            "--guidellm", help="print the GuideLLM lines of a load like the workload's, and time nothing"
        ),
    ] = False,
) -> None:
    """Time variants in turns over a workload: TTFT, TPOT, ITL, end-to-end latency, throughput."""
    from slimqwen.bench import latency
    from slimqwen.bench.workload import Workload, name_workload

    if guidellm:
        _print_guidellm(variant, Workload.load(workload or name_workload(variant), variant.root), port)
        return
    subjects = [variant, *(against or ())]
    if baseline:
        if len(subjects) > 1 or subjects[0].baseline is None:
            raise typer.BadParameter(
                "--baseline takes one variant that has a baseline; leave out --against, or name such a variant"
            )
        subjects.insert(0, variants.load(subjects[0].baseline))
    with progress_bar() as progress:
        paths = latency.measure_latency(
            subjects,
            Workload.load(workload or name_workload(variant), variant.root),
            command=command(),
            rounds=rounds,
            port=port,
            even_if_busy=even_if_busy,
            progress=progress,
        )
    busy = [show_record(path).provenance.host_was_busy for path in paths]
    for path in paths[1:] if not any(busy) else ():
        console.print(latency.comparison(paths[0], path).as_rich())
        if verdict := latency.give_verdict(paths[0], path):
            say(verdict)
    if len(paths) == 1 and variant.baseline:
        say(f"Next: `slimqwen bench latency {variant.name} --baseline` times its baseline in turns with it.")


def _print_guidellm(variant: Variant, workload: "Workload", port: int | None) -> None:
    """Print a command line of GuideLLM for each class, alone on stdout, so that a shell can run them."""
    from slimqwen.bench.guidellm_lines import list_lines
    from slimqwen.serving.command import ServerCommand
    from slimqwen.serving.context_length import resolve_context

    server = ServerCommand.resolve(variant, port=port)
    context = resolve_context(variant.weights, server.flags, server.variables)
    sequences = int(server.flags.get("max-num-seqs", 1))
    for line in list_lines(
        workload, server.url, server.served_model_name, str(variant.weights), context, sequences
    ):
        say(line)


@app.command()
def startup(variant: VariantOption, rounds: Rounds = 6, even_if_busy: EvenIfBusy = False) -> None:
    """Time the phases of server starts, with an empty compile cache and with the baked one."""
    from slimqwen.bench import start_up

    log = variant.root / "logs" / f"start-up-{variant.name}.log"
    with progress_bar() as progress:
        path = start_up.measure_start_up(
            variant, rounds, log, command=command(), even_if_busy=even_if_busy, progress=progress
        )
    show_record(path, log)
