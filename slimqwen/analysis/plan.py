"""Plans of a variant on GPUs, as a record: the predicted configuration of vLLM, and the known trouble."""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from importlib.metadata import version
from pathlib import Path
from typing import Any, Literal

from packaging.version import Version
from pydantic import Field

from slimqwen.analysis import plan_kernels
from slimqwen.errors import SlimqwenError
from slimqwen.plan import gpu_model, rehearsal, trouble
from slimqwen.plan.facts import Plan, TritonKernels
from slimqwen.progress import Progress, silent
from slimqwen.records import provenance, store
from slimqwen.records.record import Block, Figure, Record
from slimqwen.records.table import Table
from slimqwen.variant import Variant, names

DEFAULT_GPUS = ("a10g", "rtx-3090", "l4", "h100", "b200", "rtx-5090")
CPU = "cpu"

_OVERVIEW = (
    "attention",
    "graphs",
    "tokens of full graphs",
    "4-bit kernel",
    "Gated DeltaNet prefill",
    "block size",
    "shortest prompt with a prefix hit",
    "sequences at full context",
    "compiled at first use",
)
"""Facts of the overview of all plans."""

_KERNEL_SUFFIX = "LinearKernel"
"""Ending of the names of vLLM's quantised kernels, which tables leave out."""


class MissingPlanError(SlimqwenError):
    """No plan of a variant on a GPU has been recorded."""


class PlanTrouble(Block):
    """Known trouble of a variant on one GPU."""

    gpu: str
    name: str
    effect: Literal["dies", "costs"]
    description: str
    instead: str


class PlanRecord(Record):
    """What one variant will be on each of several devices."""

    kind = "plan"
    verb = "plan"
    looked_up = True

    plans: tuple[Plan, ...] = Field(min_length=1)
    trouble: tuple[PlanTrouble, ...]
    toolkit_hidden: bool = Field(description="Whether nvcc and ninja of the planning host were left out.")

    def figures(self) -> Mapping[str, Figure]:
        """Block size, KV tokens and weights by GPU."""
        figures: dict[str, Figure] = {}
        for plan in self.plans:
            figures[f"{plan.gpu}/weight_bytes"] = Figure(sum(plan.weight_bytes.values()), "bytes")
            if plan.kv_cache is not None:
                figures[f"{plan.gpu}/kv_tokens"] = Figure(plan.kv_cache.tokens, "tokens")
                figures[f"{plan.gpu}/block_size"] = Figure(plan.kv_cache.block_size, "tokens")
        return figures

    def tables(self, path: Path) -> list[Table]:
        """The devices side by side, and the trouble on each."""
        columns = ("fact", *(plan.gpu for plan in self.plans))
        facts = [shown_facts(plan) for plan in self.plans]
        rows = tuple((name, *(column[name] for column in facts)) for name in facts[0])
        tables = [
            Table(f"Plan of {self.variant}", columns, rows, _notes(self.plans), text_columns=len(columns))
        ]
        kernels = plan_kernels.kernels_table(self.plans)
        if kernels is not None:
            tables.append(kernels)
        if self.trouble:
            entries = tuple(
                (entry.gpu, entry.effect, entry.description, entry.instead) for entry in self.trouble
            )
            headings = ("GPU", "effect", "what happens", "instead")
            tables.append(Table("Known trouble", headings, entries, text_columns=len(headings)))
        return tables


def make(
    variants: Sequence[Variant],
    gpus: Sequence[str],
    *,
    command: Sequence[str],
    hide_toolkit: bool,
    log_folder: Path,
    kernels: bool = False,
    progress: Progress = silent,
) -> list[PlanRecord]:
    """Plan variants on GPUs that are simulated, or on this machine's CPU.

    Args:
        variants: of one repository.
        gpus: short names of GPU models, or `CPU` alone.
        command: the verb and its arguments, for the record.
        hide_toolkit: whether to plan for a host without nvcc and ninja.
        log_folder: folder for the output of vLLM, one file per GPU.
        kernels: whether to compile the Triton kernels that simulated GPUs would run.
        progress: receives (activity, variants done, variants).

    Returns:
        One record a variant, not yet written.

    Raises:
        GpuModelError: a GPU that is not listed.
        RehearsalError: this environment cannot simulate a GPU.
    """
    root = variants[0].root
    known = trouble.read(root)
    started = provenance.utc_now()
    by_variant: dict[str, list[Plan]] = {variant.name: [] for variant in variants}
    models = {name: None if name == CPU else gpu_model.load(root, name) for name in gpus}
    for name, model in models.items():
        plans = rehearsal.run(
            root,
            list(by_variant),
            name,
            model,
            log=log_folder / f"plan-{name}.log",
            toolkit=not hide_toolkit,
            kernels=kernels,
            progress=progress,
        )
        for plan in plans:
            by_variant[plan.variant].append(plan)
    return [
        PlanRecord(
            variant=name,
            plans=tuple(plans),
            trouble=tuple(
                PlanTrouble(gpu=plan.gpu, **entry.model_dump(exclude={"vllm", "when", "evidence"}))
                for plan in plans
                for entry in trouble.matches(plan, known)
            ),
            toolkit_hidden=hide_toolkit,
            provenance=provenance.circumstances(root, command, started),
        )
        for name, plans in by_variant.items()
    ]


