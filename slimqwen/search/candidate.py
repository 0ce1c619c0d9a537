"""A candidate: one point of a space as a recipe and lines of config.env, in a repository beside the real one.

Points that make the same checkpoint with the same flags give equal candidates. Candidates lie in an overlay of the
repository, .cache/search/<base>/overlay/, whose weights/store is the repository's own: a variant of experiments/ with
the same recipe has the same content keys, and reuses their outputs.
"""

import json
import os
from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields, replace
from pathlib import Path
from typing import Any

import yaml

from slimqwen import checkpoint
from slimqwen import variant as variants
from slimqwen.recipe.stages.prune_vocab import stored_rows
from slimqwen.search.executors import content_key
from slimqwen.search.space import Point, Space
from slimqwen.variant import Variant, scaffold

Steps = list[tuple[str, dict[str, Any]]]
"""Stages of a recipe with their parameters."""


@dataclass(frozen=True)
class Candidate:
    """Changes of a variant relative to its base. A default changes nothing.

    Attributes:
        mlp: scheme of the MLPs' linears.
        attention: scheme of full attention's linears.
        linear_attention: scheme of Gated DeltaNet's linears.
        mtp: scheme of the MTP head's linears.
        group_size: 4-bit weights of a row that share a scale.
        rounding: nearest or gptq, of calibrated linears.
        head_bits: bits of the output head.
        vocabulary: share of the vocabulary that is kept.
        draft_vocabulary: share of the kept vocabulary that may be drafted.
        redistillation: whether the MTP head is trained for the changed model.
        depth: tokens drafted at a time (K).
        state_dtype: dtype of recurrent states; auto is the checkpoint's.
        kv_cache_dtype: dtype of the KV cache; auto is that of the activations.
        max_sequences: sequences served at once; 0 for the base's.
    """

    mlp: str = "none"
    attention: str = "none"
    linear_attention: str = "none"
    mtp: str = "none"
    group_size: int = 32
    rounding: str = "nearest"
    head_bits: int = 16
    vocabulary: float = 1.0
    draft_vocabulary: float = 1.0
    redistillation: bool = False
    depth: int = 0
    state_dtype: str = "auto"
    kv_cache_dtype: str = "auto"
    max_sequences: int = 0

    @classmethod
    def from_point(cls, point: Point) -> "Candidate":
        """The candidate of a point; choices without an effect there have their default."""
        candidate = cls(**dict(point))  # type: ignore[arg-type]
        if not candidate.depth:
            candidate = replace(candidate, mtp="none", draft_vocabulary=1.0, redistillation=False)
        schemes = candidate.calibrated
        if not schemes:
            candidate = replace(candidate, rounding="nearest")
        if "W4A16" not in (*schemes.values(), candidate.mtp) and candidate.head_bits != 4:
            candidate = replace(candidate, group_size=32)
        return candidate

    @property
    def calibrated(self) -> dict[str, str]:
        """Schemes of the language model's linears, by kind."""
        kinds = ("mlp", "attention", "linear_attention")
        return {kind: getattr(self, kind) for kind in kinds if getattr(self, kind) != "none"}

    @property
    def target(self) -> "Candidate":
        """The candidate without drafts, which decides the responses."""
        return Candidate.from_point({**asdict(self), "depth": 0})

    @property
    def changes(self) -> dict[str, Any]:
        """Choices that differ from their default."""
        return {
            field.name: getattr(self, field.name)
            for field in fields(self)
            if getattr(self, field.name) != field.default
        }

    def steps(self, space: Space, rows: int) -> Steps:
        """Stages that make the checkpoint: first those of the target, then those of its drafts.

        Args:
            rows: rows of the base's vocabulary.
        """
        stage_parameters = space.settings.stages
        steps: Steps = []
        if schemes := self.calibrated:
            rounding = {} if self.rounding == "nearest" else {"rounding": self.rounding}
            steps.append(("calibrate", {"targets": schemes, "group_size": self.group_size, **rounding}))
        kept_rows = rows
        if self.vocabulary < 1:
            kept_rows = stored_rows(round(rows * self.vocabulary))
            steps.append(("prune_vocab", {"size": kept_rows}))
        if self.head_bits == 4:
            steps.append(("quantise_lm_head", {"group_size": self.group_size}))
        if self.draft_vocabulary < 1 or self.redistillation:
            steps.append(("sample_outputs", {}))
        if self.draft_vocabulary < 1:
            steps.append(
                ("trim_draft_vocab", {"size": stored_rows(round(kept_rows * self.draft_vocabulary))})
            )
        if self.redistillation:
            steps.append(("redistill_mtp", {"rows": "drafted"} if self.draft_vocabulary < 1 else {}))
        steps = [(stage, {**stage_parameters.get(stage, {}), **parameters}) for stage, parameters in steps]
        if self.mtp != "none":
            # Rounding to nearest needs no text.
            steps.append(("calibrate", {"targets": {"mtp": self.mtp}, "group_size": self.group_size}))
        return steps

    def recipe(self, base: Variant, space: Space) -> str | None:
        """Content of recipe.yaml; None where the checkpoint is the base's."""
        rows = checkpoint.text_config(checkpoint.read_config(base.weights))["vocab_size"]
        steps = self.steps(space, rows)
        if not steps:
            return None
        content = {
            "description": f"The checkpoint of {base.name} with {describe_changes(self.changes)}.",
            "base": base.name,
            "stages": [{stage: parameters} for stage, parameters in steps],
        }
        return yaml.safe_dump(content, sort_keys=False, width=120)

    def lines(self, base: Variant) -> dict[str, str]:
        """Lines of config.env that differ from the base's."""
        lines = {}
        if self.depth:
            drafts = json.dumps({"method": "mtp", "num_speculative_tokens": self.depth})
            lines["VLLM_SPECULATIVE_CONFIG"] = f"'{drafts}'"
        elif "VLLM_SPECULATIVE_CONFIG" in base.settings:
            lines["VLLM_SPECULATIVE_CONFIG"] = ""
        if self.state_dtype != "auto":
            lines["VLLM_MAMBA_SSM_CACHE_DTYPE"] = self.state_dtype
        if self.kv_cache_dtype != "auto":
            lines["VLLM_KV_CACHE_DTYPE"] = self.kv_cache_dtype
        base_sequences = base.settings.get("VLLM_MAX_NUM_SEQS")
        if self.max_sequences and (base_sequences is None or base_sequences.value != str(self.max_sequences)):
            lines["VLLM_MAX_NUM_SEQS"] = str(self.max_sequences)
        return lines

    def name(self, base: Variant, space: Space) -> str:
        """Name of its variant: the base's, and a digest of its recipe and lines."""
        return f"{base.name}-search-{content_key(self.recipe(base, space), self.lines(base))[:10]}"

    def scaffold(self, base: Variant, space: Space, hypothesis: str, root: Path) -> Variant:
        """Write the candidate's folder under experiments/ of a repository if it is missing, and load it."""
        name = self.name(base, space)
        if name not in variants.names(root):
            recipe, lines = self.recipe(base, space), self.lines(base)
            scaffold.create(name, base.name, hypothesis, recipe=recipe, lines=lines, root=root)
        return variants.load(name, root)


def describe_changes(changes: Mapping[str, Any]) -> str:
    """Values by choice in one line."""
    return ", ".join(f"{choice} {value}" for choice, value in changes.items()) or "nothing"


def make_overlay(base: Variant, folder: Path) -> Path:
    """Make a repository in a folder of the real one: links to its files, with variants and weights of its own."""
    (base.root / "weights" / "store").mkdir(parents=True, exist_ok=True)
    for parent in ("experiments", "weights", "."):
        (folder / parent).mkdir(parents=True, exist_ok=True)
        for target in (base.root / parent).iterdir():
            link = folder / parent / target.name
            if target.is_dir() and not target.name.startswith(".") and not os.path.lexists(link):
                link.symlink_to(os.path.relpath(target, link.parent))
    return folder
