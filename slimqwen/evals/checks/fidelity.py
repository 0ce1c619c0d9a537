"""The check fidelity: next-token distributions, and tensors and settings that no stage of the recipe may change."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from slimqwen.evals import fidelity
from slimqwen.evals.checks.check import Check
from slimqwen.evals.fidelity import Fidelity, changed_reference
from slimqwen.evals.fidelity_figures import FIGURE_NAMES, FidelitySettings
from slimqwen.recipe import variant_recipe
from slimqwen.records import store
from slimqwen.records.record import Estimate, Finding
from slimqwen.stats import intervals
from slimqwen.stats.verdict import Verdict, overall
from slimqwen.variant import Variant


@dataclass(frozen=True)
class FidelityCheck(Check[FidelitySettings]):
    """The check that detects small damage to weights, by comparing next-token distributions with the baseline's."""

    name = "fidelity"
    kind = Fidelity
    measures_baseline = False
    settings_type = FidelitySettings
    loads_baseline = True

    @staticmethod
    def input_readers(settings: FidelitySettings, variant: Variant) -> Sequence[Callable[[], object]]:
        """A function that reads the texts."""
        return [lambda: settings.read_texts(variant.root)]

    def measure(self, side: Variant) -> Path:
        """Compare the variant with its baseline, and write the record."""
        return fidelity.measure_fidelity(side, self.settings, self.pair.invocation)

    def changed_settings(self, record: Any, side: Variant, *, on_any_machine: bool = False) -> list[str]:
        """Names of what differs from a record: settings, and the baseline with which the variant was compared."""
        return super().changed_settings(record, side, on_any_machine=on_any_machine) or changed_reference(
            record.reference, side, on_any_machine=on_any_machine, progress=self.pair.invocation.progress
        )

    def findings(self, paths: Sequence[Path]) -> Iterator[Finding]:
        """Yield each figure of fidelity with its verdict, then the changes that no stage of the recipe explains.

        A figure's value is the largest over the modes in which the variant was run (single, batched, served). A change
        of a tensor, a setting or a file of the tokenizer that no stage explains fails.
        """
        record = store.read_record(paths[0], Fidelity)
        for figure in FIGURE_NAMES:
            estimates = [getattr(figures, figure) for figures in record.modes.values()]
            worst: Estimate | None = max(estimates, key=lambda each: each.value if each else 0.0)
            low, high = worst.interval if worst else (None, None)
            limit = getattr(record.limits, figure)
            yield Finding(
                gate=self.name,
                figure=figure,
                value=worst.value if worst else None,
                low=low,
                high=high,
                limit=limit,
                verdict=overall([verdicts[figure] for verdicts in record.verdicts.values()]),
                p_value=max(_p_value(each, limit) if each else 1.0 for each in estimates),
            )
        if unchanged := record.unchanged:
            for row in unchanged.ratios:
                yield Finding(
                    gate=self.name,
                    figure=f"{row.figure} of the mode {row.mode}, over the noise of this machine",
                    limit=unchanged.limit,
                    **row.model_dump(include={"value", "low", "high", "verdict", "p_value"}),
                )
        joined = [each.joined_kl_nats for each in record.modes.values() if each.joined_kl_nats is not None]
        if joined:
            yield Finding(
                gate=self.name,
                figure="joined_kl_nats",
                value=max(joined),
                limit=record.limits.kl_nats,
                verdict=overall([verdicts["joined_kl_nats"] for verdicts in record.verdicts.values()]),
            )
        yield from self._recipe_findings()

    def _recipe_findings(self) -> Iterator[Finding]:
        """Tensors and settings changed by no stage: other limits would miss damage to one norm or decay."""
        variant = self.pair.variant
        if variant.recipe is None:
            return
        for what, changes in (
            ("tensors", variant_recipe.unexplained_changes(variant)),
            ("settings of config.json", variant_recipe.unexplained_settings(variant)),
            ("files of tokenizer and chat template", variant_recipe.unexplained_files(variant)),
        ):
            yield Finding(
                gate=self.name,
                figure=f"{what} changed by no stage of the recipe",
                value=len(changes),
                limit=0,
                verdict=Verdict.FAIL if changes else Verdict.PASS,
            )


def _p_value(estimate: Estimate, limit: float) -> float:
    return intervals.p_value(
        estimate.value, estimate.standard_error, estimate.count, limit, higher_is_better=False
    )