def recorded_plans(root: Path, variant: str) -> Iterator[Plan]:
    """Every recorded plan of a variant, the newest record first."""
    for path in store.results(root, PlanRecord, variant):
        yield from store.read(path, PlanRecord).plans


def newest_plan(
    root: Path, variant: str, gpu: str, *, toolkit: bool = False, kernels: bool = False
) -> Plan | None:
    """The newest recorded plan of a variant on a GPU by the installed version of vLLM; None if there is none.

    Args:
        gpu: short name of the GPU model.
        toolkit: whether the plan is for a host with nvcc and ninja.
        kernels: whether the plan must have compiled Triton kernels.
    """
    fitting = (
        plan
        for plan in recorded_plans(root, variant)
        if plan.gpu == gpu
        and has_toolkit(plan) == toolkit
        and is_of_installed_vllm(plan)
        and not (kernels and plan.kernels is None)
    )
    return next(fitting, None)


def is_of_installed_vllm(plan: Plan) -> bool:
    """Whether a plan is by the installed version: its CPU build plans the same for a GPU as its CUDA build."""
    return Version(plan.vllm).public == Version(version("vllm")).public


def _newest_plans(root: Path, *, kernels: bool = False) -> list[Plan]:
    """The newest plan of every variant on each of `DEFAULT_GPUS`, where there is one."""
    plans = (newest_plan(root, name, gpu, kernels=kernels) for name in names(root) for gpu in DEFAULT_GPUS)
    return [plan for plan in plans if plan is not None]


def overview_table(root: Path) -> Table:
    """Plans of every GPU variant on each of `DEFAULT_GPUS`, from the newest records."""
    known = trouble.read(root)
    plans = _newest_plans(root)
    rows = []
    for plan in plans:
        facts = shown_facts(plan)
        entries = trouble.matches(plan, known)
        effects = (
            ", ".join(entry.name for entry in entries if entry.effect == effect) or "-"
            for effect in ("dies", "costs")
        )
        rows.append((plan.variant, plan.gpu, *(facts[name] for name in _OVERVIEW), *effects))
    columns = ("variant", "GPU", *_OVERVIEW, "dies", "costs")
    return Table("Plans", columns, tuple(rows), _notes(plans), text_columns=len(columns))


def kernels_overview(root: Path) -> Table:
    """The Triton kernels of every GPU variant on each of `DEFAULT_GPUS`, from the newest records that have them."""
    return plan_kernels.summary_table(_newest_plans(root, kernels=True))


def has_toolkit(plan: Plan) -> bool:
    """Whether a plan is for a host with nvcc and ninja."""
    return plan.toolkit is not None and plan.toolkit.nvcc and plan.toolkit.ninja


def _notes(plans: Sequence[Plan]) -> tuple[str, ...]:
    """The versions of vLLM, the assumptions and the host of the plans."""
    from slimqwen.plan import resolution

    versions = " and ".join(sorted({plan.vllm for plan in plans}))
    notes = [f"vLLM {versions} by its own code, without loading weights."]
    if any(plan.simulated for plan in plans):
        notes.append(
            f"Simulated GPUs; {resolution.OVERHEAD_GIB:g} GiB assumed for activations, CUDA context and graphs."
        )
    hosts = {has_toolkit(plan) for plan in plans if plan.toolkit is not None}
    if len(hosts) == 1:
        notes.append(f"A host {'with' if hosts.pop() else 'without'} nvcc and ninja.")
    return (" ".join(notes),)


def shown_facts(plan: Plan) -> dict[str, str]:
    """The facts of a plan as text, by name; a dash for an unresolved fact."""
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
        "compiled at first use": _words(module.module for module in plan.jit if not module.baked),
        "compiled ahead": _words(module.module for module in plan.jit if module.baked),
        "Triton kernels": plan.kernels and _compiled(plan.kernels),
        "hosts looked up": _words(plan.outbound_hosts),
        "error": plan.error and f"{plan.failed_at}: {plan.error}",
    }
    return {name: str(value) if value else "-" for name, value in values.items()}


def _compiled(kernels: TritonKernels) -> str:
    lost = sum(bool(kernel.lost) for kernel in kernels.kernels)
    blocked = sum(not kernel.runs for kernel in kernels.kernels)
    summary = f"{len(kernels.kernels)} for {kernels.target}, {lost} lose choices, {blocked} cannot run"
    if kernels.compiled_at_start is None:
        return summary
    return f"{summary}, a first start compiles {kernels.compiled_at_start or 'none'}"


def _words(names: Iterable[str]) -> str:
    return ", ".join(sorted(set(names)))


def _sizes(tokens: Sequence[int]) -> str:
    if len(tokens) <= 8:
        return " ".join(map(str, tokens))
    return f"{tokens[0]} … {tokens[-1]} ({len(tokens)} sizes)"
