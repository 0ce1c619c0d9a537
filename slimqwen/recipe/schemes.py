"""Quantisation schemes of a model's linears, by kind: the parameter `targets` of the stage `calibrate`."""

from typing import Any, Literal

from pydantic import model_validator

from slimqwen.checkpoint import packing
from slimqwen.models.shape import Packing
from slimqwen.recipe.stage import Parameters

_BITS = {"W4A16": 4, "W4A16_ASYM": 4, "W8A16": 8}

Scheme = Literal["none", "W4A16", "W4A16_ASYM", "W8A16"]


class Targets(Parameters):
    """Scheme of each kind of linears, in all layers; a list of kinds gives each of them W4A16.

    W4A16 (symmetric) and W4A16_ASYM (zero points) have a scale for each group of weights, W8A16 one for each row.

    Attributes:
        mlp: gate, up and down projections.
        attention: query, key, value and output projections of full attention.
        linear_attention: projections of Gated DeltaNet, except the two of its decay, which stay in 16 bits.
        mtp: every linear of the MTP head; if the recipe has `redistill_mtp`, that stage must come before.
    """

    mlp: Scheme = "none"
    attention: Scheme = "none"
    linear_attention: Scheme = "none"
    mtp: Literal["none", "W4A16", "W8A16"] = "none"

    @model_validator(mode="before")
    @classmethod
    def _give_listed_kinds_four_bits(cls, values: Any) -> Any:
        return dict.fromkeys(values, "W4A16") if isinstance(values, list | tuple) else values

    @model_validator(mode="after")
    def _something_is_quantised(self) -> "Targets":
        if not self.schemes:
            raise ValueError(f"nothing is quantised; name one of {', '.join(type(self).model_fields)}")
        return self

    @property
    def schemes(self) -> dict[str, str]:
        """Scheme of each kind that is to be quantised."""
        return {kind: scheme for kind, scheme in self if scheme != "none"}

    @property
    def calibrated(self) -> dict[str, str]:
        """Schemes of the language model's kinds, whose calibration needs text."""
        return {kind: scheme for kind, scheme in self.schemes.items() if kind != "mtp"}


def packing_of(scheme: str, group_size: int) -> Packing:
    """Packing of a scheme: bits, and weights per group; W8A16 has one scale per row instead of groups."""
    bits = _BITS[scheme]
    return Packing(bits=bits, group_size=None if bits == 8 else group_size)


def config_groups(targets: Targets, group_size: int) -> dict[str, Any]:
    """Config groups for llmcompressor: a single one for all linears, or one for each kind if their schemes differ."""
    from compressed_tensors.quantization import QuantizationArgs, preset_name_to_scheme

    schemes = targets.calibrated
    if len(set(schemes.values())) == 1:
        names = {"Linear": next(iter(schemes.values()))}
    else:
        names = {packing.LINEARS[kind]: scheme for kind, scheme in schemes.items()}
    groups = {}
    for number, (target, name) in enumerate(names.items()):
        scheme = preset_name_to_scheme(name, [target])
        size = packing_of(name, group_size).group_size
        if size is None:
            per_row = {**scheme.weights.model_dump(), "strategy": "channel", "group_size": None}
            scheme.weights = QuantizationArgs(**per_row)
        else:
            scheme.weights.group_size = size
        groups[f"group_{number}"] = scheme
    return groups
