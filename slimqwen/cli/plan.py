"""`slimqwen plan`: predicts vLLM's configuration."""

from collections.abc import Sequence
from typing import TYPE_CHECKING, Annotated

import typer

from slimqwen.cli.console import command, console, progress_bar, relative, say
from slimqwen.cli.options import VariantOption
from slimqwen.variant import Variant

if TYPE_CHECKING:
    from slimqwen.plan.devices import Gpu


def plan(
    variant: VariantOption,
    gpu: Annotated[
        list[str] | None,
        typer.Option(
            metavar="GPU",
            help="its name, as nvidia-smi writes it or in short, or memory=16,bandwidth=448,capability=8.9, or cpu; "
            "may be repeated (default: this machine's)",
        ),
    ] = None,
    gpus: Annotated[
        int | None,
        typer.Option(min=1, help="such GPUs that share the model (default: the variant's, else 1)"),
    ] = None,
    record: Annotated[
        bool,
        typer.Option("--record", help="write the plans as a record, which starts look up"),
    ] = False,
) -> None:
    """Predict how vLLM will be configured for a variant on a GPU: backends, graphs, KV cache, known trouble.

    A prediction needs no GPU and loads no weights. Exit code 1: on one of the GPUs a start would be refused.
    """
    from slimqwen.plan import record as plans
    from slimqwen.plan import trouble
    from slimqwen.plan.rehearsal import SHARED_BY
    from slimqwen.records import provenance

    chosen = _choose_devices(variant, gpu)
    if gpus is not None:
        variant = variant.with_lines({SHARED_BY: str(gpus)})
    started, known = provenance.utc_now(), trouble.read_known_trouble(variant.root)
    with progress_bar() as progress:
        made = plans.make_plans(variant, chosen, progress=progress)
    found = plans.trouble_table(made, known)
    for table in (plans.plan_table(variant.name, made), *([found] if found.rows else [])):
        console.print(table.as_rich())
    if record:
        path = plans.write_plans(variant, made, command=command(), started=started)
        say(f"record: {relative(path)}")
    refused = any(entry.prevents_start for each in made for entry in trouble.match_trouble(each, known))
    raise typer.Exit(1 if refused else 0)


def _choose_devices(variant: Variant, names: Sequence[str] | None) -> "list[Gpu | None]":
    """The named GPUs, else this machine's; None stands for its CPU.

    Raises:
        UnknownGpuError, UnservedGpuError: as `choose_gpu`; or this machine has no GPU, and the variant or the installed
            vLLM needs one.
    """
    from slimqwen import host
    from slimqwen.plan.devices import CPU, UnknownGpuError
    from slimqwen.plan.host_gpus import choose_gpu

    if names:
        named = [None if name == CPU else choose_gpu(name, variant.root) for name in names]
        return [each.gpu if each else None for each in named]
    if variant.platform is None and not host.is_gpu_build():
        return [None]
    if here := choose_gpu(None, variant.root):
        return [here.gpu]
    raise UnknownGpuError(
        f"this machine shows no NVIDIA GPU; name one, as in `slimqwen plan --variant {variant.name} --gpu rtx-4090`"
    )
