"""What `slimqwen fit` shows: a checkpoint on one GPU, on all GPUs, and every committed shape on every GPU."""

import json
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from importlib.metadata import version
from pathlib import Path

from slimqwen import variant as variants
from slimqwen.fit.memory import Fit, ServerSettings, estimate_activations, fit_checkpoint, size_checkpoint
from slimqwen.fit.optimised import list_optimised
from slimqwen.fit.subject import Subject, find_subject
from slimqwen.models.families import LINEAR_ATTENTION
from slimqwen.plan import trouble
from slimqwen.plan.devices import Gpu, read_gpus
from slimqwen.plan.facts import EngineConfig, Plan
from slimqwen.plan.record import find_gpu_plan
from slimqwen.plan.resolution import OVERHEAD_GIB
from slimqwen.plan.shapes import FOLDER
from slimqwen.records.table import Table
from slimqwen.vllm_plugin.engine_facts import AttentionLayers

_GB = 1e9
_FIRST_BFLOAT16 = (8, 0)

SHAPES_CONTEXT_LEN = 8192
"""Context of the table of all shapes, tokens."""


def fit_on_gpus(subject: Subject, settings: ServerSettings, gpus: Iterable[Gpu]) -> dict[str, list[Fit]]:
    """How a checkpoint and its optimised forms fit, by the name of the GPU."""
    length = subject.family.acceptance_lengths.get(settings.depth)
    sized = [size_checkpoint(step, settings) for step in list_optimised(subject)]
    return {gpu.name: [fit_checkpoint(each, settings, gpu, length) for each in sized] for gpu in gpus}


def give_verdict(subject: Subject, settings: ServerSettings, gpu: str, fits: Sequence[Fit]) -> str:
    """One line: whether the checkpoint fits as stored, by how much, and which optimisations make it fit."""
    requests = f"{settings.sequences} x {settings.context_len:,} tokens"
    where = f"{subject.name} with {requests} on {settings.gpus if settings.gpus > 1 else 'one'} {gpu}"
    first = fits[0]
    if first.fits:
        return f"{where}: fits, {-first.missing_bytes / _GB:.1f} GB left"
    if first.missing_bytes <= 0:
        return (
            f"{where}: fits, but vLLM would take {first.captured_sequences} sequences, which need a state block each, "
            f"and {first.blocks} blocks fit; set VLLM_MAX_NUM_SEQS to at most {first.blocks}"
        )
    needed = next((fits[1 : row + 1] for row, fit in enumerate(fits) if fit.fits), None)
    cure = (
        f"fits with {', '.join(fit.optimisation for fit in needed)}" if needed else "no recipe makes it fit"
    )
    return f"{where}: does not fit as stored, {first.missing_bytes / _GB:.1f} GB too much; {cure}"


def steps_table(subject: Subject, settings: ServerSettings, gpu: str, fits: Sequence[Fit]) -> Table:
    """The checkpoint as stored and after each optimisation, on one GPU."""

    def size(*kinds: str) -> Callable[[Fit], str]:
        return lambda fit: f"{sum(fit.weight_bytes.get(kind, 0) for kind in kinds) / _GB:.2f}"

    columns: dict[str, Callable[[Fit], object]] = {
        "checkpoint": lambda fit: ("+ " if fit is not fits[0] else "") + fit.optimisation,
        "MLP": size("MLP", "experts"),
        "attention": size("attention", "norms"),
        "embedding": size("embedding"),
        "head": size("output head"),
        "MTP": size("MTP head"),
        "left": lambda fit: f"{-fit.missing_bytes / _GB:.1f}",
        "KV tokens": lambda fit: f"{fit.kv_tokens:,}",
        "sequences": lambda fit: f"{fit.full_sequences:.1f}",
        "tok/s": lambda fit: f"{fit.tokens_per_second:.0f}",
    }
    if settings.depth:
        columns["drafted"] = lambda fit: None if fit.drafted is None else f"{fit.drafted:.0f}"
        columns["pay from"] = lambda fit: None if fit.break_even is None else f"{fit.break_even:.2f}"
    return Table.from_rows(f"{subject.name} on {gpu}, GB", fits, columns)


