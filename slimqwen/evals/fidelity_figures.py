"""Figures of fidelity: the comparison of each text, its summary over texts, and the limits.

A person wrote the limits: what a change of weights may cost. A variant with its baseline's own checkpoint and dtypes
may cost nothing, but two engines round differently, and by how much depends on the machine. Its distance from the
baseline in float32 is therefore divided by that of the plainest engine (`PLAIN`: one text at a time, eager) on the same
texts in the same run, and the ratio must lie below `unchanged_ratio`. The noise of a machine is in both and cancels.
"""

import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, ClassVar

from pydantic import Field

from slimqwen.records.record import Block, Count, Estimate, NonNegative, Positive, Share, Verdict
from slimqwen.records.settings import Settings
from slimqwen.stats import intervals

MODES = ("single", "batched")
"""In-process modes: one text at a time; several at once with a token budget that splits their prefill into chunks."""

PLAIN = "single"
"""Mode whose distance from float32 is the noise of the machine."""

SERVED = "served"
"""Mode over HTTP: several texts at once, by the variant's server with its whole config.env."""

TOP_K = 20
"""Log-probabilities per position from a server, vLLM's default limit; all other tokens form one bucket, the tail."""

HEAD_LOG_PROBABILITY = math.log(0.01)
"""Lowest log-probability of a head token; further down, in the tail, log-probabilities are noise."""

JOINED = "joined"
"""Name of the text that joins all texts up to the context's length; it repeats them, so every mean leaves it out."""

_FLOAT32_NATS = 1e-6
"""Divergence that float32 log-probabilities of a vocabulary resolve, nats a token."""

FIGURE_NAMES = {
    "kl_nats": "KL, nats a token",
    "top1_disagreement": "top-1 disagreement",
    "regret_nats": "regret, nats a token",
    "head_delta_mean": "|Δ log p| of head tokens, mean",
    "head_delta_p99": "|Δ log p| of head tokens, p99",
    "bits_per_byte": "growth of bits per byte",
}


class FidelityLimits(Block):
    """Largest values that pass, whatever was changed.

    Attributes:
        kl_nats: mean KL(baseline || variant) in nats a token.
        top1_disagreement: share of positions whose likeliest token differs.
        regret_nats: mean loss of the baseline's log-probability if the variant's likeliest token is chosen, in nats.
        head_delta_mean: mean |log-probability difference| in nats of the text's tokens to which the baseline gives 1 %
            or more.
        head_delta_p99: 99th percentile of these differences, in nats.
        bits_per_byte: growth in bits per byte.
    """

    kl_nats: float
    top1_disagreement: float
    regret_nats: float
    head_delta_mean: float
    head_delta_p99: float
    bits_per_byte: float


class FidelitySettings(Settings):
    """Section fidelity of eval/gates/<name>.yaml.

    Attributes:
        texts: path of a .jsonl file of {"id", "text"}, relative to the repository.
        prefix: token before every text, by name.
        batch: texts at once in the modes batched and served.
        limits: largest values that pass.
        unchanged_ratio: most times that the distance from float32 of the plain engine may be reached in other modes by
            a variant with the baseline's checkpoint and dtypes.
    """

    folder: ClassVar[str] = "gates"
    section: ClassVar[str] = "fidelity"
    own_file: ClassVar[str] = "gate"

    texts: Path
    prefix: str
    batch: int
    limits: FidelityLimits
    unchanged_ratio: float = Field(gt=1)


class Figures(Block):
    """Comparison over all texts in one mode; estimates are means over texts, null for fewer than two texts."""

    texts: Positive
    texts_compared: Count = Field(description="Texts whose tokens the variant kept.")
    positions_compared: Count
    kl_nats: Estimate | None
    top1_disagreement: Estimate | None
    regret_nats: Estimate | None
    head_delta_mean: Estimate | None = Field(description="nats")
    head_delta_p99: Estimate | None = Field(description="nats")
    head_delta_max: float | None = Field(description="nats; shown, never judged")
    bits_per_byte: Estimate | None = Field(description="Growth, on every text.")
    baseline_bits_per_byte: NonNegative
    joined_kl_nats: float | None = Field(
        description="Mean over all texts joined; null if a pruned variant lacks one of their tokens."
    )
    joined_tokens: Count
    top_k: Positive | None = Field(
        default=None,
        description="Tokens of a position that are compared, the others as one; absent for all of them.",
    )


class NoiseRatio(Block):
    """A figure of unchanged weights in one mode, divided by the same figure of the plain engine.

    The joined text is a single one: its ratio has neither an interval over texts nor a p-value.
    """

    mode: str
    figure: str
    value: NonNegative
    low: NonNegative | None = None
    high: NonNegative | None = None
    p_value: Share | None = Field(default=None, description="One-sided, that it is at least the limit.")
    verdict: Verdict


@dataclass
class TextComparison:
    """Comparison of one text in one mode.

    Attributes:
        mode: one of MODES, or SERVED.
        bytes: length of the text in UTF-8 bytes.
        compared: positions whose distributions were compared.
        kl_nats: sum of divergences over these positions, nats.
        disagreements: positions whose likeliest token differs.
        regret_nats: sum of regrets, nats.
        baseline_bits: negative log2-likelihood of the whole text by the baseline.
        variant_bits: negative log2-likelihood of the whole text by the variant.
        head_deltas: |log-probability difference| of each head token, nats.
    """

    name: str
    mode: str
    bytes: int
    compared: int = 0
    kl_nats: float = 0.0
    disagreements: int = 0
    regret_nats: float = 0.0
    baseline_bits: float = 0.0
    variant_bits: float = 0.0
    head_deltas: list[float] = field(default_factory=list)

    def as_item(self) -> dict[str, Any]:
        """Fields for the items of a record."""
        return {name: value for name, value in asdict(self).items() if name != "head_deltas"}


