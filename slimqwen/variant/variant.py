"""A variant: the content of experiments/<name>/, with inheritance applied."""

import json
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from types import MappingProxyType
from typing import Literal

from slimqwen.variant.config_env import (
    ConfigError,
    Setting,
    config_env,
    inherit,
    read_config_env,
)
from slimqwen.workspace import locate, repository_root

EMBEDDED = "tiny"
"""The variant whose weights are committed; the texts of eval/ describe the world that it was trained on."""

DRAFTS_REFUSE: Mapping[str, tuple[str, ...]] = MappingProxyType(
    {"cpu": ("logprob_token_ids",), "cuda": ("logprob_token_ids", "min_p", "logit_bias")}
)
"""Fields of a request that are answered with 400 beside drafts, by platform: the first by
`refuse_chosen_logprobs_of_drafts` of `vllm_plugin.patches.serving.request_limits`, the others by vLLM's
`_validate_spec_decode`, where `vllm_plugin.patches.cpu.draft_logits` is not installed."""

DRAFTS_NOTE = (
    f"Beside drafts a request with {DRAFTS_REFUSE['cpu'][0]} gets status 400, and on a GPU one with "
    f"{' or '.join(DRAFTS_REFUSE['cuda'][1:])} too; without VLLM_SPECULATIVE_CONFIG each is answered"
)
"""What clients of a server with drafts have to know, without a full stop."""

SHAPE_PREFIX = "shape-"
"""weights/<prefix><variant>/ is a checkpoint with the dimensions of a variant and without weights
(`slimqwen recipe run NAME --shape`)."""

_NEEDED = '{"hypothesis": "one sentence", "baseline": "name of a variant, or null for a baseline"}'
"""What measurements.json has to have, in error messages."""


@dataclass(frozen=True)
class Variant:
    """The content of experiments/<name>/, with inheritance applied.

    Attributes:
        root: the repository that holds experiments/ and weights/.
        lineage: names from this variant to its oldest base.
        settings: effective lines of config.env by key, without BASE.
        unset: the `KEY=` lines along the lineage; their keys are checked like all others.
        hypothesis: expected result of the variant, one sentence.
        baseline: the variant it is compared with; None for a baseline.
    """

    name: str
    root: Path
    lineage: tuple[str, ...]
    settings: Mapping[str, Setting]
    unset: tuple[Setting, ...]
    hypothesis: str
    baseline: str | None

    @property
    def folder(self) -> Path:
        """experiments/<name>/ of the workspace, which holds its records; it may be missing for a shipped variant."""
        return self.root / "experiments" / self.name

    @property
    def recipe(self) -> Path | None:
        """Path of recipe.yaml; None if the variant makes no weights of its own."""
        return file if (file := self.recipe_file).is_file() else None

    @property
    def recipe_file(self) -> Path:
        """Where recipe.yaml is, or would be."""
        return locate(f"experiments/{self.name}/recipe.yaml", self.root)

    @property
    def weights(self) -> Path:
        """The checkpoint folder that VLLM_MODEL names, absolute."""
        return locate(self.settings["VLLM_MODEL"].value, self.root)

    @property
    def platform(self) -> Literal["cuda"] | None:
        """The platform that PLATFORM requires; None for any platform."""
        return "cuda" if "PLATFORM" in self.settings else None

    @property
    def evaluation(self) -> str:
        """Name of the variant's suite and gate limits in eval/.

        Raises:
            ConfigError: EVALUATION is unset. There is no default, because the items of one model family say
                nothing about another.
        """
        if "EVALUATION" not in self.settings:
            raise ConfigError(
                f"experiments/{self.name}/config.env: no EVALUATION; add EVALUATION=core, or the name of another "
                "suite in eval/suites/, to this file or to the one that it inherits"
            )
        return self.settings["EVALUATION"].value

    @property
    def drafts(self) -> bool:
        """Whether the variant is served with speculative decoding."""
        return "VLLM_SPECULATIVE_CONFIG" in self.settings

    @property
    def require_baked(self) -> bool:
        """Whether REQUIRE_BAKED=1 is set: a server without a baked compile cache that fits does not start."""
        return "REQUIRE_BAKED" in self.settings

    @property
    def require_plan(self) -> bool:
        """Whether REQUIRE_PLAN=1 is set: a server without a plan, or one that differs from its plan, does not serve."""
        return "REQUIRE_PLAN" in self.settings

    @property
    def allow_unsafe(self) -> bool:
        """Whether ALLOW_UNSAFE=1 is set: a server starts in spite of known trouble."""
        return "ALLOW_UNSAFE" in self.settings

    @property
    def allow_open(self) -> bool:
        """Whether ALLOW_OPEN=1 is set: a server without an API key may listen for other machines."""
        return "ALLOW_OPEN" in self.settings

    def with_lines(self, lines: Mapping[str, str]) -> "Variant":
        """The variant as if its config.env had these lines too: key -> value, where an empty value unsets the key."""
        file = self.folder / "config.env"
        changed = {**self.settings, **{key: Setting(key, value, file, 0) for key, value in lines.items()}}
        settings = {key: setting for key, setting in changed.items() if setting.value}
        return replace(self, settings=MappingProxyType(settings))

    def require_weights(self) -> None:
        """Check that the checkpoint is there and whole; the error names the command that makes the checkpoint.

        Raises:
            MissingCheckpointError: there is no checkpoint.
            CorruptCheckpointError: a file is missing, cut short or damaged.
        """
        from slimqwen import checkpoint  # vLLM's processes import this module and do not need it

        checkpoint.check_folder(self.weights, making_command(self.weights, self.root))