def list_notes(subject: Subject, settings: ServerSettings, gpu: Gpu, fit: Fit, root: Path) -> Iterator[str]:
    """Yield, a line each, what else to know about a server on the GPU; `fit` is that of the checkpoint as stored."""
    states = f"{fit.state_bytes / _GB:.2f} GB of states and " if fit.state_bytes else ""
    yield (
        f"One sequence: {states}{fit.token_bytes / 1024:.0f} KiB per token, {fit.sequence_bytes / _GB:.2f} GB in all; "
        f"vLLM may use {settings.utilization:.0%} of {gpu.driver.memory_gib:g} GiB."
    )
    yield (
        f"Left for activations, CUDA context and graphs: {OVERHEAD_GIB:g} GiB, assumed; a step of "
        f"{settings.batched_tokens:,} tokens takes about {estimate_activations(subject, settings) / _GB:.2f} GB."
    )
    form, stages = subject.describe_format()
    yield f"Format: {form}; stages that support it: {stages}. MTP head: {subject.describe_mtp()}."
    if subject.other_bytes:
        yield f"Not loaded by a text server: {subject.other_bytes / _GB:.2f} GB, such as a vision tower."
    lengths = subject.family.acceptance_lengths
    drafts = (
        f"; with {settings.depth} drafts at the published acceptance length {lengths[settings.depth]:g}"
        if settings.depth in lengths
        else ""
    )
    yield f"tok/s: roofline of one sequence with 2,048 cached tokens{drafts}. Computed, not timed."
    yield f"Dimensions: {subject.source}."
    yield from _list_trouble(subject, settings, gpu, root)


def _list_trouble(subject: Subject, settings: ServerSettings, gpu: Gpu, root: Path) -> Iterator[str]:
    """Known trouble, a line each, found in a recorded plan of the variant, else in the facts that settings decide."""
    dtype = str(subject.text.get("dtype", "bfloat16")) if settings.dtype == "auto" else settings.dtype
    if gpu.capability < _FIRST_BFLOAT16 and dtype == "bfloat16":
        yield (
            f"Known trouble (dies): vLLM refuses bfloat16 below compute capability 8.0, {gpu.name} has "
            f"{gpu.compute_capability}; set VLLM_DTYPE=float16."
        )
    recorded = find_gpu_plan(root, subject.variant.name, gpu.name) if subject.variant else None
    plan = recorded or _plan_by_settings(subject, settings, gpu, dtype)
    for known in trouble.match_trouble(plan, trouble.read_known_trouble(root)):
        if known.effect == "mended":
            continue
        yield f"Known trouble ({known.effect}): {known.description} {known.instead}."


def _plan_by_settings(subject: Subject, settings: ServerSettings, gpu: Gpu, dtype: str) -> Plan:
    """A plan with only the facts that are known without vLLM; conditions on any other fact do not hold for it."""
    hybrid = LINEAR_ATTENTION in subject.family.linears
    lines = {
        "cudagraph-capture-sizes": "VLLM_CUDAGRAPH_CAPTURE_SIZES",
        "speculative-config": "VLLM_SPECULATIVE_CONFIG",
    }
    flags = {flag: subject.settings[key] for flag, key in lines.items() if key in subject.settings}
    if sizes := flags.get("cudagraph-capture-sizes"):
        flags["cudagraph-capture-sizes"] = json.dumps(sizes.split(","))
    engine = EngineConfig.model_construct(
        dtype=dtype,
        kv_cache_dtype=settings.kv_cache_dtype,
        state_dtype=settings.state_dtype,
        num_speculative_tokens=settings.depth,
        prefix_caching=settings.prefix_caching,
        max_num_seqs=settings.sequences,
    )
    layers = AttentionLayers.model_construct(backend="", prefill="any") if hybrid else None
    return Plan.model_construct(
        gpu=gpu.name,
        compute_capability=gpu.compute_capability,
        vllm=version("vllm"),
        flags=flags,
        engine=engine,
        attention=[layers] if layers else [],
    )


