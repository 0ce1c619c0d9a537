"""Options that several verbs share. Imports no code that measures, so that `--help` and completion stay quick."""

from typing import Annotated, Literal

import typer

from slimqwen import variant
from slimqwen.workspace import list_files


def matching_variants(incomplete: str) -> list[str]:
    """Names of variants that begin with `incomplete`, for the shell's completion."""
    return [name for name in variant.names() if name.startswith(incomplete)]


def _stems(folder: str, incomplete: str) -> list[str]:
    files = list_files(f"eval/{folder}/{incomplete}*.y*ml", variant.repository_root())
    return sorted(file.stem for file in files)


def _settings_file(folder: str, default: str) -> typer.models.OptionInfo:
    """An option whose value names a file of eval/<folder>/; the shell completes it from the files there.

    Args:
        folder: folder in eval/.
        default: text of the help about the default value.
    """
    option: typer.models.OptionInfo = typer.Option(
        metavar="NAME",
        help=f"file of eval/{folder}/{default}",
        autocompletion=lambda incomplete: _stems(folder, incomplete),
    )
    return option


_OWN = " (default: the variant's EVALUATION in config.env)"

_VARIANT = typer.Option(
    "--variant",
    metavar="NAME",
    help="folder of experiments/; works without the option, too",
    autocompletion=matching_variants,
    parser=variant.load,
)
VariantOption = Annotated[variant.Variant, _VARIANT]
OptionalVariant = Annotated[variant.Variant | None, _VARIANT]
SuiteName = Annotated[str | None, _settings_file("suites", _OWN)]
GateSettingsName = Annotated[str | None, _settings_file("gates", _OWN)]
WorkloadName = Annotated[
    str | None,
    _settings_file("workloads", " (default: the prompts of the variant's own evaluation, else classes)"),
]
TrustedCache = Annotated[
    str | None,
    typer.Option(metavar="SHA256", help="import the compile cache with this SHA-256: its code will be run"),
]
Port = Annotated[int | None, typer.Option(help="TCP port of the server that runs or is to be started")]
PlatformName = Annotated[
    Literal["cpu", "cuda"] | None, typer.Option(help="platform instead of the variant's or this machine's")
]
Rounds = Annotated[int, typer.Option(min=2, help="server starts of each kind; 6 give a 95 % interval")]
EvenIfBusy = Annotated[
    bool,
    typer.Option("--even-if-busy", help="measure even on a busy host; the record is marked, not compared"),
]
