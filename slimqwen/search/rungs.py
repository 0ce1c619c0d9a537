"""The rungs of the ladder that need an engine, each a task in a process of its own that writes no record."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from slimqwen import variant as variants
from slimqwen.evals import acceptance_share, drafting, fidelity
from slimqwen.evals.drafting import AcceptanceSettings, Item
from slimqwen.evals.fidelity_figures import FidelitySettings, Figures, summarise_texts
from slimqwen.evals.gate_checks import GateSettings
from slimqwen.progress import Progress
from slimqwen.recipe import variant_recipe
from slimqwen.records.record import Estimate, Ratio
from slimqwen.records.split import Split
from slimqwen.search.record import SearchTrial
from slimqwen.serving.command import ServerCommand
from slimqwen.variant import Variant


@dataclass(frozen=True)
class Budget:
    """The limits of quality that candidates have to keep.

    Attributes:
        name: name of its file, eval/gates/<name>.yaml.
        split: side of the texts and documents that a search sees; its proof is made on the other.
    """

    name: str
    fidelity: FidelitySettings
    acceptance: AcceptanceSettings
    split: Split | None

    @classmethod
    def of_variant(cls, base: Variant, name: str) -> "Budget":
        """The budget that eval/gates/<name>.yaml names.

        Raises:
            SettingsError: the file is missing or cannot be used.
        """
        gate = GateSettings.load(name, base.root)
        acceptance = gate.acceptance.at_depth_of(base)
        return cls(name, gate.fidelity, acceptance, gate.split("search", base.root))

    def is_met_by(self, trial: SearchTrial) -> bool:
        """Whether a trial's figures lie within the limits on the search's items, with the intervals that it has.

        A rung passes a candidate whose interval merely reaches over the limit; few of these would pass a proof.
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
        """Acceptance length of a candidate / the base's, at the gate's depth, from the items of their records."""
        depth, least = self.acceptance.gate_depth, self.acceptance.least_share
        return acceptance_share.compare_drafts(base, own, depth=depth, least_share=least).ratio


@dataclass(frozen=True)
class LimitShares:
    """Fidelity figures as shares of their limits.

    Attributes:
        worst: figure with the largest share.
        share: that share; 1 is the limit.
        lower_share: the largest share of an interval's lower end; above 1 a whole interval lies beyond its limit.
        kl_nats: KL divergence, nats a token.
    """

    worst: str
    share: float
    lower_share: float
    kl_nats: Estimate | None

    @classmethod
    def of_figures(cls, fields: Mapping[str, Any], budget: Budget) -> "LimitShares":
        """Compare the value of `compare_distributions` with the limits.

        The divergence over the joined texts has no interval, so its value counts.
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
    """What a task of a rung measures.

    Attributes:
        overlay: folder of the repository of candidates, relative to the real one.
        budget: name of the gate.
        deepest: largest depth of the search, which decides the length of prompts.
        depths: tokens drafted at a time (K); none for fidelity.
    """

    base: str
    variant: str
    overlay: str
    budget: str
    deepest: int
    depths: tuple[int, ...]

    def load(self, root: Path) -> tuple[Variant, Variant, Budget]:
        """The base, the variant and the limits."""
        base, variant = (variants.load(name, root / self.overlay) for name in (self.base, self.variant))
        return base, variant, Budget.of_variant(base, self.budget)


def compare_distributions(root: Path, argument: RungInput, progress: Progress) -> dict[str, Any]:
    """Make a variant and compare its next-token distributions with the base's; returns `Figures` as JSON."""
    from slimqwen.evals import token_distributions

    base, variant, budget = argument.load(root)
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
    base, variant, budget = argument.load(root)
    _make_checkpoint(variant, progress)
    command = ServerCommand.resolve(variant)
    settings = budget.acceptance
    # The same prompts for every depth of the space.
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