def summarise_texts(texts: Sequence[TextComparison]) -> dict[str, Figures]:
    """Figures of each mode, with standard errors over texts."""
    modes = dict.fromkeys(each.mode for each in texts)
    return {mode: _figures([each for each in texts if each.mode == mode]) for mode in modes}


def judge_figures(figures: Figures, limits: FidelityLimits) -> dict[str, Verdict]:
    """A verdict for each limit: pass if the whole interval is within it, fail if all of it is beyond.

    The joined text is a single one: its divergence has no interval, so the value itself is compared with the limit.
    """
    verdicts = {}
    for name, limit in limits:
        estimate: Estimate | None = getattr(figures, name)
        verdicts[name] = Verdict.INCONCLUSIVE
        if estimate is not None:
            verdicts[name] = Verdict.from_interval(*estimate.interval, limit, higher_is_better=False)
    if figures.joined_kl_nats is not None:
        passed = figures.joined_kl_nats <= limits.kl_nats
        verdicts["joined_kl_nats"] = Verdict.PASS if passed else Verdict.FAIL
    return verdicts


def noise_ratios(texts: Sequence[TextComparison], limit: float) -> list[NoiseRatio]:
    """Compare the modes of one checkpoint with its `PLAIN` mode, text by text.

    `_FLOAT32_NATS` is added on both sides, so that engines which are exact to float32 have the ratio 1. Over HTTP the
    divergence counts the tail as one token, which makes its ratio smaller, never larger.

    Args:
        texts: of `PLAIN` and of other modes; no ratios follow from fewer than two.
        limit: largest ratio that passes.
    """
    by_mode: dict[str, dict[str, TextComparison]] = {}
    for each in texts:
        by_mode.setdefault(each.mode, {})[each.name] = each
    plain = by_mode.pop(PLAIN)
    names = [name for name, each in plain.items() if name != JOINED and each.compared]
    if len(names) < 2:
        return []
    rows = []
    for mode, own in by_mode.items():
        for figure in ("kl_nats", "head_delta_mean"):
            first, first_weights = zip(*(_nats(plain[name], figure) for name in names), strict=True)
            second, second_weights = zip(*(_nats(own[name], figure) for name in names), strict=True)
            if not (any(first_weights) and any(second_weights)):
                continue  # no token is likely: a model of random weights has no head of its distributions
            values = first, second, first_weights, second_weights
            ratio = intervals.paired_ratio(*values)
            rows.append(
                NoiseRatio(
                    mode=mode,
                    figure=figure,
                    value=ratio.value,
                    low=ratio.low,
                    high=ratio.high,
                    p_value=intervals.paired_ratio_p_value(*values, limit, higher_is_better=False),
                    verdict=Verdict.from_interval(ratio.low, ratio.high, limit, higher_is_better=False),
                )
            )
        joined = _nats(own[JOINED], "kl_nats")[0] / _nats(plain[JOINED], "kl_nats")[0]
        verdict = Verdict.PASS if joined <= limit else Verdict.FAIL
        rows.append(NoiseRatio(mode=mode, figure="joined_kl_nats", value=joined, verdict=verdict))
    return rows


def _nats(text: TextComparison, figure: str) -> tuple[float, int]:
    """The mean of a figure over the positions of a text, at least `_FLOAT32_NATS`, and their number."""
    deltas = text.head_deltas
    total, count = (text.kl_nats, text.compared) if figure == "kl_nats" else (sum(deltas), len(deltas))
    return max(total, 0.0) / count + _FLOAT32_NATS if count else _FLOAT32_NATS, count


def _figures(texts_and_joined: Sequence[TextComparison]) -> Figures:
    texts = [each for each in texts_and_joined if each.name != JOINED]
    joined = next((each for each in texts_and_joined if each.name == JOINED), None)
    compared = [each for each in texts if each.compared]
    positions = [each.compared for each in compared]

    def mean_over_positions(sums: Sequence[float]) -> Estimate | None:
        if len(compared) < 2:
            return None
        means = [total / count for total, count in zip(sums, positions, strict=True)]
        return intervals.mean(means, positions)

    deltas = [each.head_deltas for each in compared if each.head_deltas]
    delta_mean = delta_p99 = None
    if len(deltas) >= 2:
        counts = [len(each) for each in deltas]
        delta_mean = intervals.mean([sum(each) / len(each) for each in deltas], counts)
        delta_p99 = intervals.percentile_over_groups(deltas, 99)
    sizes = [each.bytes for each in texts]
    growth = intervals.paired_difference(
        [each.baseline_bits / each.bytes for each in texts],
        [each.variant_bits / each.bytes for each in texts],
        sizes,
    )
    top_k = {"top_k": TOP_K} if texts[0].mode == SERVED else {}
    return Figures(
        texts=len(texts),
        texts_compared=len(compared),
        positions_compared=sum(positions),
        kl_nats=mean_over_positions([each.kl_nats for each in compared]),
        top1_disagreement=mean_over_positions([each.disagreements for each in compared]),
        regret_nats=mean_over_positions([each.regret_nats for each in compared]),
        head_delta_mean=delta_mean,
        head_delta_p99=delta_p99,
        head_delta_max=max((delta for each in deltas for delta in each), default=None),
        bits_per_byte=Estimate(growth.value, growth.standard_error, growth.count),
        baseline_bits_per_byte=sum(each.baseline_bits for each in texts) / sum(sizes),
        joined_kl_nats=joined.kl_nats / joined.compared if joined and joined.compared else None,
        joined_tokens=joined.compared if joined else 0,
        **top_k,
    )
