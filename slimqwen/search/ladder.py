"""The ladder: rungs from cheap to expensive; a candidate ends at the first that it cannot pass.

1. roofline: the GPU's bound with an acceptance length that drafts can hardly exceed; it ends where the bound lies below
   the incumbent's speed.
2. fidelity: next-token distributions compared with the base's; it ends where a whole interval lies beyond its limit.
3. acceptance: accepted drafts at its own depth, for its speed, and at the gate's depth; it ends where, at the latter,
   the interval of its share of the base's acceptance length lies below the least share.
4. speed: on a machine without the GPU the roofline with the measured acceptance length.

Rungs 2 and 3 need an engine: each is a task (`slimqwen.search.rungs`). Its value is a pure function of the recipe's
steps, flags, settings and versions, and its key is a digest of these.
"""

import itertools
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from slimqwen import checkpoint
from slimqwen.checkpoint.tensors import tensor_bytes
from slimqwen.models.shape import Shape
from slimqwen.recipe.registry import STAGES
from slimqwen.records import provenance
from slimqwen.roofline import cost
from slimqwen.roofline.architecture import shape_model
from slimqwen.roofline.gpu import GpuSheet
from slimqwen.search.candidate import Candidate
from slimqwen.search.executors import ENGINE_BYTES, Resources, Task, content_key
from slimqwen.search.rungs import Budget, RungInput, compare_distributions, measure_acceptance
from slimqwen.search.space import Space
from slimqwen.variant import Variant


@dataclass(frozen=True)
class Ladder:
    """Everything that decides what is measured of a candidate.

    Attributes:
        base: variant that candidates are made from and compared with.
        overlay: repository that candidates lie in.
    """

    base: Variant
    overlay: Path
    gpu: GpuSheet
    space: Space
    budget: Budget

    @cached_property
    def _config(self) -> dict[str, Any]:
        return checkpoint.read_config(self.base.weights)

    def shape(self, candidate: Candidate) -> Shape:
        """Dimensions of a candidate's checkpoint before it is made."""
        shape = Shape.of_config(self._config)
        folder = {"folder": self.base.root / "experiments" / self.base.name}
        for name, values in candidate.steps(self.space, shape.text["vocab_size"]):
            stage = STAGES[name]
            shape = stage.reshape(shape, stage.parameters.model_validate(values, context=folder))
        return shape

    def checkpoint_bytes(self, candidate: Candidate) -> int:
        """Bytes of a candidate's tensors."""
        return sum(itertools.starmap(tensor_bytes, self.shape(candidate).tensors.values()))

    def tokens_per_second(self, candidate: Candidate, acceptance_length: float) -> float:
        """Roofline of the decode speed on the GPU.

        Raises:
            RooflineError: the candidate does not fit the GPU, or the length is impossible for its depth.
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
            model.fitting_batch(self.gpu, decoding.context_len, candidate.depth),
        )
        step = cost.bound_decode_step(
            model, self.gpu, batch, decoding.context_len, candidate.depth, acceptance_length
        )
        return step.tokens_per_second

    def best_tokens_per_second(self, candidate: Candidate, base_rates: Sequence[float]) -> float:
        """The bound of the first rung: the base's acceptance length at the candidate's depth, plus the slack.

        Args:
            base_rates: share of the base's own drafts that are accepted up to each position.
        """
        slack = 1 + self.space.settings.acceptance_slack
        length = (1 + sum(base_rates[: candidate.depth])) * slack
        return self.tokens_per_second(candidate, min(candidate.depth + 1.0, length))

    @property
    def deepest(self) -> int:
        """The largest depth at which drafts are measured, of the space and the gate; 0 where there are none."""
        deepest = max(int(depth) for depth in self.space.choices["depth"])
        return deepest and max(deepest, self.budget.acceptance.gate_depth)

    def in_overlay(self, candidate: Candidate) -> Variant:
        """A candidate as a variant of the overlay."""
        return candidate.scaffold(self.base, self.space, "A candidate of a search.", self.overlay)

    def fidelity_task(self, candidate: Candidate) -> Task:
        """The task that compares a candidate's distributions; all candidates of one target share it."""
        return self._task("fidelity", self.in_overlay(candidate.target), [])

    def acceptance_task(self, variant: Variant, *depths: int) -> Task:
        """The task that measures the acceptance of a variant's drafts.

        Args:
            variant: base, incumbent or candidate; a variant of the overlay.
            depths: tokens drafted at a time (K), the gate's beside them.
        """
        return self._task("acceptance", variant, sorted({*depths, self.budget.acceptance.gate_depth}))

    def _task(self, rung: str, variant: Variant, depths: Sequence[int]) -> Task:
        is_fidelity = rung == "fidelity"
        settings = self.budget.fidelity if is_fidelity else self.budget.acceptance
        recipe = variant.recipe.read_text(encoding="utf-8") if variant.recipe else None
        key = content_key(
            recipe,
            {name: setting.value for name, setting in variant.settings.items() if name != "VLLM_MODEL"},
            *self._circumstances,
            # The size of the proof's sample decides nothing here.
            settings.model_dump(mode="json", exclude={"proof_prompts"}),
            str(self.budget.split),
            self.deepest,
            depths,
        )
        return Task(
            f"{key}-{rung}",
            f"{rung} of {variant.name}",
            compare_distributions if is_fidelity else measure_acceptance,
            RungInput(
                base=self.base.name,
                variant=variant.name,
                overlay=str(self.overlay.relative_to(self.base.root)),
                budget=self.budget.name,
                deepest=self.deepest,
                depths=tuple(depths),
            ),
            Resources(gpus=1 if self.base.platform == "cuda" else 0, memory_bytes=ENGINE_BYTES),
        )

    @cached_property
    def _circumstances(self) -> list[Any]:
        return [checkpoint.digest(self.base.weights), provenance.package_versions()]
