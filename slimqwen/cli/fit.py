"""`slimqwen fit`: computes in seconds, on any machine, whether a model fits on a GPU and how fast it could be there."""

import shutil
import subprocess
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from slimqwen import variant as variants
from slimqwen.cli.console import console, say, silence_hub_client

if TYPE_CHECKING:
    from slimqwen.plan.devices import Gpu


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
        typer.Option(metavar="NAME", help="GPU of eval/devices.yaml (default: this machine's, else all)"),
    ] = None,
    context: Annotated[
        int | None,
        typer.Option(min=1, help="longest request in tokens (default: the variant's, else 32,768)"),
    ] = None,
    sequences: Annotated[
        int | None, typer.Option(min=1, help="requests at a time (default: the variant's, else 1)")
    ] = None,
) -> None:
    """Compute whether a model fits on a GPU, as stored and after each recipe, and how fast it could be there.

    This is arithmetic: it loads no weights and needs no CUDA; of a hub repository it reads config.json and the
    safetensors index. Exit code 1: as stored, the model does not fit on that GPU.
    """
    from slimqwen.fit import tables
    from slimqwen.fit.memory import ServerSettings
    from slimqwen.fit.subject import find_subject
    from slimqwen.plan.devices import read_gpu

    silence_hub_client()
    root = variants.repository_root()
    chosen = read_gpu(gpu, root) if gpu else _find_gpu_here(root)
    subject = find_subject(model, root)
    settings = ServerSettings.of(subject, context, sequences)
    if chosen is None:
        console.print(tables.gpus_table(subject, settings, root).as_rich())
        say(tables.suggest_start(subject, root))
        return
    fits = tables.fit_on_gpus(subject, settings, [chosen])[chosen.name]
    say(tables.give_verdict(subject, settings, chosen.name, fits))
    console.print(tables.steps_table(subject, settings, chosen.name, fits).as_rich())
    for line in (
        *tables.list_notes(subject, settings, chosen, fits[0], root),
        tables.suggest_start(subject, root),
    ):
        say(line)
    raise typer.Exit(0 if fits[0].fits else 1)


def _find_gpu_here(root: Path) -> "Gpu | None":
    """The first GPU that nvidia-smi shows, of eval/devices.yaml; None without a GPU or if it is not listed."""
    from slimqwen.plan.devices import find_gpu

    if shutil.which("nvidia-smi") is None:
        return None
    command = ["nvidia-smi", "--query-gpu=name", "--format=csv,noheader"]
    shown = subprocess.run(command, capture_output=True, text=True, check=False).stdout.splitlines()
    return find_gpu(shown[0], root) if shown else None
