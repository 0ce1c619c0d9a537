"""An executor whose rungs answer at once: figures that follow from the choices of a candidate alone."""

from collections.abc import Mapping
from typing import Any

from slimqwen import variant as variants
from slimqwen.processes import Failure, Outcome, Result, Task
from slimqwen.recipe import recipe_file
from slimqwen.search import rungs
from slimqwen.variant import Variant
from tests.search.in_process import InProcess

_KL_NATS = {"W4A16": 0.0014, "W8A16": 0.0001}
_CLASSES, _GROUPS = ("short", "long"), 3


class RecordedRungs(InProcess):
    def submit(self, task: Task) -> None:
        self.waiting.append(task)  # also a task that waits already: a search must not ask twice

    def outcome(self, task: Task) -> Outcome:
        candidate = variants.load(task.argument.variant, self.root / task.argument.overlay)
        if task.function is rungs.measure_acceptance:
            items = [item for depth in task.argument.depths for item in _items(candidate, depth)]
            return Result(task.key, items)
        stages = _stages(candidate)
        if stages.get("calibrate", {}).get("targets", {}).get("linear_attention") == "W4A16":
            return Failure(task.key, "its process died (SIGSEGV)")
        return Result(task.key, _fidelity(stages))


def _stages(candidate: Variant) -> dict[str, Any]:
    if candidate.recipe is None:
        return {}
    steps = recipe_file.read_recipe(candidate.recipe).steps
    return {step.stage.name: step.parameters.model_dump(mode="json") for step in reversed(steps)}


def _fidelity(stages: Mapping[str, Any]) -> dict[str, Any]:
    """KL adds up over what is packed; half of the vocabulary lies beyond every limit."""
    schemes = stages.get("calibrate", {}).get("targets", {}).values()
    kl = (
        0.00003 + sum(_KL_NATS.get(scheme, 0) for scheme in schemes) + 0.0005 * ("quantise_lm_head" in stages)
    )
    kl += 0.02 * (stages.get("prune_vocab", {}).get("size", 8192) < 7936)

    def estimate(value: float) -> dict[str, float]:
        return {"value": value, "standard_error": value / 20, "count": 30}

    figures = {
        "texts": 30, "texts_compared": 30, "positions_compared": 900, "kl_nats": estimate(kl),
        "top1_disagreement": estimate(kl * 5), "regret_nats": estimate(kl), "head_delta_mean": estimate(kl * 5),
        "head_delta_p99": estimate(kl * 20), "head_delta_max": kl * 30, "bits_per_byte": estimate(kl),
        "baseline_bits_per_byte": 0.25, "joined_kl_nats": kl, "joined_tokens": 900,
    }  # fmt: skip
    return figures


def _items(candidate: Variant, depth: int) -> list[dict[str, Any]]:
    """Every position of a draft is kept with 0.9 of the one before, less where few ids may be drafted."""
    size = _stages(candidate).get("trim_draft_vocab", {}).get("size", 8192)
    kept = 0.9 if size > 2048 else 0.8
    return [
        {
            "depth": depth, "class": name, "temperature": 0.0, "group": group, "drafts": 100 + group,
            "accepted_per_position": [round((100 + group) * kept ** (n + 1)) for n in range(depth)],
            "output_tokens": 300, "seconds": 1.0,
        }
        for name in _CLASSES for group in range(_GROUPS)
    ]  # fmt: skip
