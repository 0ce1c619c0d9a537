"""A candidate: a variant that a search may make, as choices of quantisation, vocabulary and drafts.

It becomes a recipe.yaml and lines of config.env. Choices that give the same checkpoint and the same flags give equal
candidates.
"""

import json
from collections.abc import Mapping
from dataclasses import dataclass, fields, replace
from typing import Any

import yaml

from slimqwen import checkpoint
from slimqwen import variant as variants
from slimqwen.identity import digest_of
from slimqwen.models.shape import Shape
from slimqwen.recipe.registry import STAGES
from slimqwen.recipe.stages.prune_vocab import stored_rows
from slimqwen.variant import Variant, scaffold

Steps = list[tuple[str, dict[str, Any]]]
"""Stages of a recipe in order, each with its parameters."""

KINDS = ("mlp", "attention", "linear_attention")
"""Kinds of linears of the language model's layers, each with a scheme of its own."""

STAGES_BY_PLATFORM: Mapping[str, Mapping[str, Any]] = {
    platform: {"calibrate": {"corpus": corpus}, "sample_outputs": {"texts": 1024, "tokens": 96}}
    for platform, corpus in {
        "cuda": {"sequences": 256, "length": 2048},
        "cpu": {"sequences": 64, "length": 256},
    }.items()
}
"""Parameters of stages by platform: more text where a GPU reads it."""


