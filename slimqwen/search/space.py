"""The space of a search: the values of each lever for a checkpoint and a GPU, and the decoding whose speed is modelled.

eval/search/<name>.yaml, or another file, has the settings that cannot be derived; everything else comes from the
checkpoint's architecture and the GPU's abilities.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Any, ClassVar, Self

import yaml
from pydantic import BaseModel, ConfigDict, Field, NonNegativeFloat, PositiveInt

from slimqwen import checkpoint
from slimqwen.models.shape import Shape
from slimqwen.records.settings import Settings, read_yaml
from slimqwen.roofline.gpu import GpuSheet
from slimqwen.search import SearchError
from slimqwen.variant import Variant

Choice = str | int | float | bool
Point = Mapping[str, Choice]

_SCHEMES = ("none", "W8A16", "W4A16")
_GROUP_SIZES = (32, 64, 128)


class Decoding(BaseModel):
    """The decoding whose speed is modelled.

    Attributes:
        sequences: sequences at once; fewer where a candidate serves or the GPU's memory holds fewer.
        context_len: cached tokens of each.
    """

    model_config = ConfigDict(extra="forbid", frozen=True)

    sequences: PositiveInt = 1
    context_len: PositiveInt = 2048


class Incumbent(BaseModel):
    """The variant that a candidate has to be faster than.

    Attributes:
        variant: its name; empty for the base itself.
        point: those of its levers that decide what a decode step reads; the others have no effect.
    """

    model_config = ConfigDict(extra="forbid", frozen=True)

    variant: str = ""
    point: dict[str, Choice] = {}


class SearchSettings(Settings):
    """eval/search/<name>.yaml.

    Attributes:
        choices: values of a lever by its name, instead of the derived ones.
        stages: parameters of a recipe's stages by stage, for all candidates: text, sizes, steps.
        points: levers to try first; those left out are the incumbent's.
        speed_share: share of the fastest speed so far that a candidate's bound has to reach; 0 searches a whole front.
        acceptance_slack: share by which the first rung lets a candidate's acceptance length exceed the base's.
        trials: number of different candidates.
        finalists: largest number of candidates that are proven.
    """

    folder: ClassVar[str] = "search"

    choices: dict[str, tuple[Choice, ...]] = Field(default={})
    stages: dict[str, dict[str, Any]] = Field(default={})
    decoding: Decoding = Decoding()
    incumbent: Incumbent = Incumbent()
    points: tuple[dict[str, Choice], ...] = ()
    speed_share: float = Field(default=0.8, ge=0, le=1)
    acceptance_slack: NonNegativeFloat = 0.05
    seed: int = 0
    trials: PositiveInt = 48
    finalists: PositiveInt = 2

    _source_file: Path | None = None

    @classmethod
    def load_file(cls, path: Path) -> Self:
        """Read a file outside eval/search/.

        Raises:
            SettingsError: the file is missing, or a field is missing or wrong.
        """
        path = path.absolute()
        settings = read_yaml(
            path,
            path.parent,
            lambda content: cls.model_validate({**content, "name": path.stem}),
            missing="does not exist; write it, or leave out --space",
        )
        settings._source_file = path
        return settings

    def file(self, root: Path) -> Path:
        """The file that the settings were read from."""
        return self._source_file or super().file(root)


@dataclass(frozen=True)
class Space:
    """The choices of every lever, for one checkpoint and one GPU.

    Attributes:
        choices: values by lever, the one without an effect first; a lever with a single value is not searched.
    """

    choices: Mapping[str, tuple[Choice, ...]]
    settings: SearchSettings

    @classmethod
    def derive(cls, base: Variant, gpu: GpuSheet, settings: SearchSettings) -> "Space":
        """The space of a base on a GPU.

        Raises:
            SearchError: the settings name an unknown lever, or a point outside the space.
            CorruptCheckpointError: the base's config.json cannot be used.
        """
        derived = _derived_choices(base, gpu)
        points = [settings.incumbent.point, *settings.points]
        unknown = sorted({*settings.choices}.union(*points) - {*derived})
        if unknown:
            raise SearchError(f"{unknown[0]!r} is no lever of a search; levers are {', '.join(derived)}")
        space = cls(MappingProxyType({**derived, **settings.choices}), settings)
        for lever, value in (each for point in points for each in point.items()):
            if value not in space.choices[lever]:
                raise SearchError(
                    f"a point's {lever} {value!r} is none of {', '.join(map(str, space.choices[lever]))}; "
                    "add it to the choices"
                )
        return space

    @property
    def levers(self) -> dict[str, tuple[Choice, ...]]:
        """The levers with more than one choice."""
        return {lever: values for lever, values in self.choices.items() if len(values) > 1}

    def complete(self, point: Point) -> dict[str, Choice]:
        """A value for every lever: those of a point, else the first choice, which has no effect."""
        return {lever: point.get(lever, values[0]) for lever, values in self.choices.items()}

    def first_points(self) -> list[dict[str, Choice]]:
        """Points to begin with: the incumbent's, then those of the settings."""
        incumbent = self.complete(self.settings.incumbent.point)
        return [incumbent, *({**incumbent, **point} for point in self.settings.points)]

    def moves(self) -> list[dict[str, Choice]]:
        """The incumbent's point with one lever at its last choice."""
        incumbent = self.complete(self.settings.incumbent.point)
        points = [{**incumbent, lever: values[-1]} for lever, values in self.levers.items()]
        return [point for point in points if point != incumbent]

    def as_text(self) -> str:
        """The space as YAML, for digests and logs."""
        fields = {
            "choices": {lever: list(values) for lever, values in self.choices.items()},
            "settings": self.settings.model_dump(mode="json", exclude={"choices", "trials", "finalists"}),
        }
        return yaml.safe_dump(fields, sort_keys=True)


def _derived_choices(base: Variant, gpu: GpuSheet) -> dict[str, tuple[Choice, ...]]:
    """Values of every lever by its name; `slimqwen.search.candidate.Candidate` explains each."""
    config = checkpoint.read_config(base.weights)
    text = checkpoint.text_config(config)
    layers = set(text.get("layer_types", ["full_attention"]))
    is_packed = bool(checkpoint.quantisation(config))
    has_drafts = bool(text.get("mtp_num_hidden_layers"))

    def schemes(present: bool) -> tuple[Choice, ...]:
        return _SCHEMES if present and not is_packed else _SCHEMES[:1]

    widths = {
        shape[1]
        for name, (_, shape) in Shape.of_config(config).tensors.items()
        if len(shape) == 2 and "embed_tokens" not in name
    }
    groups = tuple(size for size in _GROUP_SIZES if all(width % size == 0 for width in widths))
    capability = tuple(int(part) for part in gpu.compute_capability.split("."))
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
        # Not float16: vLLM's fused Gated DeltaNet kernel of verify steps takes bfloat16 or float32 alone.
        "state_dtype": ("auto", "bfloat16") if has_recurrent_layers and wide_states else ("auto",),
        # Attention kernels of older GPUs leave full CUDA graphs for an FP8 KV cache.
        "kv_cache_dtype": ("auto", "fp8") if capability >= (8, 9) else ("auto",),
        "max_sequences": (0,),
    }
