"""The check acceptance: acceptance length of the MTP head's drafts, compared with the baseline's."""

import contextlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from slimqwen import variant as variants
from slimqwen.checkpoint import read_config, text_config
from slimqwen.checkpoint.weights import has_mtp_head
from slimqwen.evals import acceptance, acceptance_share
from slimqwen.evals.acceptance import Acceptance
from slimqwen.evals.checks.check import Check
from slimqwen.evals.drafting import AcceptanceSettings, cut_class_tokens
from slimqwen.evals.fidelity import changed_reference
from slimqwen.models.vocabulary import read_tokenizer
from slimqwen.records.record import Finding
from slimqwen.stats.verdict import Verdict
from slimqwen.text.prompts import documents
from slimqwen.variant import Variant


@dataclass(frozen=True)
class AcceptanceCheck(Check[AcceptanceSettings]):
    """The check that detects damage to the MTP head; it applies if variant or baseline has an MTP head."""

    name = "acceptance"
    kind = Acceptance
    settings_type = AcceptanceSettings

    @cached_property
    def depth(self) -> int:
        """Tokens drafted at a time (K) at which both sides are compared."""
        return self.settings.depth_of(self.pair.variant)

    @property
    def sides(self) -> Sequence[Variant]:
        """Baseline and variant; none if no checkpoint that exists has an MTP head."""
        made = [side.weights for side in self.pair.sides if side.weights.is_dir()]
        return self.pair.sides if any(map(has_mtp_head, made)) else ()

    @property
    def setup(self) -> str:
        """The draft depth in words, such as "K = 4"."""
        return f"K = {self.depth}"

    @staticmethod
    def input_readers(settings: AcceptanceSettings, variant: Variant) -> Sequence[Callable[[], object]]:
        """A function that reads the documents, and one that cuts the prompts from them."""
        return [
            lambda: list(documents(settings.documents, settings.seed, variant.root)),
            lambda: _cut_prompts(settings, variant),
        ]

    def require_measurable(self) -> None:
        """Check that the documents suffice for the prompts; passes at once where nothing is drafted.

        Raises:
            CorpusError: the documents are too short for the prompts.
            EvalError: the variant has no MTP head although its baseline has one, or the context is too short for a
                prompt.
        """
        if self.sides:
            acceptance.cut_class_prompts(
                self.pair.variant, self.settings, self.depth, self.pair.invocation.split
            )

    def measure(self, side: Variant) -> Path:
        """Measure the drafts of a side, greedily and at one depth."""
        return acceptance.measure_acceptance(
            side,
            self.settings.at_depth_of(self.pair.variant),
            [self.depth],
            self.pair.invocation,
            greedy_only=True,
        )

    def changed_settings(self, record: Any, side: Variant, *, on_any_machine: bool = False) -> list[str]:
        """Names of what differs from a record: settings, K, and the baseline whose tokenizer cut the prompts."""
        changed = super().changed_settings(record, side, on_any_machine=on_any_machine)
        if record.gate_depth != self.depth:
            changed.append("drafted tokens (K)")
        return changed or changed_reference(
            record.reference, side, on_any_machine=on_any_machine, progress=self.pair.invocation.progress
        )

    def findings(self, paths: Sequence[Path]) -> Iterator[Finding]:
        """Yield one figure with its verdict: the variant's acceptance length as a share of the baseline's.

        Without an MTP head on both sides there are no records, and the figure passes.
        """
        if not paths:
            figure = "no MTP head in variant and baseline, so nothing is drafted"
            yield Finding(gate=self.name, figure=figure, value=0, limit=0, verdict=Verdict.PASS)
            return
        first, second = paths
        share = acceptance_share.compare_acceptance(first, second)
        yield Finding(
            gate=self.name,
            figure=f"acceptance length at K = {share.depth}, share of the baseline's",
            value=share.ratio.value,
            low=share.ratio.low,
            high=share.ratio.high,
            limit=share.least_share,
            verdict=share.verdict,
            p_value=share.p_value,
        )


def _cut_prompts(settings: AcceptanceSettings, variant: Variant) -> None:
    """Cut the prompts as the gate will; a CorpusError if the documents have too few tokens."""
    if variant.baseline is None:
        return
    weights = variants.load(variant.baseline, variant.root).weights
    file = weights / "tokenizer.json"
    if not file.is_file() or not has_mtp_head(weights):
        return
    tokenizer = read_tokenizer(file)
    context = int(text_config(read_config(weights))["max_position_embeddings"])
    served = variant.settings.get("VLLM_MAX_MODEL_LEN")
    with contextlib.suppress(ValueError):  # vLLM's own refusal names the line
        limit = variants.read_token_count(served.value) if served else -1
        context = min(context, limit) if limit > 0 else context
    # The gate also leaves room for a few drafted tokens, whose number is not known before vLLM reads the flags.
    cut_class_tokens(
        settings,
        lambda text: list(tokenizer.encode(text, add_special_tokens=False).ids),
        max(1, context - settings.tokens),
        variant.root,
        skips_faults=True,  # the other reader names the faults of the documents
    )
