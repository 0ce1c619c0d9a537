"""The record kind plan: the newest predicted configuration of vLLM for each device of a variant, and their tables."""

from collections.abc import Iterable, Sequence
from importlib.metadata import version
from pathlib import Path
from typing import Any

from packaging.version import Version
from pydantic import Field

from slimqwen.identity import source
from slimqwen.plan import rehearsal, resolution, trouble
from slimqwen.plan.devices import CPU, Gpu, read_gpus
from slimqwen.plan.facts import Plan
from slimqwen.progress import Progress, silent
from slimqwen.records import provenance, store
from slimqwen.records.figures import Figure
from slimqwen.records.record import Record
from slimqwen.records.table import Table
from slimqwen.variant import Variant
from slimqwen.vllm_plugin.patches.table import KNOWN_VERSIONS

_KERNEL_SUFFIX = "LinearKernel"
"""End of the names of vLLM's kernels for quantised linears; tables leave it out."""

_OVERVIEW = (
    "attention",
    "graphs",
    "4-bit kernel",
    "Gated DeltaNet prefill",
    "compiled at first use",
)
"""The facts that the overview of all plans shows."""


class PlanRecord(Record):
    """The plans of one variant on several devices."""

    kind = "plan"
    version = 5
    verb = "plan"
    verb_options = "--record"
    looked_up = True

    plans: tuple[Plan, ...] = Field(min_length=1, description="the newest plan for each device")

    def figures(self) -> dict[str, Figure]:
        """Empty: a plan predicts and measures nothing."""
        return {}

    def tables(self, path: Path) -> list[Table]:
        """The plans side by side."""
        return [plan_table(self.variant, self.plans)]


def make_plans(variant: Variant, gpus: Sequence[Gpu | None], *, progress: Progress = silent) -> list[Plan]:
    """Plan a variant on simulated GPUs, or on this machine's CPU.

    If vLLM refuses the variant on a GPU, the plan for that GPU has vLLM's reason as its `error`.

    Args:
        gpus: the GPUs to simulate; None in the sequence stands for this machine's CPU.
        progress: receives (activity, devices done, number of devices).

    Returns:
        A plan for each device, in their order.

    Raises:
        RehearsalError: the process that plans ended without an answer, for instance because the installed torch is
            built for the other kind of device.
    """
    devices = {gpu.name if gpu else CPU: gpu for gpu in gpus}
    plans: list[Plan] = []
    for name, gpu in devices.items():
        progress(f"plan of {variant.name} on {name}", len(plans), len(devices))
        log = variant.root / "logs" / f"plan-{variant.name}-{name}.log"
        plans.append(rehearsal.rehearse_variant(variant, gpu, log=log))
    return plans


def write_plans(variant: Variant, plans: Sequence[Plan], *, command: Sequence[str], started: str) -> Path:
    """Write a record of new plans of a variant; plans for other devices are copied from the last record.

    Args:
        plans: the new plans; each replaces the last record's plan for the same device.
        command: command line that the record states as its origin.
        started: `provenance.utc_now()` before the plans were made.

    Returns:
        File of the record, in the variant's folder.
    """
    by_gpu = {plan.gpu: plan for plan in (*list_recorded_plans(variant.root, variant.name), *plans)}
    record = PlanRecord(
        variant=variant.name,
        plans=tuple(by_gpu[gpu] for gpu in sorted(by_gpu)),
        provenance=provenance.circumstances(variant.root, command, started),
    )
    return store.write_record(variant.folder, record)


def list_recorded_plans(root: Path, variant: str) -> Sequence[Plan]:
    """The plans in the newest record of a variant; empty without a record."""
    for path in store.records(root / "experiments" / variant, PlanRecord):
        return store.read_record(path, PlanRecord).plans
    return ()


def find_gpu_plan(root: Path, variant: str, gpu: str) -> Plan | None:
    """The recorded plan of a variant on a GPU; None if there is none, or only one by another version of vLLM."""
    for plan in list_recorded_plans(root, variant):
        if plan.gpu == gpu and is_current(plan):
            return plan
    return None


def is_current(plan: Plan) -> bool:
    """Whether a plan was made by the version of vLLM that would serve on its device (`vllm_on`)."""
    return Version(plan.vllm).public == vllm_on(plan.gpu)


def vllm_on(gpu: str) -> str:
    """Version of vLLM that would serve on a device.

    It is the installed version. For a GPU on a host with a CPU build it is the newest known version for CUDA.
    """
    if gpu != CPU and source.platform() == "cpu":
        return KNOWN_VERSIONS["cuda"][-1]
    return Version(version("vllm")).public


