"""The ladder: rungs from cheap to expensive; a candidate ends at the first that it cannot pass.

1. roofline: the GPU's bound with an acceptance length that drafts can hardly exceed; it ends where the bound lies below
   the incumbent's speed.
2. fidelity: next-token distributions compared with the base's; it ends where a whole interval lies beyond its limit.
3. acceptance: accepted drafts at its own depth, for its speed, and at the gate's depth; it ends where, at the latter,
   the interval of its share of the base's acceptance length lies below the least share.
4. speed: on a machine without the GPU the roofline with the measured acceptance length.

Rungs 2 and 3 need an engine; a task in a process of its own measures each of their answers. An answer is a pure
function of the recipe's steps, flags, settings and versions, and is kept under a digest of these.
"""

import hashlib
import itertools
import json
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
from slimqwen.records.settings import Settings
from slimqwen.roofline import cost
from slimqwen.roofline.architecture import shape_model
from slimqwen.roofline.gpu import GpuSheet
from slimqwen.search import rungs
from slimqwen.search.answers import Question
from slimqwen.search.candidate import Candidate
from slimqwen.search.executors import ENGINE_BYTES, Resources, Task
from slimqwen.search.rungs import Budget
from slimqwen.search.space import Space
from slimqwen.variant import Variant


@dataclass(frozen=True)
class Ladder:
    """Everything that decides the answers of a candidate's rungs.

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
        """The largest depth at which drafts are counted, of the space and the gate; 0 where none are counted."""
        deepest = max(int(depth) for depth in self.space.choices["depth"])
        return deepest and max(deepest, self.budget.acceptance.gate_depth)

    def in_overlay(self, candidate: Candidate) -> Variant:
        """A candidate as a variant of the overlay; its name has a digest of its recipe and lines."""
        text = json.dumps([candidate.recipe(self.base, self.space), candidate.lines(self.base)])
        name = f"{self.base.name}-{hashlib.sha256(text.encode()).hexdigest()[:10]}"
        return candidate.scaffold(name, self.base, self.space, "A candidate of a search.", self.overlay)

    def reference(self, variant: Variant, depth: int) -> Question:
        """The question that counts the drafts of the base or the incumbent at a depth (K).

        Args:
            variant: the variant of the overlay.
        """
        acceptance = self.budget.acceptance
        if variant.name == self.base.name:
            request = self._request(Candidate(depth=depth), acceptance)
        else:
            recipe = variant.recipe.read_text(encoding="utf-8") if variant.recipe else variant.name
            request = [recipe, self._shared(acceptance), depth]
        title = f"drafts of {variant.name}"
        return self._question(request, title, rungs.count_drafts, variant.name, depths=[depth])

    def questions(self, candidate: Candidate) -> dict[str, Question]:
        """The questions of a candidate's rungs by the names of their answers, in the order of the rungs.

        All candidates of one target share its fidelity, and all share the base's acceptance.
        """
        name = self.in_overlay(candidate).name
        request = self._request(candidate.target, self.budget.fidelity)
        target = self.in_overlay(candidate.target).name
        title = f"fidelity of {name}"
        questions = {"fidelity": self._question(request, title, rungs.compare_distributions, target)}
        if candidate.depth:
            acceptance = self.budget.acceptance
            depths = [acceptance.gate_depth]
            request = self._request(Candidate(depth=acceptance.gate_depth), acceptance)
            title = f"base_acceptance of {name}"
            questions["base_acceptance"] = self._question(
                request, title, rungs.count_drafts, self.base.name, depths=depths
            )
            depths = self.budget.counted_depths(candidate.depth)
            request = [*self._request(candidate, acceptance), {"depths": depths}]
            title = f"acceptance of {name}"
            questions["acceptance"] = self._question(request, title, rungs.count_drafts, name, depths=depths)
        return questions

    def _request(self, candidate: Candidate, settings: Settings) -> Any:
        changes = [candidate.recipe(self.base, self.space), candidate.lines(self.base)]
        return [changes, self._shared(settings)]

    def _shared(self, settings: Settings) -> Any:
        """Everything but the candidate that decides an answer."""
        split = self.budget.split
        side = split.as_json() if split else None
        # The size of the proof's sample decides no answer of a rung.
        fields = settings.model_dump(mode="json", exclude={"proof_prompts"})
        return [*self._circumstances, fields, side, self.deepest]

    @cached_property
    def _circumstances(self) -> list[Any]:
        flags = {name: setting.value for name, setting in self.base.settings.items()}
        return [checkpoint.digest(self.base.weights), flags, provenance.package_versions()]

    def _question(
        self, request: Any, title: str, function: Any, candidate: str, **extra_argument: Any
    ) -> Question:
        argument = {
            "base": self.base.name,
            "candidate": candidate,
            "overlay": str(self.overlay.relative_to(self.base.root)),
            "budget": self.budget.name,
            "deepest": self.deepest,
            "prompts": self.budget.acceptance.prompts,
            **extra_argument,
        }
        digest = hashlib.sha256(json.dumps(request, sort_keys=True, default=str).encode()).hexdigest()
        gpus = 1 if self.base.platform == "cuda" else 0
        needs = Resources(gpus=gpus, memory_bytes=ENGINE_BYTES)
        return Question(
            request, Task(f"{digest[:24]}-search-{title.split()[0]}", title, function, argument, needs)
        )