def load(name: str, root: Path | None = None) -> Variant:
    """Read a variant and everything that it inherits.

    Args:
        name: name of the variant.
        root: the repository; None for the workspace of the working folder.

    Raises:
        ConfigError: there is no such variant, or its config.env, one that it inherits, or its measurements.json
            cannot be used.
    """
    root = root or repository_root()
    lineage, settings, unset = inherit(name, root)
    hypothesis, baseline = _read_measurements(name, root)
    return Variant(
        name=name,
        root=root,
        lineage=lineage,
        settings=settings,
        unset=unset,
        hypothesis=hypothesis,
        baseline=baseline,
    )


def making_command(weights: Path, root: Path) -> str:
    """Write the cure at the end of an error message about a checkpoint folder: the command that makes it.

    For a folder that no command makes it says where to put a checkpoint.
    """
    name = weights.relative_to(root / "weights").parts[0] if weights.is_relative_to(root / "weights") else ""
    if name == EMBEDDED:
        return "`git checkout weights/tiny` restores it, `python tools/tinyworld train` trains it anew"
    config = config_env(name, root)
    if name.startswith(SHAPE_PREFIX):
        return f"`slimqwen recipe run {name.removeprefix(SHAPE_PREFIX)} --shape` writes it"
    if name and config.is_file() and "SOURCE" in read_config_env(config):
        return f"`slimqwen download {name}` gets it"
    if name and (config.parent / "recipe.yaml").is_file():
        return f"`slimqwen recipe run {name}` makes it"
    return f"put a checkpoint into {weights.relative_to(root) if weights.is_relative_to(root) else weights}"


def _read_measurements(name: str, root: Path) -> tuple[str, str | None]:
    file = locate(f"experiments/{name}/measurements.json", root)
    location = f"experiments/{name}/{file.name}"
    try:
        content = json.loads(file.read_text(encoding="utf-8"))
        return str(content["hypothesis"]), content["baseline"]
    except FileNotFoundError:
        raise ConfigError(f"{location} is missing; write {_NEEDED} into it") from None
    except (ValueError, KeyError, TypeError) as error:
        raise ConfigError(f"{location}: unusable ({error!r}); it needs {_NEEDED}") from error
