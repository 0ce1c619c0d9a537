"""`slimqwen fit`: computes in seconds, on any machine, whether a model fits on a GPU and how fast it could be there."""

from typing import Annotated

import typer

from slimqwen.cli.console import console, say, silence_hub_client
from slimqwen.workspace import root_to_read


def fit(
    model: Annotated[
        str,
        typer.Argument(
            metavar="MODEL",
            help="variant, folder, config.json, shape of eval/shapes, or owner/name of the hub",
        ),
    ],
    gpu: Annotated[
        str | None,
        typer.Option(
            metavar="GPU",
            help="its name, as nvidia-smi writes it or in short, or memory=16,bandwidth=448,capability=8.9 "
            "(default: this machine's, else a table of many)",
        ),
    ] = None,
    gpus: Annotated[
        int | None,
        typer.Option(
            min=1, help="such GPUs that share the model (default: the variant's, else this machine's)"
        ),
    ] = None,
    context: Annotated[
        int | None,
        typer.Option(min=1, help="longest request in tokens (default: the variant's, else 32,768)"),
    ] = None,
    sequences: Annotated[
        int | None, typer.Option(min=1, help="requests at a time (default: the variant's, else 1)")
    ] = None,
    waterfall: Annotated[
        bool,
        typer.Option(
            "--waterfall", help="what a decode step of a variant reads after each stage of its recipe"
        ),
    ] = False,
) -> None:
    """Compute whether a model fits on a GPU, as stored and after each recipe, and how fast it could be there.

    This is arithmetic: it loads no weights and needs no CUDA; of a hub repository it reads config.json and the
    safetensors index. Exit code 1: as stored, the model does not fit on that GPU.
    """
    from slimqwen.fit import tables, verdict
    from slimqwen.fit import waterfall as waterfalls
    from slimqwen.fit.memory import ServerSettings
    from slimqwen.fit.subject import find_subject
    from slimqwen.plan.host_gpus import choose_gpu

    silence_hub_client()
    root = root_to_read()
    found = choose_gpu(gpu, root)
    subject = find_subject(model, root)
    here = found.here if found and gpu is None else 1
    settings = ServerSettings.of(subject, context, sequences, gpus, gpus_here=here)
    if waterfall:
        if found is None:
            raise typer.BadParameter("--waterfall shows the steps on one GPU; name it with --gpu")
        console.print(waterfalls.waterfall_table(subject, settings, found.gpu).as_rich())
        return
    if found is None:
        console.print(tables.gpus_table(subject, settings, root).as_rich())
        if subject.namesakes:
            say(f"{model} was taken as {subject.namesakes}.")
        say(tables.suggest_start(subject, root))
        return
    chosen = found.gpu
    fits = verdict.fit_on_gpus(subject, settings, [chosen])[chosen.name]
    say(verdict.give_verdict(subject, settings, chosen, fits))
    console.print(tables.steps_table(subject, settings, chosen.name, fits).as_rich())
    for line in tables.list_notes(subject, settings, chosen, fits, root):
        say(line)
    if (bits := subject.narrowest_bits) and bits < 4:
        from slimqwen.evals.roundings import costs_seen

        if seen := costs_seen(bits, root):
            say(seen)
    if here > settings.gpus:
        say(f"This machine has {here} such GPUs: --gpus {here} shares the model among them.")
    say(tables.suggest_start(subject, root))
    raise typer.Exit(0 if fits[0].fits else 1)
