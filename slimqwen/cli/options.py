"""Options that several verbs share. Nothing here imports what measures: `--help` and completion stay quick."""

from pathlib import Path
from typing import Annotated, Literal

import typer

from slimqwen import variant


def _variants(incomplete: str) -> list[str]:
    return [name for name in variant.names() if name.startswith(incomplete)]


def _stems(folder: str, incomplete: str) -> list[str]:
    files = (variant.repository_root() / "eval" / folder).glob(f"{incomplete}*.y*ml")
    return sorted(file.stem for file in files)


def _plan(folder: str, default: str) -> typer.models.OptionInfo:
    """An option that names a file of eval/<folder>/, completed from what lies there."""
    option: typer.models.OptionInfo = typer.Option(
        metavar="NAME",
        help=f"file of eval/{folder}/{default}",
        autocompletion=lambda incomplete: _stems(folder, incomplete),
    )
    return option


_OWN = " (default: the variant's EVALUATION in config.env)"

VariantName = Annotated[
    str,
    typer.Option("--variant", metavar="NAME", help="folder of experiments/", autocompletion=_variants),
]
SuiteName = Annotated[str | None, _plan("suites", _OWN)]
FidelityPlan = Annotated[str | None, _plan("fidelity", _OWN)]
GatePlan = Annotated[str | None, _plan("gates", _OWN)]
AcceptancePlan = Annotated[str | None, _plan("acceptance", _OWN)]
EnginePlan = Annotated[str | None, _plan("engine", _OWN)]
LengthSweepPlan = Annotated[str | None, _plan("length_sweep", _OWN)]
WorkloadName = Annotated[str, _plan("workloads", "")]
RecordsFolder = Annotated[
    Path | None,
    typer.Option(
        "--records-dir", metavar="FOLDER", help="write FOLDER/<variant>/, not experiments/<variant>/"
    ),
]
Port = Annotated[int | None, typer.Option(help="TCP port of the running server, or of the one to be started")]
PlatformName = Annotated[
    Literal["cpu", "cuda"] | None, typer.Option(help="platform, instead of the variant's or this machine's")
]
Rounds = Annotated[int, typer.Option(min=2, help="server starts of each kind; 6 give a 95 % interval")]
EvenIfBusy = Annotated[
    bool,
    typer.Option(
        "--even-if-busy", help="measure on a busy host too; the record is marked and never compared"
    ),
]
