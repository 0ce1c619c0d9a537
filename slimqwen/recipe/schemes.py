"""Quantisation schemes of a model's linears, by their kind: what the stage `calibrate` takes as its targets."""

from typing import Literal

from pydantic import model_validator

from slimqwen.recipe.stage import Parameters

BITS = {"W4A16": 4, "W4A16_ASYM": 4, "W8A16": 8}
"""Bits per weight of each scheme."""

Scheme = Literal["none", "W4A16", "W4A16_ASYM", "W8A16"]


class Targets(Parameters):
    """Scheme of each kind of linears, in all layers.

    W4A16 (symmetric) and W4A16_ASYM (zero points) have a scale for each group of weights, W8A16 one for each row.

    Attributes:
        mlp: gate, up and down projections.
        attention: query, key, value and output projections of full attention.
        linear_attention: projections of Gated DeltaNet, but for the two of its decay, which stay in 16 bits.
        mtp: every linear of the MTP head; `redistill_mtp` has to come before.
    """

    mlp: Scheme = "none"
    attention: Scheme = "none"
    linear_attention: Scheme = "none"
    mtp: Literal["none", "W4A16", "W8A16"] = "none"

    @model_validator(mode="after")
    def _something_is_quantised(self) -> "Targets":
        if not self.schemes:
            raise ValueError(f"nothing is quantised; name one of {', '.join(type(self).model_fields)}")
        return self

    @property
    def schemes(self) -> dict[str, str]:
        """Kinds to quantise, with their scheme."""
        return {kind: scheme for kind, scheme in self if scheme != "none"}

    @property
    def calibrated(self) -> dict[str, str]:
        """Those of the language model, which need text."""
        return {kind: scheme for kind, scheme in self.schemes.items() if kind != "mtp"}
