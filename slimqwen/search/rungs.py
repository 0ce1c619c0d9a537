"""The rungs of the ladder that need an engine: functions of tasks, which run in their own process, without records."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from slimqwen import variant as variants
from slimqwen.evals import acceptance_share, drafting, fidelity
from slimqwen.evals.checks import GateSettings
from slimqwen.evals.drafting import AcceptanceSettings, Item
from slimqwen.evals.fidelity_figures import FidelitySettings, Figures, summarise_texts
from slimqwen.progress import Progress
from slimqwen.recipe import variant_recipe
from slimqwen.records.record import Estimate, Ratio
from slimqwen.records.split import Split
from slimqwen.search.record import SearchTrial
from slimqwen.serving.command import ServerCommand
from slimqwen.variant import Variant


@dataclass(frozen=True)
class Budget:
    """The quality budget: limits that candidates have to keep.

    Attributes:
        split: side of texts and documents that the search uses; the proof uses the other side.
    """

    fidelity: FidelitySettings
    acceptance: AcceptanceSettings
    split: Split | None

    @classmethod
    def of_variant(cls, base: Variant, name: str) -> "Budget":
        """Read the budget of a base from eval/gates/<name>.yaml.

        Raises:
            SettingsError: the file is missing or cannot be used.
        """
        gate = GateSettings.load(name, base.root)
        acceptance = gate.of(AcceptanceSettings).at_depth_of(base)
        return cls(gate.of(FidelitySettings), acceptance, gate.split("search", base.root))

    @property
    def name(self) -> str:
        """Name of the file, eval/gates/<name>.yaml."""
        return self.fidelity.name

    def is_met_by(self, trial: SearchTrial) -> bool:
        """Whether a trial keeps its limits: KL and acceptance with their whole interval, the others with their value.

        This is stricter than a rung, which also passes a candidate whose interval contains the limit; few of those
        would pass a proof.
        """
        kl, share = trial.kl_nats, trial.acceptance_share
        most, least = self.fidelity.limits.kl_nats, self.acceptance.least_share
        return (
            trial.passed
            and (trial.worst_share or 0) <= 1
            and (kl is None or kl.interval[1] <= most)
            and (share is None or share.low >= least)
        )

    def acceptance_share(self, base: Sequence[Item], own: Sequence[Item]) -> Ratio:
        """Acceptance length of a candidate over that of the base, at the gate's depth, from both lists of items."""
        depth, least = self.acceptance.gate_depth, self.acceptance.least_share
        return acceptance_share.compare_drafts(base, own, depth=depth, least_share=least).ratio


@dataclass(frozen=True)
class LimitShares:
    """Fidelity figures as shares of their limits.

    Attributes:
        worst: name of the figure with the largest share.
        share: the largest share; 1 is the limit.
        lower_share: the largest share of an interval's lower end; above 1, a whole interval is beyond its limit.
        kl_nats: KL divergence, nats a token.
    """

    worst: str
    share: float
    lower_share: float
    kl_nats: Estimate | None

    @classmethod
    def of_figures(cls, fields: Mapping[str, Any], budget: Budget) -> "LimitShares":
        """Divide figures from `compare_distributions` by their limits.

        The divergence of the joined text has no interval, so its value is used as the interval's lower end.
        """
        limits = budget.fidelity.limits
        figures = Figures.model_validate(fields)
        values: dict[str, tuple[float, float]] = {}
        for name, limit in limits:
            estimate: Estimate | None = getattr(figures, name)
            if estimate is not None:
                values[name] = (estimate.value / limit, estimate.interval[0] / limit)
        if figures.joined_kl_nats is not None:
            share = figures.joined_kl_nats / limits.kl_nats
            values["joined_kl_nats"] = (share, share)
        worst = max(values, key=lambda name: values[name][0])
        return cls(worst, values[worst][0], max(lower for _, lower in values.values()), figures.kl_nats)


@dataclass(frozen=True)
class RungInput:
    """Argument of a rung's task: what to measure.

    Attributes:
        base: name of the base.
        variant: name of the variant in the overlay.
        overlay: folder of the overlay, relative to the repository.
        deepest: largest depth of the search, for which prompts must leave room.
        depths: tokens drafted at a time (K); none for fidelity.
    """

    base: str
    variant: str
    overlay: str
    budget: Budget
    deepest: int
    depths: tuple[int, ...]

    def load(self, root: Path) -> tuple[Variant, Variant]:
        """Load the base and the variant."""
        base, variant = (variants.load(name, root / self.overlay) for name in (self.base, self.variant))
        return base, variant


def compare_distributions(root: Path, argument: RungInput, progress: Progress) -> dict[str, Any]:
    """Make a variant and compare its next-token distributions with the base's; returns `Figures` as JSON."""
    from slimqwen.evals import token_distributions

    base, variant = argument.load(root)
    budget = argument.budget
    _make_checkpoint(variant, progress)
    command = ServerCommand.resolve(variant)
    reference = token_distributions.ReferenceTexts.load(
        variant.weights,
        base.weights,
        budget.fidelity,
        base.root,
        max_model_len=command.max_model_len,
        split=budget.split,
    )
    texts = token_distributions.compare_in_process(
        reference,
        variant.weights,
        flags=fidelity.weight_flags(command.flags),
        modes=("single",),
        progress=progress,
    )
    return summarise_texts(texts)["single"].as_json()


def measure_acceptance(root: Path, argument: RungInput, progress: Progress) -> list[dict[str, Any]]:
    """Make a variant and measure the acceptance of its greedy drafts; returns items of an acceptance record."""
    base, variant = argument.load(root)
    budget = argument.budget
    _make_checkpoint(variant, progress)
    command = ServerCommand.resolve(variant)
    settings = budget.acceptance
    # Cut for the largest depth, so that every depth of the space has the same prompts.
    longest = command.max_model_len - settings.tokens - argument.deepest - 1
    classes = drafting.cut_prompts(settings, variant, base, longest, budget.split)
    flags = fidelity.weight_flags(command.flags)
    return [
        item
        for depth in argument.depths
        for item in drafting.measure_drafts(variant.weights, classes, settings, depth, [0.0], flags, progress)
    ]


def _make_checkpoint(variant: Variant, progress: Progress) -> None:
    if variant.recipe is not None:
        variant_recipe.run_recipe(variant, progress=progress)
    variant.require_weights()
