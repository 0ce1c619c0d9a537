"""The Triton kernels of plans, as tables."""

from collections.abc import Sequence

from slimqwen.plan.facts import Plan, TritonKernel
from slimqwen.records.table import Table


def kernels_table(plans: Sequence[Plan]) -> Table | None:
    """Every kernel of one plan; of several plans only kernels that lose choices or spill; None if none was compiled."""
    compiled = [(plan, plan.kernels) for plan in plans if plan.kernels is not None]
    if not compiled:
        return None
    rows = [
        (plan.gpu, kernel)
        for plan, kernels in compiled
        for kernel in kernels.kernels
        if len(compiled) == 1 or kernel.lost or kernel.spilled_bytes
    ]
    columns = ("GPU", "kernel", "cannot run", "compiled", "shared, KiB", "registers", "spilled, bytes")
    cells = tuple(
        (
            gpu,
            _name(kernel),
            lost_choices(kernel) or "-",
            str(kernel.compiled),
            f"{kernel.shared_bytes / 1024:.1f}",
            str(kernel.registers),
            str(kernel.spilled_bytes),
        )
        for gpu, kernel in rows
    )
    notes = [
        f"{plan.gpu} ({kernels.target}): {len(kernels.kernels)} kernels in "
        f"{sum(kernel.compiled for kernel in kernels.kernels)} forms; not compiled: {'; '.join(kernels.left_out)}."
        for plan, kernels in compiled
    ]
    return Table("Triton kernels", columns, cells, tuple(notes), text_columns=3)


def summary_table(plans: Sequence[Plan]) -> Table:
    """The plans side by side: how many kernels were compiled, and which of them lose choices."""
    compiled = [(plan, plan.kernels) for plan in plans if plan.kernels is not None]
    columns = ("variant", "GPU", "target", "loses choices", "cannot run", "kernels", "compiled forms")
    rows = tuple(
        (
            plan.variant,
            plan.gpu,
            kernels.target,
            ", ".join(
                f"{_name(kernel)}: {lost_choices(kernel)}"
                for kernel in kernels.kernels
                if kernel.lost and kernel.runs
            )
            or "-",
            ", ".join(_name(kernel) for kernel in kernels.kernels if not kernel.runs) or "-",
            str(len(kernels.kernels)),
            str(sum(kernel.compiled for kernel in kernels.kernels)),
        )
        for plan, kernels in compiled
    )
    left_out = list(dict.fromkeys(line for _, kernels in compiled for line in kernels.left_out))
    notes = (f"Not compiled: {'; '.join(left_out)}.",) if left_out else ()
    return Table("Triton kernels", columns, rows, notes, text_columns=5)


def lost_choices(kernel: TritonKernel) -> str:
    """Number of forms of a kernel that a GPU cannot run, with the reasons; empty if it runs all."""
    if not kernel.lost:
        return ""
    reasons = ", ".join(dict.fromkeys(lost.reason for lost in kernel.lost))
    return f"{len(kernel.lost)} of {kernel.compiled} ({reasons})"


def _name(kernel: TritonKernel) -> str:
    return kernel.kernel.rpartition(".")[2]
