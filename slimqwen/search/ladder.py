"""The ladder: the rungs that judge a candidate, from cheap to expensive; a candidate ends at the first that it fails.

1. roofline: the speed bound of the GPU with an acceptance length that drafts can hardly exceed; a candidate fails if
   its bound lies below the incumbent's speed.
2. fidelity: next-token distributions compared with the base's; fails if the whole interval of a figure is beyond its
   limit.
3. acceptance: accepted drafts at the candidate's own depth, for its speed, and at the gate's depth; fails if, at the
   gate's depth, the whole interval of the share of the base's acceptance length is below the least share.
4. speed: on a machine without the GPU, the roofline with the measured acceptance length.

Rungs 2 and 3 need an engine: each is a task (`slimqwen.search.rungs`). The value of such a task is a pure function of
the recipe's steps, flags, settings and versions; the task's key is a digest of these.
"""

import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from slimqwen import checkpoint
from slimqwen.checkpoint.tensors import tensor_bytes
from slimqwen.fit import cost
from slimqwen.fit.architecture import shape_model
from slimqwen.fit.memory import fitting_batch
from slimqwen.identity import digest_of
from slimqwen.identity.effects import Effect, may_affect
from slimqwen.models.shape import Shape
from slimqwen.plan.devices import Gpu
from slimqwen.processes import ENGINE_BYTES, Resources, Task
from slimqwen.recipe.recipe_file import read_recipe
from slimqwen.recipe.registry import STAGES
from slimqwen.records import provenance
from slimqwen.records.settings import Settings
from slimqwen.search.candidate import Candidate
from slimqwen.search.rungs import Budget, RungInput, compare_distributions, measure_acceptance
from slimqwen.search.space import Space
from slimqwen.text.corpus import resolve_text
from slimqwen.variant import Variant
from slimqwen.workspace import locate


@dataclass(frozen=True)
class Ladder:
    """Everything that affects the measurements of a candidate.

    Attributes:
        base: variant that candidates are made from and compared with.
        overlay: root of the repository in which candidates are variants (see `slimqwen.search.candidate`).
    """

    base: Variant
    overlay: Path
    gpu: Gpu
    space: Space
    budget: Budget

    @cached_property
    def _config(self) -> dict[str, Any]:
        return checkpoint.read_config(self.base.weights)

    def shape(self, candidate: Candidate) -> Shape:
        """Dimensions of a candidate's checkpoint, computed before it is made."""
        shape = Shape.of_config(self._config)
        folder = {"folder": self.base.root / "experiments" / self.base.name}
        for name, values in candidate.steps(self.space.settings.stages, shape.text["vocab_size"]):
            stage = STAGES[name]
            shape = stage.reshape(shape, stage.parameters.model_validate(values, context=folder))
        return shape

    def checkpoint_bytes(self, candidate: Candidate) -> int:
        """Size of a candidate's tensors, bytes."""
        return sum(itertools.starmap(tensor_bytes, self.shape(candidate).tensors.values()))

    def tokens_per_second(self, candidate: Candidate, acceptance_length: float) -> float:
        """Roofline of the decode speed on the GPU, tokens/s.

        Raises:
            FitError: the candidate does not fit the GPU, or its depth cannot give this acceptance length.
        """
        state = self.base.settings.get("VLLM_MAMBA_SSM_CACHE_DTYPE")
        default = state.value if state else "auto"
        model = shape_model(
            self.shape(candidate),
            kv_cache_dtype=candidate.kv_cache_dtype,
            state_dtype=default if candidate.state_dtype == "auto" else candidate.state_dtype,
        )
        decoding = self.space.settings.decoding
        batch = min(
            decoding.sequences,
            candidate.max_sequences or decoding.sequences,
            fitting_batch(model, self.gpu, decoding.context_len, candidate.depth),
        )
        step = cost.bound_decode_step(
            model, self.gpu, batch, decoding.context_len, candidate.depth, acceptance_length
        )
        return step.tokens_per_second

    def best_tokens_per_second(self, candidate: Candidate, base_rates: Sequence[float]) -> float:
        """Speed bound of the first rung, tokens/s, by the base's acceptance length at the candidate's depth plus slack.

        Args:
            base_rates: share of the base's own drafts that were accepted up to and with each position.
        """
        slack = 1 + self.space.settings.acceptance_slack
        length = (1 + sum(base_rates[: candidate.depth])) * slack
        return self.tokens_per_second(candidate, min(candidate.depth + 1.0, length))

    @property
    def deepest(self) -> int:
        """The largest depth at which the space or the gate measures drafts; 0 without drafts."""
        deepest = max(int(depth) for depth in self.space.choices["depth"])
        return deepest and max(deepest, self.budget.acceptance.gate_depth)

    def in_overlay(self, candidate: Candidate) -> Variant:
        """Load a candidate as a variant of the overlay."""
        return candidate.scaffold(self.base, self.space, "A candidate of a search.", self.overlay)

    def fidelity_task(self, candidate: Candidate) -> Task:
        """The task that compares a candidate's distributions; candidates with the same target model share it."""
        return self._task(compare_distributions, self.budget.fidelity, self.in_overlay(candidate.target), [])

    def acceptance_task(self, variant: Variant, *depths: int) -> Task:
        """The task that measures the acceptance of a variant's drafts.

        Args:
            variant: base, incumbent or candidate, as a variant of the overlay.
            depths: tokens drafted at a time (K); the gate's depth is added.
        """
        settings = self.budget.acceptance
        return self._task(measure_acceptance, settings, variant, sorted({*depths, settings.gate_depth}))

    def _task(
        self, measure: Callable[..., object], settings: Settings, variant: Variant, depths: Sequence[int]
    ) -> Task:
        recipe = variant.recipe.read_text(encoding="utf-8") if variant.recipe else None
        steps = read_recipe(variant.recipe).steps if variant.recipe else ()
        key = digest_of(
            [
                recipe,
                [dict(step.stage.data(step.parameters)) for step in steps],
                {
                    name: setting.value
                    for name, setting in variant.settings.items()
                    if name != "VLLM_MODEL" and may_affect(Effect.FIGURES, name)
                },
                *self._circumstances,
                # The size of the proof's sample does not affect this measurement.
                settings.model_dump(mode="json", exclude={"proof_prompts"}),
                str(self.budget.split),
                self.deepest,
                depths,
            ]
        )[:24]
        return Task(
            f"{key}-{settings.section}",
            f"{settings.section} of {variant.name}",
            measure,
            RungInput(
                base=self.base.name,
                variant=variant.name,
                overlay=str(self.overlay.relative_to(self.base.root)),
                budget=self.budget,
                deepest=self.deepest,
                depths=tuple(depths),
            ),
            Resources(gpus=1 if self.base.platform == "cuda" else 0, memory_bytes=ENGINE_BYTES),
        )

    @cached_property
    def _circumstances(self) -> list[Any]:
        root = self.base.root
        texts = (
            locate(self.budget.fidelity.texts, root),
            resolve_text(self.budget.acceptance.documents, root),
        )
        return [
            checkpoint.digest(self.base.weights),
            provenance.package_versions(),
            provenance.data_digests(texts, root),
        ]