def overview_table(root: Path) -> Table:
    """The recorded plans of every shipped variant; variants and GPUs with equal facts share a row."""
    known = trouble.read_known_trouble(root)
    order = {gpu: number for number, gpu in enumerate(read_gpus(root))}
    plans = [
        plan
        for name in provenance.shipped_variants(root)
        for plan in sorted(list_recorded_plans(root, name), key=lambda plan: order.get(plan.gpu, len(order)))
        if plan.gpu != CPU and is_current(plan)
    ]
    gpus: dict[tuple[str, ...], list[str]] = {}  # (variant, facts) -> GPUs
    for plan in plans:
        gpus.setdefault((plan.variant, *_overview_cells(plan, known)), []).append(plan.gpu)
    variants: dict[tuple[str, ...], list[str]] = {}  # (GPUs, facts) -> variants
    for (name, *cells), on in gpus.items():
        variants.setdefault((", ".join(on), *cells), []).append(name)
    rows = tuple((", ".join(same), *cells) for cells, same in variants.items())
    columns = ("variants", "GPUs", *_OVERVIEW, "dies", "costs")
    return Table("Plans", columns, rows, _notes(plans), text_columns=len(columns))


def _overview_cells(plan: Plan, known: Sequence[trouble.KnownTrouble]) -> tuple[str, ...]:
    facts, entries = list_facts(plan), trouble.match_trouble(plan, known)
    effects = (
        _words(entry.name for entry in entries if entry.effect in shown)
        for shown in (("dies", "differs"), ("costs",))
    )
    return *(facts[name] for name in _OVERVIEW), *(effect or "-" for effect in effects)


def plan_table(variant: str, plans: Sequence[Plan]) -> Table:
    """Table of a variant's plans, with a column for each device."""
    facts = [list_facts(plan) for plan in plans]
    rows = tuple((name, *(column[name] for column in facts)) for name in facts[0])
    columns = ("fact", *(plan.gpu for plan in plans))
    return Table(f"Plan of {variant}", columns, rows, _notes(plans), text_columns=len(columns))


def trouble_table(plans: Sequence[Plan], known: Sequence[trouble.KnownTrouble]) -> Table:
    """The known trouble of plans, and what to do instead; GPUs with the same trouble share a row."""
    gpus: dict[tuple[str, ...], list[str]] = {}
    for plan in plans:
        for entry in trouble.match_trouble(plan, known):
            gpus.setdefault((entry.effect, entry.description, entry.instead), []).append(plan.gpu)
    rows = tuple((", ".join(on), *cells) for cells, on in gpus.items())
    return Table("Known trouble", ("GPUs", "effect", "what happens", "instead"), rows, text_columns=4)


def list_facts(plan: Plan) -> dict[str, str]:
    """The facts of a plan as text, by name, such as KV cache and graphs; "-" for one that the plan did not reach."""
    engine, cache, graphs = plan.engine, plan.kv_cache, plan.graphs
    values: dict[str, Any] = {
        "attention": _words(layers.backend for layers in plan.attention if not layers.prefill),
        "attention of drafts": _words(layers.backend for layers in plan.attention if layers.drafts),
        "Gated DeltaNet prefill": _words(layers.prefill for layers in plan.attention if layers.prefill),
        "4-bit kernel": _words(
            group.kernel.removesuffix(_KERNEL_SUFFIX)
            for group in plan.linears
            if group.kernel.endswith(_KERNEL_SUFFIX)
        ),
        "graphs": graphs and graphs.mode,
        "tokens of full graphs": graphs and _sizes(graphs.captured.get("FULL", [])),
        "tokens of a verify step": graphs and graphs.decode_query_len,
        "dtype": engine and engine.dtype,
        "KV dtype": engine and engine.kv_cache_dtype,
        "state dtype": engine and engine.state_dtype,
        "block size": cache and cache.block_size,
        "shortest prompt with a prefix hit": cache and cache.shortest_prompt_with_hit,
        "KV tokens": cache and f"{cache.tokens:,}",
        "sequences at full context": cache and f"{cache.sequences_at_max_model_len:.1f}",
        "weights, GB": plan.weight_bytes and f"{sum(plan.weight_bytes.values()) / 1e9:.2f}",
        "compiled at first use": _words(module.module for module in plan.jit),
        "error": plan.error and f"{plan.failed_at}: {plan.error}",
    }
    return {name: str(value) if value else "-" for name, value in values.items()}


def _notes(plans: Sequence[Plan]) -> tuple[str, ...]:
    """Notes for tables: the versions of vLLM and the assumptions of the plans."""
    versions = " and ".join(sorted({plan.vllm for plan in plans}))
    note = f"vLLM {versions} by its own code, without loading weights."
    if any(plan.gpu != CPU for plan in plans):
        note += f" Simulated GPUs; {resolution.OVERHEAD_GIB:g} GiB assumed for activations, CUDA context and graphs."
    return (note,)


def _words(names: Iterable[str]) -> str:
    return ", ".join(sorted(set(names)))


def _sizes(tokens: Sequence[int]) -> str:
    if len(tokens) <= 8:
        return " ".join(map(str, tokens))
    return f"{tokens[0]} … {tokens[-1]} ({len(tokens)} sizes)"
