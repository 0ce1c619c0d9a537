"""Chooses the width of each linear within a budget of stored bits a weight (parameter `bits` of `calibrate`)."""

import re
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import product
from pathlib import Path

from slimqwen.checkpoint.packing import IN_LAYER, stored_bytes
from slimqwen.checkpoint.tensors import TensorInfo
from slimqwen.formats.compressed_tensors import PackedIntegers
from slimqwen.progress import Progress
from slimqwen.recipe.stage import Facts, StageError

FUSED = (
    ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"),
    ("linear_attn.in_proj_qkv", "linear_attn.in_proj_z"),
    ("mlp.gate_proj", "mlp.up_proj"),
)
"""Linears of a layer that vLLM computes as one, which therefore have one width (`packed_modules_mapping`)."""

WIDTHS = tuple(product(range(2, 9), (True, False)))
"""Bits, and whether there are no zero points, of the forms to choose from."""

DRAWS = 2
"""Drawings of all next tokens by which a width's cost is estimated."""


@dataclass(frozen=True)
class Allocation:
    """The chosen layout (bits, groups) of each unit; a unit is the linears of a layer that vLLM computes as one.

    Attributes:
        chosen: (layer, names of its modules) -> layout.
        stored_bits: bits a weight, with scales and zero points.
        predicted_kl_nats: estimated divergence of all units together, rounded to nearest, nats a token.
    """

    chosen: Mapping[tuple[int, tuple[str, ...]], PackedIntegers]
    stored_bits: float
    predicted_kl_nats: float

    @property
    def targets(self) -> list[tuple[PackedIntegers, list[str]]]:
        """Each chosen layout, with the patterns that match the names of its linears (compressed-tensors' `targets`)."""
        targets: dict[PackedIntegers, list[str]] = defaultdict(list)
        for (layer, modules), form in self.chosen.items():
            names = "|".join(map(re.escape, modules))
            targets[form].append(rf"re:^(?!mtp\.).*layers\.{layer}\.({names})$")
        return list(targets.items())

    @property
    def facts(self) -> Facts:
        """Facts for the manifest: bits of each module by layer (0: the layer lacks it), stored bits, and estimate."""
        count = 1 + max(layer for layer, _ in self.chosen)
        widths: dict[str, list[int]] = {}
        for (layer, modules), form in self.chosen.items():
            for module in modules:
                widths.setdefault(f"bits of {module}", [0] * count)[layer] = form.bits
        sums = {"stored_bits": self.stored_bits, "predicted_kl_nats": self.predicted_kl_nats}
        return {**sums, **widths}


def allocate_widths(
    source: Path,
    linears: Mapping[str, TensorInfo],
    budget: float,
    group_size: int,
    texts: Sequence[Sequence[int]],
    progress: Progress,
) -> Allocation:
    """Choose the layouts of linears within a budget so that the estimated divergence is least.

    Args:
        source: checkpoint that is not quantised.
        linears: name of a weight -> its tensor.
        budget: stored bits a weight, scales and zero points included.
        group_size: number of neighbouring weights of a row that share a scale.
        texts: token ids of texts of equal length, on which the costs are estimated.

    Raises:
        StageError: even the narrowest layouts exceed the budget.
    """
    from slimqwen.models.sensitivity import measure_costs

    units: dict[tuple[int, tuple[str, ...]], list[TensorInfo]] = defaultdict(list)
    for name, info in linears.items():
        if match := IN_LAYER.fullmatch(name):
            module = match[2]
            units[int(match[1]), next((row for row in FUSED if module in row), (module,))].append(info)
    paths = {unit: [f"model.layers.{unit[0]}.{module}" for module in unit[1]] for unit in units}
    # Zero points of 32 rows fill whole words at every width, which vLLM needs of each linear that it fuses.
    forms = {
        unit: [
            PackedIntegers(bits, group_size, symmetric)
            for bits, symmetric in WIDTHS
            if symmetric or all(info.shape[0] % 32 == 0 for info in infos)
        ]
        for unit, infos in units.items()
    }
    measured = measure_costs(source, paths, forms, texts, DRAWS, progress)
    costs = [measured[unit] for unit in units]
    bits = [
        [8 * sum(stored_bytes(form, *info.shape) for info in infos) for form in forms[unit]]
        for unit, infos in units.items()
    ]
    weights = sum(info.elements for infos in units.values() for info in infos)
    if (least := sum(map(min, bits)) / weights) > budget:
        raise StageError(
            f"bits {budget:g} is too low: the fewest possible are {least:.2f} stored bits a weight; raise bits above "
            "that"
        )
    places = choose_widths(costs, bits, budget * weights)
    return Allocation(
        {unit: forms[unit][place] for unit, place in zip(units, places, strict=True)},
        sum(row[place] for row, place in zip(bits, places, strict=True)) / weights,
        sum(row[place] for row, place in zip(costs, places, strict=True)),
    )


def choose_widths(costs: Sequence[Sequence[float]], bits: Sequence[Sequence[int]], limit: float) -> list[int]:
    """Choose one option for each unit so that the bits are at most `limit` together and the cost is least.

    The caller makes sure that the options of fewest bits fit the limit.

    Args:
        costs: for each unit, the cost of each option.
        bits: for each unit, the bits of each option.

    Returns:
        The index of the chosen option of each unit.
    """
    import numpy as np
    from scipy.optimize import Bounds, LinearConstraint, milp

    owners = np.repeat(np.arange(len(costs)), [len(row) for row in costs])
    flat, sizes = np.concatenate([np.asarray(row, float) for row in costs]), np.concatenate(bits)
    one_each = (owners == np.arange(len(costs))[:, None]).astype(float)
    found = milp(
        flat / flat.max(),
        integrality=1,
        bounds=Bounds(0, 1),
        constraints=[LinearConstraint(one_each, 1, 1), LinearConstraint(sizes / limit, ub=1)],
    )
    taken = found.x > 0.5
    return [int(np.flatnonzero(taken[owners == number])[0]) for number in range(len(costs))]
