"""`slimqwen fit`: computes in seconds, on any machine, whether a model fits on a GPU and how fast it could be there."""

import shutil
import subprocess
from pathlib import Path
from typing import Annotated

import typer

from slimqwen import variant as variants
from slimqwen.cli.console import console, say, silence_hub_client


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
    from slimqwen.roofline.gpu import read_gpu

    silence_hub_client()
    root = variants.repository_root()
    name = read_gpu(gpu, root).name if gpu else _find_gpu_here(root)
    subject = find_subject(model, root)
    settings = ServerSettings.of(subject, context, sequences)
    if name is None:
        console.print(tables.gpus_table(subject, settings, root).as_rich())
        say(tables.suggest_start(subject, root))
        return
    fits = tables.fit_on_gpus(subject, settings, [name], root)[name]
    say(tables.give_verdict(subject, settings, name, fits))
    console.print(tables.steps_table(subject, settings, name, fits).as_rich())
    for line in (
        *tables.list_notes(subject, settings, name, fits[0], root),
        tables.suggest_start(subject, root),
    ):
        say(line)
    raise typer.Exit(0 if fits[0].fits else 1)


def _find_gpu_here(root: Path) -> str | None:
    """Name in eval/devices.yaml of the first GPU that nvidia-smi shows; None without a GPU or if it is not listed."""
    from slimqwen.plan.gpu_model import find_name

    if shutil.which("nvidia-smi") is None:
        return None
    command = ["nvidia-smi", "--query-gpu=name", "--format=csv,noheader"]
    shown = subprocess.run(command, capture_output=True, text=True, check=False).stdout.splitlines()
    return find_name(shown[0], root) if shown else None
