"""The tables of `slimqwen fit` and its notes: a checkpoint on one GPU, and checkpoint and shapes over many GPUs."""

import json
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from importlib.metadata import version
from pathlib import Path

from slimqwen import variant as variants
from slimqwen.fit.memory import Fit, ServerSettings, estimate_activations
from slimqwen.fit.optimised import PUBLISHED_EXPERTS, name_published
from slimqwen.fit.subject import Subject, find_subject
from slimqwen.fit.verdict import fit_on_gpus
from slimqwen.models.families import LINEAR_ATTENTION
from slimqwen.plan import trouble
from slimqwen.plan.devices import Gpu, read_gpus
from slimqwen.plan.facts import EngineConfig, Plan
from slimqwen.plan.record import find_gpu_plan
from slimqwen.plan.resolution import OVERHEAD_GIB
from slimqwen.plan.shapes import FOLDER
from slimqwen.records.table import Table
from slimqwen.vllm_plugin.engine_facts import AttentionLayers
from slimqwen.workspace import list_files

_GB = 1e9

SHAPES_CONTEXT_LEN = 8192
"""Context of the table of all shapes, tokens."""

TABLE_GPUS = (
    *(
        "rtx-3060-laptop",
        "rtx-4060",
        "rtx-3060",
        "rtx-4070",
        "rtx-4060-ti",
        "rtx-5070-ti",
        "rtx-3090",
        "rtx-4090",
    ),
    *(
        "rtx-5090",
        "rtx-a6000",
        "rtx-6000-ada",
        "rtx-pro-6000",
        "t4",
        "l4",
        "a10g",
        "a10",
        "a100-40gb",
        "l40s",
        "a100",
    ),
    *("h100", "h200", "b200", "gb10"),
)
"""The GPUs of tables over all GPUs: the whole list would be five times as long."""

_MARKS = {
    "as stored": "",
    "4-bit MLPs": "a",
    "4-bit attention": "b",
    "4-bit head": "c",
    "4-bit MTP": "d",
    PUBLISHED_EXPERTS: "e",
    "8-bit embedding": "f",
}


def steps_table(subject: Subject, settings: ServerSettings, gpu: str, fits: Sequence[Fit]) -> Table:
    """Table of a checkpoint as stored and after each optimisation, on one GPU.

    Args:
        subject: the checkpoint.
        settings: settings of the server.
        gpu: name of the GPU.
        fits: how the checkpoint fits as stored, then after each optimisation (`fit_on_gpus`).
    """

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


def list_notes(
    subject: Subject, settings: ServerSettings, gpu: Gpu, fits: Sequence[Fit], root: Path
) -> Iterator[str]:
    """Yield, a line each, what else to know about a server on the GPU: memory, format, MTP head and known trouble.

    Args:
        subject: the checkpoint.
        settings: settings of the server.
        gpu: data sheet of the GPU.
        fits: how the checkpoint fits as stored, then after each optimisation (`fit_on_gpus`).
        root: folder of the workspace or checkout.
    """
    fit = fits[0]
    states = f"{fit.state_bytes / _GB:.2f} GB of states and " if fit.state_bytes else ""
    yield (
        f"One sequence: {states}{fit.token_bytes / 1024:.0f} KiB per token, {fit.sequence_bytes / _GB:.2f} GB in all; "
        f"vLLM may use {settings.utilization:.0%} of {gpu.cuda_memory_gib:g} GiB"
        f"{'' if gpu.driver.memory_gib else ' (assumed: 96 % of its memory)'}."
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
    bandwidth = (
        "" if gpu.dense_peak_tflops else f" by bandwidth alone, as no peak FLOP/s of {gpu.name} is known"
    )
    yield f"tok/s: roofline of one sequence with 2,048 cached tokens{bandwidth}{drafts}. Computed, not timed."
    yield f"Dimensions: {subject.source}."
    if subject.namesakes:
        yield f"{subject.name} was taken as {subject.namesakes}."
    if any(each.optimisation == PUBLISHED_EXPERTS for each in fits):
        yield f"No stage packs experts; 4-bit ones are published: {name_published(_name_repository(subject))}."
    if settings.gpus > 1 and "VLLM_TENSOR_PARALLEL_SIZE" not in subject.settings:
        yield f"{settings.gpus} GPUs share a model with VLLM_TENSOR_PARALLEL_SIZE={settings.gpus} in config.env."
    yield from _list_trouble(subject, settings, gpu, root)


def _list_trouble(subject: Subject, settings: ServerSettings, gpu: Gpu, root: Path) -> Iterator[str]:
    """Known trouble, a line each, found in a recorded plan of the variant, else in the facts that settings decide."""
    dtype = str(subject.text.get("dtype", "bfloat16")) if settings.dtype == "auto" else settings.dtype
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
        "attention-backend": "VLLM_ATTENTION_BACKEND",
    }
    flags = {flag: subject.settings[key] for flag, key in lines.items() if key in subject.settings}
    if sizes := flags.get("cudagraph-capture-sizes"):
        flags["cudagraph-capture-sizes"] = json.dumps(sizes.split(","))
    if backend := flags.get("attention-backend"):
        flags["attention-backend"] = json.dumps(backend)
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
    checkpoint = _name_repository(subject).removesuffix("/config.json")
    flags = "qwen3.5-4b-best" if subject.has_mtp else "qwen3.5-4b"
    command = f"slimqwen variant new --name base --checkpoint {checkpoint}"
    return f"Start from a new baseline: `{command}`; flags for a GPU are in experiments/{flags}/config.env"


