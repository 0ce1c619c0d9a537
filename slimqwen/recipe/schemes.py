"""Parameters of the stage `calibrate`: quantisation schemes of a model's linears, by kind."""

from collections.abc import Iterable
from typing import Annotated, Any, Literal, Self

from pydantic import Field, ValidationInfo, field_validator, model_validator

from slimqwen.checkpoint import packing
from slimqwen.formats.compressed_tensors import PackedIntegers
from slimqwen.models.shape import Packing
from slimqwen.recipe.calibration_text import CalibrationText, unread
from slimqwen.recipe.stage import Parameters

Scheme = Literal[
    "none", "budget", "W2A16", "W2A16_ASYM", "W3A16", "W3A16_ASYM", "W4A16", "W4A16_ASYM", "W5A16", "W5A16_ASYM",
    "W6A16", "W6A16_ASYM", "W7A16", "W7A16_ASYM", "W8A16",
]  # fmt: skip


class Targets(Parameters):
    """Scheme of each kind of linears, in all layers; a list of kinds gives each of them W4A16.

    `budget` leaves the widths to the parameter `bits`. W2A16 to W7A16 (symmetric) and their _ASYM (zero points) have a
    scale for each group of weights, W8A16 one for each row. A CPU serves 4 and 8 bits, GPUs all; the stage `unpack`
    makes a twin in 16 bits of any.

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


HEALED_SEQUENCES = 4
"""Sequences of a step of healing."""


class Healing(Parameters):
    """Training of each rounded layer to give the outputs that its 16-bit weights give for the same inputs.

    Attributes:
        steps: training steps a layer, of 4 sequences each, for integers, scales and norms; 0 for none.
    """

    steps: Annotated[int, Field(ge=0)] = 0


class CalibrateParameters(Parameters):
    """Parameters of the stage.

    Attributes:
        bits: budget of stored bits a weight, scales and zero points included, of the kinds whose scheme is `budget`
            (by default all of the layers): each linear gets the width of 2 to 8 that costs the least divergence by
            its estimate. More than 2, at most 9.
        targets: scheme of each kind of linears, or a list of kinds, all W4A16; lm_head has a stage of its own.
        group_size: number of weights of fewer than 8 bits in a row that share a scale.
        scaling: awq, or none, which leaves norms as they are and rounds the weights as stored.
        rounding: nearest, or gptq (Frantar et al., arXiv 2210.17323), in which later columns compensate the error of
            earlier ones; after AWQ's scales, as in llm-compressor's own Qwen3.5 recipe. That of the MTP head reads what
            `sample_outputs` wrote.
        heal: training of each layer after its rounding.
        corpus: calibration text.
        layer_error_ratio: largest error of a decoder layer's output that passes, over that of round-to-nearest. AWQ and
            GPTQ start from round-to-nearest, so the ratio is 1 if their searches find nothing.
        threads: CPU threads; a parameter because it affects the order of summation.
    """

    bits: Annotated[float, Field(gt=2, le=9)] | None = None
    targets: Targets = Targets(mlp="W4A16")
    group_size: Literal[32, 64, 128] = 32
    scaling: Literal["awq", "none"] = "awq"
    rounding: Literal["nearest", "gptq"] = "nearest"
    heal: Healing = Healing()
    corpus: CalibrationText = Field(default={})  # type: ignore[assignment]  # validated, as every default
    layer_error_ratio: Annotated[float, Field(gt=0)] = 1.5
    threads: Annotated[int, Field(ge=1)] = 2

    @model_validator(mode="before")
    @classmethod
    def _budget_is_for_all_layers(cls, values: Any) -> Any:
        if not isinstance(values, dict) or values.get("bits") is None:
            return values
        kinds = values.get("targets", [kind for kind in Targets.model_fields if kind != "mtp"])
        if isinstance(kinds, list | tuple):
            kinds = {kind: "W4A16" if kind == "mtp" else "budget" for kind in kinds}
        return {**values, "targets": kinds}

    @model_validator(mode="after")
    def _budget_has_kinds(self) -> Self:
        if ("budget" in self.targets.schemes.values()) != (self.bits is not None):
            raise ValueError("the scheme budget needs bits, and bits a kind with the scheme budget")
        return self

    @model_validator(mode="after")
    def _layers_are_healed(self) -> Self:
        if self.heal.steps and not self.targets.calibrated:
            raise ValueError("heal trains layers; name mlp, attention or linear_attention in the targets")
        return self

    @property
    def searches_head(self) -> bool:
        """Whether the MTP head is rounded by GPTQ."""
        return self.rounding == "gptq" and self.targets.mtp != "none"

    @field_validator("corpus", mode="before")
    @classmethod
    def _mtp_head_alone_needs_no_text(cls, corpus: Any, info: ValidationInfo) -> Any:
        targets = info.data.get("targets")
        return unread(corpus) if targets and not targets.calibrated else corpus


def packing_of(scheme: str, group_size: int, budget: float | None = None) -> Packing:
    """Bits and group size of a scheme, such as W4A16; W8A16 has one scale per row instead of groups.

    Args:
        budget: stored bits a weight; the scheme `budget` counts as the nearest width.
    """
    if scheme == "budget" and budget is not None:
        return Packing(bits=min(8, max(2, round(budget - 16 / group_size))), group_size=group_size)
    bits = int(scheme[1])
    return Packing(bits=bits, group_size=None if bits == 8 else group_size)


def forms_of(targets: Targets, group_size: int) -> list[tuple[PackedIntegers, list[str]]]:
    """Layouts with the `targets` of compressed-tensors' config: one for all linears, or one for each kind.

    Kinds with the scheme `budget` are left out.
    """
    schemes = {kind: scheme for kind, scheme in targets.calibrated.items() if scheme != "budget"}
    if len(set(schemes.values())) == 1 and schemes == targets.calibrated:
        names = {"Linear": next(iter(schemes.values()))}
    else:
        names = {packing.LINEARS[kind]: scheme for kind, scheme in schemes.items()}
    forms = []
    for target, scheme in names.items():
        packed = packing_of(scheme, group_size)
        forms.append((PackedIntegers(packed.bits, packed.group_size, not scheme.endswith("_ASYM")), [target]))
    return forms


def config_groups(forms: Iterable[tuple[PackedIntegers, list[str]]]) -> dict[str, Any]:
    """Make llmcompressor's config groups, one for each layout with its targets."""
    from compressed_tensors.quantization import QuantizationArgs, preset_name_to_scheme

    groups = {}
    for number, (form, targets) in enumerate(forms):
        scheme = preset_name_to_scheme(f"W{form.bits}A16", targets)
        shared = {"strategy": "group" if form.group_size else "channel", "group_size": form.group_size}
        given = {**scheme.weights.model_dump(), **shared, "symmetric": form.symmetric}
        scheme.weights = QuantizationArgs(**given)
        groups[f"group_{number}"] = scheme
    return groups
