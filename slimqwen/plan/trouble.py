"""Known trouble: faults of vLLM listed in eval/known_trouble.yaml, with conditions on the facts and flags of a plan."""

import json
import re
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import Any, Literal

from packaging.specifiers import InvalidSpecifier, SpecifierSet
from packaging.version import Version
from pydantic import BaseModel, ConfigDict, Field, field_validator

from slimqwen.plan.facts import Plan
from slimqwen.records.settings import read_settings
from slimqwen.workspace import locate

FILE = Path("eval") / "known_trouble.yaml"
"""Relative to the repository."""

Value = str | bool | int | float
_COMPARISON = re.compile(r"(<=|>=|<|>)\s*(-?[\d.]+)")
_PATTERN = "~"
_FLAG = "--"


class KnownTrouble(BaseModel):
    """One entry of eval/known_trouble.yaml: a fault of vLLM, when it occurs, its effect and what to do instead."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    name: str
    vllm: str = Field(description="versions of vLLM that have the trouble, such as >=0.28,<0.34")
    when: dict[str, Value | list[Value]] = Field(
        description="conditions on `FACTS` and on vLLM's flags, such as --kv-cache-dtype, all of which must hold"
    )
    effect: Literal["dies", "differs", "costs", "mended"] = Field(
        description="dies: the server ends or responds with errors; differs: it gives other tokens; "
        "costs: it serves, slower or with less; mended: it dies or differs without this project's patch of vLLM"
    )
    description: str
    instead: str = Field(description="what to write into config.env, or to do")
    evidence: str

    @field_validator("vllm")
    @classmethod
    def _is_specifier(cls, value: str) -> str:
        try:
            SpecifierSet(value)
        except InvalidSpecifier as error:
            raise ValueError(f"not a version range: {error}") from None
        return value

    @field_validator("when")
    @classmethod
    def _names_facts(cls, value: dict[str, Any]) -> dict[str, Any]:
        known = f"name some of {', '.join(sorted(FACTS))}"
        if not value:
            raise ValueError(f"no condition; {known}")
        unknown = sorted(name for name in value if name not in FACTS and not name.startswith(_FLAG))
        if unknown:
            raise ValueError(f"unknown facts {', '.join(unknown)}; {known}")
        return value

    def applies_to(self, plan: Plan) -> bool:
        """Whether every condition holds for a plan."""
        version = Version(plan.vllm)
        if not SpecifierSet(self.vllm).contains(version.base_version, prereleases=True):
            return False
        return meets(plan, self.when)

    @property
    def prevents_start(self) -> bool:
        """Whether this trouble, where it applies, prevents a start of the server."""
        return self.effect in ("dies", "differs")


def meets(plan: Plan, when: Mapping[str, Value | list[Value]]) -> bool:
    """Whether all conditions hold for a plan.

    Args:
        when: name of a fact in `FACTS`, or of a flag of vLLM -> the value that it must have, or several of which one.
    """
    return all(_holds(_fact(plan, name), condition) for name, condition in when.items())


def _fact(plan: Plan, name: str) -> Any:
    if name.startswith(_FLAG):
        return json.loads(plan.flags.get(name.removeprefix(_FLAG), "null"))
    return FACTS[name](plan)


def _field(group: str, name: str) -> Callable[[Plan], Any]:
    def fact(plan: Plan) -> Any:
        values = getattr(plan, group)
        return None if values is None else getattr(values, name)

    return fact


def _engine_field(name: str, flag: str) -> Callable[[Plan], Any]:
    """A fact of the engine; where vLLM made none, as in a start without a plan, the flag that decides it."""

    def fact(plan: Plan) -> Any:
        return getattr(plan.engine, name) if plan.engine is not None else _fact(plan, f"--{flag}")

    return fact


def _prefills(plan: Plan) -> list[str]:
    return [layers.prefill for layers in plan.attention if layers.prefill]


def _full_decode_graphs(plan: Plan) -> bool | None:
    """Whether a full graph covers a verify step of --max-num-seqs sequences; None if the plan lacks the facts."""
    if plan.graphs is None or plan.engine is None:
        return None
    largest = (1 + plan.engine.num_speculative_tokens) * plan.engine.max_num_seqs
    return max(plan.graphs.captured.get("FULL", []), default=0) >= largest


def _misaligned_graph_sizes(plan: Plan) -> bool | None:
    """Whether a capture size of config.env is no multiple of the tokens per sequence of a verify step (K + 1)."""
    if plan.engine is None:
        return None
    sizes = json.loads(plan.flags.get("cudagraph-capture-sizes", "null")) or []
    depths = [depth for _, _, depth in _depth_schedule(plan)] or [plan.engine.num_speculative_tokens]
    return any(all(int(size) % (1 + depth) for depth in depths) for size in sizes)


def _depth_schedule(plan: Plan) -> list[tuple[int, int, int]]:
    """The (first, last, K) of each range of batch sizes with a K of its own; empty if K is fixed."""
    speculation = json.loads(plan.flags.get("speculative-config", "null")) or {}
    ranges: list[tuple[int, int, int]] = speculation.get("num_speculative_tokens_per_batch_size") or []
    return ranges


def _speculative_method(plan: Plan) -> str | None:
    """How drafts are made; None without drafts. Each kind of MTP head (qwen3_5_mtp) is `mtp`, as vLLM has it."""
    speculation = json.loads(plan.flags.get("speculative-config", "null")) or {}
    method = str(speculation.get("method", "")) or None
    return "mtp" if method and "mtp" in method else method


FACTS: Mapping[str, Callable[[Plan], Any]] = MappingProxyType(
    {
        "gpu": lambda plan: plan.gpu,
        "compute_capability": lambda plan: plan.compute_capability and float(plan.compute_capability),
        "dtype": _engine_field("dtype", "dtype"),
        "kv_cache_dtype": _engine_field("kv_cache_dtype", "kv-cache-dtype"),
        "model_runner": _field("engine", "model_runner"),
        "state_dtype": _field("engine", "state_dtype"),
        "num_speculative_tokens": _field("engine", "num_speculative_tokens"),
        "speculative_method": _speculative_method,
        "prefix_caching": _field("engine", "prefix_caching"),
        "max_num_seqs": _field("engine", "max_num_seqs"),
        "attention_backends": lambda plan: [layers.backend for layers in plan.attention],
        "linear_attention": lambda plan: bool(_prefills(plan)),
        "gdn_prefill": _prefills,
        "linear_kernels": lambda plan: [group.kernel for group in plan.linears],
        "graph_mode": _field("graphs", "mode"),
        "full_decode_graphs": _full_decode_graphs,
        "misaligned_graph_sizes": _misaligned_graph_sizes,
        "draft_depth_by_load": lambda plan: bool(_depth_schedule(plan)),
        "block_size": _field("kv_cache", "block_size"),
        "shortest_prompt_with_hit": _field("kv_cache", "shortest_prompt_with_hit"),
        "sequences_at_max_model_len": _field("kv_cache", "sequences_at_max_model_len"),
        "blocked_modules": lambda plan: [module.module for module in plan.jit if not module.possible],
        "failed_at": lambda plan: plan.failed_at,
        "error": lambda plan: plan.error,
    }
)
"""The facts that a condition may name -> value in a plan: None if the plan has none, a list if it has several."""


def _holds(fact: Any, condition: Any) -> bool:
    """Whether a fact meets a condition: a value, a list of values, a comparison, or ~ and a regular expression."""
    if isinstance(fact, list):
        return any(_holds(value, condition) for value in fact)
    if isinstance(condition, list):
        return any(_holds(fact, value) for value in condition)
    if isinstance(condition, str) and condition.startswith(_PATTERN):
        return isinstance(fact, str) and re.search(condition.removeprefix(_PATTERN), fact) is not None
    comparison = _COMPARISON.fullmatch(condition) if isinstance(condition, str) else None
    if comparison is None:
        return bool(fact == condition)
    if fact is None:
        return False
    limit = float(comparison[2])
    return bool(
        {"<": fact < limit, "<=": fact <= limit, ">": fact > limit, ">=": fact >= limit}[comparison[1]]
    )


def read_known_trouble(root: Path) -> list[KnownTrouble]:
    """Read eval/known_trouble.yaml.

    Raises:
        SettingsError: the file is missing or breaks the schema.
    """
    text = read_settings(locate(FILE, root), root)
    return text.validate(list[KnownTrouble], text.content)


def match_trouble(plan: Plan, known: Sequence[KnownTrouble]) -> list[KnownTrouble]:
    """The known trouble whose conditions hold for a plan; trouble that prevents a start comes first."""
    return sorted(
        (trouble for trouble in known if trouble.applies_to(plan)),
        key=lambda trouble: not trouble.prevents_start,
    )
