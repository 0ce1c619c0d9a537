"""A candidate: one point of a search's space, as a recipe and lines of config.env.

Points that give the same checkpoint and the same flags give equal candidates. Candidates are variants of an overlay,
.cache/search/<base>/overlay/: a repository of its own with links to the files of the real one. Both share
weights/store, so a variant of experiments/ with the same recipe has the same content keys and reuses the outputs.
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
from slimqwen.identity import digest_of
from slimqwen.recipe.stages.prune_vocab import stored_rows
from slimqwen.search.space import Point, Space
from slimqwen.variant import Variant, scaffold

Steps = list[tuple[str, dict[str, Any]]]
"""Stages of a recipe in order, each with its parameters."""


@dataclass(frozen=True)
class Candidate:
    """Changes of a variant relative to its base. Default values change nothing.

    Attributes:
        mlp: quantisation scheme of the MLPs' linears.
        attention: quantisation scheme of full attention's linears.
        linear_attention: quantisation scheme of Gated DeltaNet's linears.
        mtp: quantisation scheme of the MTP head's linears.
        group_size: number of 4-bit weights in a row that share a scale.
        rounding: rounding of quantised linears: nearest or gptq.
        head_bits: bits of the output head.
        vocabulary: share of the vocabulary that is kept.
        embedding_bits: bits of the input embedding.
        draft_vocabulary: share of the kept vocabulary that may be drafted.
        draft_bits: bits of the draft head, if only a share may be drafted.
        redistillation: whether the MTP head is trained for the changed model.
        depth: tokens drafted at a time (K); 0 for no drafts.
        state_dtype: dtype of recurrent states; auto for the checkpoint's.
        kv_cache_dtype: dtype of the KV cache; auto for that of the activations.
        max_sequences: sequences served at once; 0 for the base's number.
    """

    mlp: str = "none"
    attention: str = "none"
    linear_attention: str = "none"
    mtp: str = "none"
    group_size: int = 32
    rounding: str = "nearest"
    head_bits: int = 16
    vocabulary: float = 1.0
    embedding_bits: int = 16
    draft_vocabulary: float = 1.0
    draft_bits: int = 16
    redistillation: bool = False
    depth: int = 0
    state_dtype: str = "auto"
    kv_cache_dtype: str = "auto"
    max_sequences: int = 0

    @classmethod
    def from_point(cls, point: Point) -> "Candidate":
        """The candidate of a point; choices that have no effect beside the others get their default."""
        candidate = cls(**dict(point))  # type: ignore[arg-type]
        if not candidate.depth:
            candidate = replace(candidate, mtp="none", draft_vocabulary=1.0, redistillation=False)
        if candidate.draft_vocabulary == 1:
            candidate = replace(candidate, draft_bits=16)
        schemes = candidate.calibrated
        if not schemes:
            candidate = replace(candidate, rounding="nearest")
        packed = candidate.embedding_bits < 16 or 4 in (candidate.head_bits, candidate.draft_bits)
        if "W4A16" not in (*schemes.values(), candidate.mtp) and not packed:
            candidate = replace(candidate, group_size=32)
        return candidate

    @property
    def calibrated(self) -> dict[str, str]:
        """Quantisation schemes of the language model's linears, by kind."""
        kinds = ("mlp", "attention", "linear_attention")
        return {kind: getattr(self, kind) for kind in kinds if getattr(self, kind) != "none"}

    @property
    def target(self) -> "Candidate":
        """The same candidate without drafts: the target model, which alone determines the responses."""
        return Candidate.from_point({**asdict(self), "depth": 0})

    @property
    def changes(self) -> dict[str, Any]:
        """Choices whose value is not the default."""
        return {
            field.name: getattr(self, field.name)
            for field in fields(self)
            if getattr(self, field.name) != field.default
        }

    def steps(self, stage_parameters: Mapping[str, Mapping[str, Any]], rows: int) -> Steps:
        """Stages that make the checkpoint: first those that change the target model, then those of its drafts.

        Args:
            stage_parameters: further parameters by stage.
            rows: size of the base's vocabulary.
        """
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
        if self.embedding_bits < 16:
            steps.append(("quantise_embedding", {"bits": self.embedding_bits, "group_size": self.group_size}))
        if self.draft_vocabulary < 1 or self.redistillation:
            steps.append(("sample_outputs", {}))
        if self.draft_vocabulary < 1:
            packed = {"bits": self.draft_bits, "group_size": self.group_size} if self.draft_bits < 16 else {}
            size = stored_rows(round(kept_rows * self.draft_vocabulary))
            steps.append(("trim_draft_vocab", {"size": size, **packed}))
        if self.redistillation:
            steps.append(("redistill_mtp", {"rows": "drafted"} if self.draft_vocabulary < 1 else {}))
        steps = [(stage, {**stage_parameters.get(stage, {}), **parameters}) for stage, parameters in steps]
        if self.mtp != "none":
            # Rounding to nearest needs no text.
            steps.append(("calibrate", {"targets": {"mtp": self.mtp}, "group_size": self.group_size}))
        return steps

    def recipe(self, base: Variant, space: Space) -> str | None:
        """Content of recipe.yaml; None if the candidate has the base's checkpoint."""
        return self.render(base, space.settings.stages)

    def render(
        self, base: Variant, stage_parameters: Mapping[str, Mapping[str, Any]], corpus: str | None = None
    ) -> str | None:
        """Content of recipe.yaml; None if the candidate has the base's checkpoint.

        Args:
            corpus: the recipe's text; None where the stages name theirs.
        """
        rows = checkpoint.text_config(checkpoint.read_config(base.weights))["vocab_size"]
        steps = self.steps(stage_parameters, rows)
        if not steps:
            return None
        content = {
            "description": f"The checkpoint of {base.name} with {describe_changes(self.changes)}.",
            "base": base.name,
            **({"corpus": corpus} if corpus else {}),
            "stages": [{stage: parameters} for stage, parameters in steps],
        }
        return yaml.safe_dump(content, sort_keys=False, width=120)

    def lines(self, base: Variant) -> dict[str, str]:
        """Lines of config.env that differ from those of the base."""
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
        """Name of the candidate's variant: the base's name, and a digest of the candidate's recipe and `lines`."""
        return f"{base.name}-search-{digest_of([self.recipe(base, space), self.lines(base)])[:10]}"

    def scaffold(self, base: Variant, space: Space, hypothesis: str, root: Path) -> Variant:
        """Write the candidate's folder into experiments/ of the repository `root` if it is missing, and load it."""
        name = self.name(base, space)
        if name not in variants.names(root):
            recipe, lines = self.recipe(base, space), self.lines(base)
            scaffold.create(name, base.name, hypothesis, recipe=recipe, lines=lines, root=root)
        return variants.load(name, root)


def describe_changes(changes: Mapping[str, Any]) -> str:
    """The changed choices with their values, as one line."""
    return ", ".join(f"{choice} {value}" for choice, value in changes.items()) or "nothing"


def make_overlay(base: Variant, folder: Path) -> Path:
    """Make an overlay of the base's repository in `folder`: links to its files, but own variants and weights."""
    (base.root / "weights" / "store").mkdir(parents=True, exist_ok=True)
    for parent in ("experiments", "weights", "."):
        (folder / parent).mkdir(parents=True, exist_ok=True)
        for target in (base.root / parent).iterdir():
            link = folder / parent / target.name
            if target.is_dir() and not target.name.startswith(".") and not os.path.lexists(link):
                link.symlink_to(os.path.relpath(target, link.parent))
    return folder