@dataclass(frozen=True)
class Candidate:
    """Changes of a variant relative to its base. Default values change nothing.

    Attributes:
        mlp: quantisation scheme of the MLPs' linears.
        attention: quantisation scheme of full attention's linears.
        linear_attention: quantisation scheme of Gated DeltaNet's linears.
        mtp: quantisation scheme of the MTP head's linears.
        group_size: number of weights of fewer than 8 bits in a row that share a scale.
        rounding: rounding of quantised linears: nearest or gptq.
        head_bits: bits of the output head.
        vocabulary: share of the vocabulary that is kept.
        embedding_bits: bits of the input embedding.
        draft_vocabulary: share of the kept vocabulary that may be drafted.
        draft_bits: bits of the draft head, if only a share may be drafted.
        depth: tokens drafted at a time (K); 0 for no drafts.
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
    depth: int = 0

    @classmethod
    def of(cls, choices: Mapping[str, Any]) -> "Candidate":
        """Make a candidate; a choice without effect beside the others, such as draft_bits without drafts, is reset."""
        candidate = cls(**choices)
        if not candidate.depth:
            candidate = replace(candidate, mtp="none", draft_vocabulary=1.0)
        if candidate.draft_vocabulary == 1:
            candidate = replace(candidate, draft_bits=16)
        schemes = candidate.calibrated
        if not schemes:
            candidate = replace(candidate, rounding="nearest")
        packed = candidate.embedding_bits < 16 or 4 in (candidate.head_bits, candidate.draft_bits)
        if {*schemes.values(), candidate.mtp} <= {"none", "W8A16"} and not packed:
            candidate = replace(candidate, group_size=32)
        return candidate

    @property
    def calibrated(self) -> dict[str, str]:
        """Quantisation scheme of each kind of linear of the language model that is quantised."""
        return {kind: getattr(self, kind) for kind in KINDS if getattr(self, kind) != "none"}

    @property
    def changes(self) -> dict[str, Any]:
        """The choices that differ from their defaults, by field name."""
        return {
            field.name: getattr(self, field.name)
            for field in fields(self)
            if getattr(self, field.name) != field.default
        }

    def steps(self, stage_parameters: Mapping[str, Mapping[str, Any]], rows: int) -> Steps:
        """The recipe's stages with their parameters: first those of the target model, then those of its drafts.

        Args:
            stage_parameters: further parameters of each stage, by the stage's name.
            rows: size of the base's vocabulary.
        """
        steps: Steps = []
        rounding = {} if self.rounding == "nearest" else {"rounding": self.rounding}
        if schemes := self.calibrated:
            steps.append(("calibrate", {"targets": schemes, "group_size": self.group_size, **rounding}))
        kept_rows = rows
        if self.vocabulary < 1:
            kept_rows = stored_rows(round(rows * self.vocabulary))
            steps.append(("prune_vocab", {"size": kept_rows}))
        if self.head_bits == 4:
            steps.append(("quantise_lm_head", {"group_size": self.group_size}))
        if self.embedding_bits < 16:
            steps.append(("quantise_embedding", {"bits": self.embedding_bits, "group_size": self.group_size}))
        if self.draft_vocabulary < 1:
            steps.append(("sample_outputs", {}))
            packed = {"bits": self.draft_bits, "group_size": self.group_size} if self.draft_bits < 16 else {}
            size = stored_rows(round(kept_rows * self.draft_vocabulary))
            steps.append(("trim_draft_vocab", {"size": size, **packed}))
        steps = [(stage, {**stage_parameters.get(stage, {}), **parameters}) for stage, parameters in steps]
        if self.mtp != "none":
            # Rounding to nearest needs no text, and GPTQ the outputs that were sampled.
            own = rounding if self.draft_vocabulary < 1 else {}
            steps.append(("calibrate", {"targets": {"mtp": self.mtp}, "group_size": self.group_size, **own}))
        return steps

    def shape(self, shape: Shape) -> Shape:
        """Dimensions of the candidate's checkpoint, from those of its base."""
        for name, values in self.steps({}, shape.text["vocab_size"]):
            stage = STAGES[name]
            shape = stage.reshape(shape, stage.parameters.model_validate(values))
        return shape

    def render(
        self, base: Variant, stage_parameters: Mapping[str, Mapping[str, Any]], corpus: str | None = None
    ) -> str | None:
        """The text of recipe.yaml; None if the candidate serves the base's own checkpoint.

        Args:
            base: variant whose checkpoint the recipe transforms.
            stage_parameters: further parameters of each stage, by the stage's name.
            corpus: calibration text that recipe.yaml names; None if each stage names its own.
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
        """The config.env lines that differ from the base's; an empty value unsets the base's line."""
        if self.depth:
            drafts = json.dumps({"method": "mtp", "num_speculative_tokens": self.depth})
            return {"VLLM_SPECULATIVE_CONFIG": f"'{drafts}'"}
        return {"VLLM_SPECULATIVE_CONFIG": ""} if "VLLM_SPECULATIVE_CONFIG" in base.settings else {}

    def scaffold(
        self,
        base: Variant,
        label: str,
        stage_parameters: Mapping[str, Mapping[str, Any]],
        corpus: str | None,
        evaluation: str | None,
        gain: str = "faster",
    ) -> Variant:
        """The candidate as a variant, whose folder is written into experiments/ if it does not exist.

        Args:
            base: variant whose flags and checkpoint it starts from.
            label: part of the variant's name that says what made it, such as "optimised".
            stage_parameters: further parameters of each stage, by the stage's name.
            corpus: calibration text that recipe.yaml names; None if each stage names its own.
            evaluation: name of the evaluation that judges the variant; None for the base's.
            gain: expected gain in the variant's hypothesis, "faster" or "smaller".
        """
        recipe, lines = self.render(base, stage_parameters, corpus), self.lines(base)
        own = base.settings.get("EVALUATION")
        if evaluation and (own is None or own.value != evaluation):
            lines["EVALUATION"] = evaluation
        name = f"{base.name}-{label}-{digest_of([recipe, lines])[:6]}"
        if name not in variants.names(base.root):
            hypothesis = f"{base.name} with {describe_changes(self.changes)} is {gain} and keeps every limit."
            scaffold.create(name, base.name, hypothesis, recipe=recipe, lines=lines, root=base.root)
        return variants.load(name, base.root)


def describe_changes(changes: Mapping[str, Any]) -> str:
    """The changed choices with their values, as one line."""
    return ", ".join(f"{choice} {value}" for choice, value in changes.items()) or "nothing"
