"""`slimqwen search`: the fastest variant on a GPU in a budget; `slimqwen tune`: the fastest drafts and flags here."""

import re
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from slimqwen import variant as variants
from slimqwen.cli.console import command, progress_bar, relative, say, show_record
from slimqwen.cli.options import EvenIfBusy, Port, VariantOption
from slimqwen.cli.report import update_page
from slimqwen.progress import Progress

if TYPE_CHECKING:
    from slimqwen.processes import Executor

Width = Annotated[
    int | None,
    typer.Option(
        min=1,
        help="tasks at a time (default: one per core on a CPU, one on a GPU, one per node of a Ray cluster)",
    ),
]
RayAddress = Annotated[
    str | None,
    typer.Option(metavar="ADDRESS", help="Ray cluster, host:port or auto (default: only this machine)"),
]


def search(
    base: Annotated[str, typer.Option("--base", "--variant", metavar="NAME", help="variant to start from")],
    gpu: Annotated[str, typer.Option(metavar="NAME", help="GPU of eval/devices.yaml to serve on")],
    budget: Annotated[
        str | None,
        typer.Option(metavar="NAME", help="limits of eval/gates/ (default: the base's EVALUATION)"),
    ] = None,
    candidates: Annotated[int, typer.Option(min=1, help="candidates to make and check at most")] = 5,
    corpus: Annotated[
        str | None,
        typer.Option(
            metavar="self|general|FILE|FOLDER",
            help="text of the recipes (default: that of the promoted recipe, else self)",
        ),
    ] = None,
    ray: RayAddress = None,
    width: Width = None,
) -> None:
    """Find the fastest recipe and drafts for a GPU within a quality budget, and prove them.

    What each change costs in quality and saves of a step is measured and computed; a few candidates are checked.

    Ctrl-C keeps what has been measured; the same command continues.
    """
    from slimqwen.cli.variants import name_text
    from slimqwen.search.driver import search_variants

    root = variants.repository_root()
    subject = variants.load(base, root)
    with progress_bar() as progress:
        path = search_variants(
            subject,
            gpu,
            budget or subject.evaluation,
            _executor(ray, root, progress, width),
            command=command(),
            candidates=candidates,
            corpus=name_text(corpus, subject.folder) if corpus else None,
        )
    show_record(path)


def tune(
    variant: VariantOption,
    load: Annotated[
        str | None,
        typer.Option(
            metavar="N,…",
            help="numbers of concurrent requests, and `sessions` of an agent for flags (default: 1, 4 and 16, up to "
            "VLLM_MAX_NUM_SEQS, and sessions)",
        ),
    ] = None,
    minutes: Annotated[float, typer.Option(min=1, help="start no server after this many minutes")] = 45,
    flags: Annotated[
        str,
        typer.Option(
            metavar="KIND",
            help="serving flags to try beside the best drafts: none; exact, which keep greedy responses; lossy: also "
            "those that need the gate",
        ),
    ] = "exact",
    temperature: Annotated[
        float | None,
        typer.Option(
            min=0,
            help="temperature of timed requests (default: the workload's); above 0 drafts can be sampled",
        ),
    ] = None,
    apply: Annotated[
        str | None, typer.Option(metavar="NAME", help="name of a new variant that gets the chosen settings")
    ] = None,
    port: Port = None,
    even_if_busy: EvenIfBusy = False,
) -> None:
    """Find the fastest drafts for a variant on this machine, and the serving flags that pay beside them.

    Each way to speculate takes turns with the undrafted server, then each flag with the best; then what paid is united.
    Wrong responses end an arm. The same command continues.
    """
    from slimqwen.search.tune import FLAGS, SESSIONS, apply_chosen, tune_variant
    from slimqwen.variant import DRAFTS_NOTE, scaffold

    if load is not None and not re.fullmatch(rf"[1-9]\d*(,[1-9]\d*)*(,{SESSIONS})?", load):
        raise typer.BadParameter(
            f"--load {load}: give numbers of concurrent requests, such as 1,4,16,{SESSIONS}"
        )
    if flags not in FLAGS:
        raise typer.BadParameter(f"--flags {flags}: give {', '.join(FLAGS)}")
    if apply is not None:
        scaffold.require_new(apply, variant.root)
    with progress_bar() as progress:
        path = tune_variant(
            variant,
            [int(each) for each in load.split(",") if each != SESSIONS] if load else None,
            flags=flags,
            sessions=load is None or load.endswith(SESSIONS),
            minutes=minutes,
            command=command(),
            temperature=temperature,
            port=port,
            even_if_busy=even_if_busy,
            progress=progress,
        )
    record = show_record(path)
    if record.winner and record.winner.speculation:
        say(f"{DRAFTS_NOTE}.")
    if apply is None:
        return
    folder = apply_chosen(record, variant, apply)
    if folder is None:
        why = (
            "the verdict is inconclusive"
            if record.chosen is None
            else "the variant has these settings already"
        )
        say(f"{apply} was not written: {why}")
        return
    say(f"written: {relative(folder)}; next: `slimqwen gate --variant {apply}`")
    update_page(folder)


def _executor(ray: str | None, root: Path, progress: Progress, width: int | None) -> "Executor":
    from slimqwen.processes.local import LocalExecutor, default_width

    if ray is None:
        return LocalExecutor(root, progress, warm=True, width=width or default_width())
    from slimqwen.processes.ray import RayExecutor
    from slimqwen.records import provenance

    return RayExecutor(root, ray, provenance.host_kind, progress)
