"""Differences between two plans: of one variant by two vLLM versions, or on two GPUs."""

import json
from collections.abc import Mapping
from typing import Any

from slimqwen.analysis import plan_kernels
from slimqwen.analysis.plan import PlanRecord
from slimqwen.errors import SlimqwenError
from slimqwen.plan.facts import Plan
from slimqwen.records.table import Table

_ABSENT = "-"


class NoPlanPairError(SlimqwenError):
    """Two records without plans to compare."""


def pairs(first: PlanRecord, second: PlanRecord, gpus: tuple[str, str] | None) -> list[tuple[Plan, Plan]]:
    """Plans of two records to compare.

    Args:
        gpus: GPU models of the first and the second record, which may be one record; None takes every GPU that both
            have, or the only plan of each.

    Raises:
        NoPlanPairError: there is no such pair.
    """
    plans, others = ({plan.gpu: plan for plan in record.plans} for record in (first, second))
    if gpus is not None:
        if gpus[0] in plans and gpus[1] in others:
            return [(plans[gpus[0]], others[gpus[1]])]
    elif shared := [gpu for gpu in plans if gpu in others]:
        return [(plans[gpu], others[gpu]) for gpu in shared]
    elif len(plans) == len(others) == 1:
        return [(first.plans[0], second.plans[0])]
    raise NoPlanPairError(
        f"no plans to compare: the first record has {', '.join(plans)}, the second {', '.join(others)}; "
        "name a GPU of each with --gpu"
    )


def changes_table(first: Plan, second: Plan) -> Table:
    """The facts that differ between two plans, and the warnings that only one of them has."""
    facts, others = _flat(first), _flat(second)
    sides = {name: (facts.get(name, _ABSENT), others.get(name, _ABSENT)) for name in facts | others}
    rows = [(name, old, new) for name, (old, new) in sides.items() if old != new]
    unchanged = len(sides) - len(rows)
    rows += [("warning", line, _ABSENT) for line in first.warnings if line not in second.warnings]
    rows += [("warning", _ABSENT, line) for line in second.warnings if line not in first.warnings]
    columns = ("fact", *(f"{plan.variant} on {plan.gpu}, vLLM {plan.vllm}" for plan in (first, second)))
    return Table("What changes", columns, tuple(rows), (f"{unchanged} facts are the same.",), text_columns=3)


def _flat(plan: Plan) -> dict[str, str]:
    """The facts by dotted name, such as engine.dtype; layers, kernels and compiled modules by their names."""
    fields = plan.model_dump(mode="json", exclude={"variant", "gpu", "vllm", "warnings"})
    fields["attention"] = {
        f"{'draft ' if layers.drafts else ''}{layers.layer}": layers.model_dump(exclude={"layer", "drafts"})
        for layers in plan.attention
    }
    fields["linears"] = {layer: group.kernel for group in plan.linears for layer in group.layers}
    fields["jit"] = {module.module: module.possible for module in plan.jit}
    if plan.kernels is not None:
        fields["kernels"] = {
            kernel.kernel: plan_kernels.lost_choices(kernel) or "runs" for kernel in plan.kernels.kernels
        }
    return dict(_leaves("", fields))


def _leaves(prefix: str, value: Any) -> list[tuple[str, str]]:
    if isinstance(value, Mapping):
        return [
            leaf
            for name, part in value.items()
            for leaf in _leaves(f"{prefix}.{name}" if prefix else str(name), part)
        ]
    text = value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)
    return [] if value in (None, [], "") else [(prefix, text)]