def _name_repository(subject: Subject) -> str:
    # The `source` of a committed shape begins with the name of its repository.
    return subject.name if "/" in subject.name else re.split("[,: ]", subject.source)[0]


def gpus_table(subject: Subject, settings: ServerSettings, root: Path) -> Table:
    """Table of the checkpoint on many GPUs: as stored, and with the fewest optimisations that make it fit."""
    gpus = _table_gpus(root)
    rows = fit_on_gpus(subject, settings, gpus.values())

    def enough(cell: Callable[[Fit], str]) -> Callable[[str], object]:
        return lambda gpu: next((cell(fit) for fit in rows[gpu] if fit.fits), None)

    columns: dict[str, Callable[[str], object]] = {
        "GPU": lambda gpu: gpu,
        "GiB": lambda gpu: f"{gpus[gpu].cuda_memory_gib:g}",
        "as stored": lambda gpu: _margin(rows[gpu][0]),
        "fits with": enough(lambda fit: fit.optimisation),
        "left, GB": enough(lambda fit: f"{-fit.missing_bytes / _GB:.1f}"),
        "KV tokens": enough(lambda fit: f"{fit.kv_tokens:,}"),
        "sequences": enough(lambda fit: f"{fit.full_sequences:.1f}"),
        "tok/s": enough(lambda fit: f"{fit.tokens_per_second:.0f}"),
        "with drafts": enough(lambda fit: f"{fit.drafted:.0f}" if fit.drafted else "-"),
    }
    requests = f"{settings.sequences} x {settings.context_len:,} tokens"
    note = f"{len(read_gpus(root)) - len(gpus)} more GPUs are known by name, and any by its figures: --gpu."
    return Table.from_rows(
        f"{subject.name} with {requests} on some GPUs", rows, columns, note, text_columns=1
    )


def _table_gpus(root: Path) -> dict[str, Gpu]:
    known = read_gpus(root)
    return {name: known[name] for name in TABLE_GPUS}


def _margin(fit: Fit) -> str:
    missing = fit.missing_bytes / _GB
    if missing <= 0 and not fit.fits:
        return f"{fit.blocks} state blocks for {fit.captured_sequences} sequences"
    return f"fits, {-missing:.1f} GB left" if fit.fits else f"{missing:.1f} GB too much"


def shapes_table(root: Path) -> Table:
    """Roofline of every shape of eval/shapes in 16 bits on `TABLE_GPUS`, with the fewest optimisations that fit."""
    gpus = _table_gpus(root)
    names = sorted(
        file.stem for file in list_files(f"{FOLDER}/*.json", root) if '"config"' in file.read_text()
    )
    cells: dict[str, Mapping[str, str]] = {}
    for name in names:
        subject = find_subject(name, root)
        settings = replace(ServerSettings.of(subject, SHAPES_CONTEXT_LEN, 1), depth=0)
        fits = fit_on_gpus(subject, settings, gpus.values())
        cells[name] = {gpu: _first_that_fits(each) for gpu, each in fits.items()}
    columns: dict[str, Callable[[str], object]] = {
        "GPU": str,
        "GiB": lambda gpu: f"{gpus[gpu].cuda_memory_gib:g}",
    }
    for name in names:
        columns[name] = lambda gpu, name=name: cells[name][gpu]  # type: ignore[misc]
    return Table.from_rows(
        "Tokens per second at the roofline of one sequence, by GPU and shape",
        gpus,
        columns,
        f"Without drafts, of the first form that fits with {SHAPES_CONTEXT_LEN:,} tokens. No mark: as stored in 16 "
        "bits; a: 4-bit MLPs; b: a and 4-bit attention; c: b (of a mixture e) and a 4-bit output head; d: c and a "
        "4-bit MTP head; e: published 4-bit experts, as no stage packs them; f: c or d and an 8-bit "
        "embedding; -: none fits, or only one with a smaller vocabulary. Computed, not timed.",
    )


def _first_that_fits(fits: Sequence[Fit]) -> str:
    known = (fit for fit in fits if fit.optimisation in _MARKS)
    return next((f"{fit.tokens_per_second:.0f}{_MARKS[fit.optimisation]}" for fit in known if fit.fits), "-")
