"""The space of a search: the values of each choice for a checkpoint and a GPU, and the decoding that is modelled.

eval/search/<name>.yaml has the settings that cannot be derived; everything else is derived from the checkpoint's
architecture and the features of the GPU.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any, ClassVar

import yaml
from pydantic import BaseModel, ConfigDict, Field, NonNegativeFloat, PositiveInt

from slimqwen import checkpoint
from slimqwen.checkpoint.weights import has_mtp_head
from slimqwen.models.shape import Shape
from slimqwen.plan.devices import Gpu
from slimqwen.records.settings import Settings
from slimqwen.search import SearchError
from slimqwen.variant import Variant

Value = str | int | float | bool
Point = Mapping[str, Value]

_SCHEMES = ("none", "W8A16", "W4A16")
_GROUP_SIZES = (32, 64, 128)


class Decoding(BaseModel):
    """The decoding whose speed is modelled.

    Attributes:
        sequences: number of concurrent sequences; fewer if a candidate serves fewer or GPU memory holds fewer.
        context_len: cached tokens of each sequence.
    """

    model_config = ConfigDict(extra="forbid", frozen=True)

    sequences: PositiveInt = 1
    context_len: PositiveInt = 2048


class IncumbentPoint(BaseModel):
    """The variant that a candidate has to be faster than.

    Attributes:
        variant: name of the variant; empty for the base itself.
        point: the variant's choices that affect what a decode step reads; other choices need not be stated.
    """

    model_config = ConfigDict(extra="forbid", frozen=True)

    variant: str = ""
    point: dict[str, Value] = {}


class SearchSettings(Settings):
    """eval/search/<name>.yaml.

    Attributes:
        choices: values by the choice's name, instead of derived values.
        stages: parameters by stage, for the recipes of all candidates: text, sizes, steps.
        points: points to try first; choices that a point leaves out have the incumbent's value.
        speed_share: share of the fastest speed so far that a candidate's bound has to reach; 0 searches a whole front.
        acceptance_slack: share by which, in the first rung's bound, the acceptance length exceeds the base's.
        trials: number of different candidates.
        finalists: largest number of candidates that are proven.
    """

    folder: ClassVar[str] = "search"

    choices: dict[str, tuple[Value, ...]] = Field(default={})
    stages: dict[str, dict[str, Any]] = Field(default={})
    decoding: Decoding = Decoding()
    incumbent: IncumbentPoint = IncumbentPoint()
    points: tuple[dict[str, Value], ...] = ()
    speed_share: float = Field(default=0.8, ge=0, le=1)
    acceptance_slack: NonNegativeFloat = 0.05
    seed: int = 0
    trials: PositiveInt = 48
    finalists: PositiveInt = 2


@dataclass(frozen=True)
class Space:
    """The values of every choice, for one checkpoint and one GPU.

    Attributes:
        choices: values by choice; the first one changes nothing. A choice with a single value is not searched.
    """

    choices: Mapping[str, tuple[Value, ...]]
    settings: SearchSettings

    @classmethod
    def derive(cls, base: Variant, gpu: Gpu, settings: SearchSettings) -> "Space":
        """Derive the space of a base on a GPU.

        Raises:
            SearchError: the settings name an unknown choice, or a point that is outside the space.
            CorruptCheckpointError: the base's config.json cannot be used.
        """
        derived = _derive_choices(base, gpu)
        points = [settings.incumbent.point, *settings.points]
        unknown = sorted({*settings.choices}.union(*points) - {*derived})
        if unknown:
            raise SearchError(f"{unknown[0]!r} is no choice of a search; use one of {', '.join(derived)}")
        space = cls(MappingProxyType({**derived, **settings.choices}), settings)
        for choice, value in (each for point in points for each in point.items()):
            if value not in space.choices[choice]:
                raise SearchError(
                    f"a point's {choice} {value!r} is none of {', '.join(map(str, space.choices[choice]))}; "
                    "add it to the choices"
                )
        return space

    @property
    def open_choices(self) -> dict[str, tuple[Value, ...]]:
        """The choices with more than one value."""
        return {choice: values for choice, values in self.choices.items() if len(values) > 1}

    def complete(self, point: Point) -> dict[str, Value]:
        """The point with a value for every choice; a choice that it leaves out gets the first value."""
        return {choice: point.get(choice, values[0]) for choice, values in self.choices.items()}

    def first_points(self) -> list[dict[str, Value]]:
        """Points to try first: that of the incumbent, then those of the settings."""
        incumbent = self.complete(self.settings.incumbent.point)
        return [incumbent, *({**incumbent, **point} for point in self.settings.points)]

    def as_text(self) -> str:
        """The space as YAML, for digests and logs."""
        fields = {
            "choices": {choice: list(values) for choice, values in self.choices.items()},
            "settings": self.settings.model_dump(mode="json", exclude={"choices", "trials", "finalists"}),
        }
        return yaml.safe_dump(fields, sort_keys=True)


def _derive_choices(base: Variant, gpu: Gpu) -> dict[str, tuple[Value, ...]]:
    """Values of every choice by its name; `slimqwen.search.candidate.Candidate` explains each."""
    config = checkpoint.read_config(base.weights)
    text = checkpoint.text_config(config)
    layers = set(text.get("layer_types", ["full_attention"]))
    is_packed = bool(checkpoint.quantisation(config))
    has_drafts = has_mtp_head(base.weights)

    def schemes(present: bool) -> tuple[Value, ...]:
        return _SCHEMES if present and not is_packed else _SCHEMES[:1]

    widths = {
        shape[1]
        for name, (_, shape) in Shape.of_config(config).tensors.items()
        if len(shape) == 2 and "embed_tokens" not in name
    }
    groups = tuple(size for size in _GROUP_SIZES if all(width % size == 0 for width in widths))
    has_recurrent_layers = "linear_attention" in layers
    wide_states = (text.get("mamba_ssm_dtype") or "bfloat16") != "bfloat16"
    return {
        "mlp": schemes(True),
        "attention": schemes("full_attention" in layers),
        "linear_attention": schemes(has_recurrent_layers),
        "mtp": schemes(has_drafts),
        "group_size": groups or _GROUP_SIZES[:1],
        "rounding": ("nearest", "gptq") if not is_packed else ("nearest",),
        "head_bits": (16, 4) if groups and not is_packed else (16,),
        "vocabulary": (1.0, 0.96875, 0.875, 0.5),
        "draft_vocabulary": (1.0, 0.5, 0.25, 0.125) if has_drafts else (1.0,),
        "redistillation": (False, True) if has_drafts else (False,),
        "depth": (1, 2, 3, 4, 5, 6) if has_drafts else (0,),
        # float16 is left out: vLLM's fused Gated DeltaNet kernel of verify steps supports only bfloat16 and float32.
        "state_dtype": ("auto", "bfloat16") if has_recurrent_layers and wide_states else ("auto",),
        # On older GPUs the attention kernels for an FP8 KV cache do not support full CUDA graphs.
        "kv_cache_dtype": ("auto", "fp8") if gpu.capability >= (8, 9) else ("auto",),
        "max_sequences": (0,),
    }