def suggest_start(subject: Subject, root: Path) -> str:
    """One line: the variant to start from, and the command for it."""
    name = subject.name.rpartition("/")[2].lower()
    best = [each for each in variants.names(root) if each.endswith("-best")]
    made_from_it = (each for each in best if variants.load(each, root).baseline == name)
    if start := f"{name}-best" if f"{name}-best" in best else next(made_from_it, None):
        return f"Start from {start}: `slimqwen recipe run --variant {start}`"
    if subject.variant:
        made = "recipe run" if subject.variant.recipe else "download"
        verb = "serve" if subject.variant.weights.is_dir() else made
        return f"Start from {subject.name}: `slimqwen {verb} --variant {subject.name}`"
    # The `source` of a committed shape begins with the name of its repository.
    checkpoint = subject.name if "/" in subject.name else re.split("[,: ]", subject.source)[0]
    flags = "qwen3.5-4b-best" if subject.has_mtp else "qwen3.5-4b"
    command = f"slimqwen variant new --name base --checkpoint {checkpoint.removesuffix('/config.json')}"
    return f"Start from a new baseline: `{command}`; flags for a GPU are in experiments/{flags}/config.env"


def gpus_table(subject: Subject, settings: ServerSettings, root: Path) -> Table:
    """The checkpoint on every GPU: as stored, and with as few optimisations as make it fit."""
    gpus = read_gpus(root)
    rows = fit_on_gpus(subject, settings, gpus.values())

    def enough(cell: Callable[[Fit], str]) -> Callable[[str], object]:
        return lambda gpu: next((cell(fit) for fit in rows[gpu] if fit.fits), None)

    columns: dict[str, Callable[[str], object]] = {
        "GPU": lambda gpu: gpu,
        "GiB": lambda gpu: f"{gpus[gpu].driver.memory_gib:g}",
        "as stored": lambda gpu: _margin(rows[gpu][0]),
        "fits with": enough(lambda fit: fit.optimisation),
        "left, GB": enough(lambda fit: f"{-fit.missing_bytes / _GB:.1f}"),
        "KV tokens": enough(lambda fit: f"{fit.kv_tokens:,}"),
        "sequences": enough(lambda fit: f"{fit.full_sequences:.1f}"),
        "tok/s": enough(lambda fit: f"{fit.tokens_per_second:.0f}"),
        "with drafts": enough(lambda fit: f"{fit.drafted:.0f}" if fit.drafted else "-"),
    }
    requests = f"{settings.sequences} x {settings.context_len:,} tokens"
    return Table.from_rows(f"{subject.name} with {requests} on every GPU", rows, columns, text_columns=1)


def _margin(fit: Fit) -> str:
    missing = fit.missing_bytes / _GB
    if missing <= 0 and not fit.fits:
        return f"{fit.blocks} state blocks for {fit.captured_sequences} sequences"
    return f"fits, {-missing:.1f} GB left" if fit.fits else f"{missing:.1f} GB too much"


def shapes_table(root: Path) -> Table:
    """The roofline of every committed 16-bit shape on every GPU, of the first optimised form that fits."""
    gpus = read_gpus(root)
    names = sorted(file.stem for file in (root / FOLDER).glob("*.json") if '"config"' in file.read_text())
    cells: dict[str, Mapping[str, str]] = {}
    for name in names:
        subject = find_subject(name, root)
        settings = replace(ServerSettings.of(subject, SHAPES_CONTEXT_LEN, 1), depth=0)
        fits = fit_on_gpus(subject, settings, gpus.values())
        cells[name] = {gpu: _first_that_fits(each) for gpu, each in fits.items()}
    columns: dict[str, Callable[[str], object]] = {
        "GPU": str,
        "GiB": lambda gpu: f"{gpus[gpu].driver.memory_gib:g}",
    }
    for name in names:
        columns[name] = lambda gpu, name=name: cells[name][gpu]  # type: ignore[misc]
    return Table.from_rows(
        "Tokens per second at the roofline of one sequence, by GPU and shape",
        gpus,
        columns,
        f"Without drafts, of the first form that fits with {SHAPES_CONTEXT_LEN:,} tokens. No mark: as stored in 16 "
        "bits; a: 4-bit MLPs or experts; b: a and 4-bit attention; c: b and a 4-bit output head; d: c and a 4-bit MTP "
        "head; -: none fits, or only one with a smaller vocabulary. Computed, not timed.",
    )


def _first_that_fits(fits: Sequence[Fit]) -> str:
    marked = zip(fits, ("", *"abcd"), strict=False)
    return next((f"{fit.tokens_per_second:.0f}{mark}" for fit, mark in marked if fit.fits), "-")
