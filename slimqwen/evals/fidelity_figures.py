"""Figures of fidelity: the comparison of each text, its summary over texts, and the limits.

A mode is a way of running the variant: `PLAIN` (one text at a time, eager), "batched", or "served". The limits in
eval/gates/ say what a change of weights may cost. A variant with its baseline's own checkpoint and dtypes may cost
nothing, but two engines round differently, by an amount that depends on the machine. Its distance from the baseline in
float32 is therefore divided by the distance of the mode `PLAIN` on the same texts in the same run. The rounding noise
is in both and cancels; the ratio must lie below `unchanged_ratio`.
"""

import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, ClassVar

from pydantic import Field

from slimqwen.evals import EvalError
from slimqwen.records.record import Block, Count, Estimate, NonNegative, Positive, Share, Verdict
from slimqwen.records.settings import Settings
from slimqwen.records.split import Split
from slimqwen.stats import intervals
from slimqwen.text.documents import read_documents
from slimqwen.text.text_prefix import Prefix
from slimqwen.workspace import locate
from slimqwen.yaml_file import YamlPart

MODES = ("single", "batched")
"""In-process modes: one text at a time; several at once with a token budget that splits their prefill into chunks."""

PLAIN = "single"
"""Mode whose distance from float32 measures the rounding noise of the machine."""

SERVED = "served"
"""Mode over HTTP: several texts at once, by the variant's server with its whole config.env."""

TOP_K = 20
"""Log-probabilities per position from a server, vLLM's default limit; all other tokens form one bucket, the tail."""

HEAD_LOG_PROBABILITY = math.log(0.01)
"""Lowest log-probability of a head token, 1 %; log-probabilities of less likely tokens are too noisy to compare."""

JOINED = "joined"
"""Name of the text that joins all texts up to the context length; means leave it out, because it repeats the texts."""

_FLOAT32_NATS = 1e-6
"""Smallest divergence that float32 log-probabilities over a vocabulary can resolve, nats a token."""

FIGURE_NAMES = {
    "kl_nats": "KL, nats a token",
    "top1_disagreement": "top-1 disagreement",
    "regret_nats": "regret, nats a token",
    "head_delta_mean": "|Δ log p| of head tokens, mean",
    "head_delta_p99": "|Δ log p| of head tokens, p99",
    "bits_per_byte": "growth of bits per byte",
}


class FidelityLimits(Block):
    """Largest values that pass, for any variant.

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
        texts: path of a file of texts, relative to the repository; those of a .txt file are divided by empty lines.
        most_texts: most texts that are read, from the beginning of the file; None for all.
        prefix: text of the token that is put before every text, or several of which the first that both checkpoints
            have is taken.
        batch: number of texts that are read at once in the modes batched and served.
        limits: largest values that pass.
        unchanged_ratio: for a variant with the baseline's checkpoint and dtypes, the largest ratio that passes: its
            distance from float32 in the mode batched or served over that in the mode single.
    """

    folder: ClassVar[str] = "gates"
    section: ClassVar[str] = "fidelity"
    own_file: ClassVar[str] = "gate"

    texts: Path
    most_texts: int | None = Field(default=None, ge=2)
    prefix: Prefix
    batch: int
    limits: FidelityLimits
    unchanged_ratio: float = Field(gt=1)

    def inputs(self, root: Path) -> Sequence[Path | YamlPart]:
        """Files that the check reads: the YAML files of the settings, and the texts."""
        return [*super().inputs(root), locate(self.texts, root)]

    def read_texts(self, root: Path, split: Split | None = None) -> list[tuple[str, str]]:
        """Read ids (numbers if absent) and contents of all texts of the file, or of one side of the split.

        Raises:
            CorpusError: the file is missing or malformed.
            EvalError: a line has no text, a text is empty, or fewer than two texts are on that side.
        """
        texts = []
        for number, document in enumerate(read_documents(locate(self.texts, root), "paragraphs"), start=1):
            if not document.text:
                raise EvalError(
                    f'{document.location}: no text in this line; write {{"text": …}} or remove the line'
                )
            texts.append((document.id or str(number), document.text))
        side_texts = [each for each in texts if split is None or split.has(each[1])]
        if len(side_texts) < 2:
            side = (
                f" are on the {split}; add texts, or change proof_share of the suite"
                if split
                else ", but fidelity compares at least two; add texts"
            )
            raise EvalError(f"{locate(self.texts, root)}: {len(side_texts)} of {len(texts)} texts{side}")
        return side_texts


class Figures(Block):
    """Comparison over all texts in one mode of running the variant.

    Estimates are means over texts, null for fewer than two texts.
    """

    texts: Positive
    texts_compared: Count = Field(description="Texts whose tokens the variant kept.")
    positions_compared: Count
    kl_nats: Estimate | None
    top1_disagreement: Estimate | None
    regret_nats: Estimate | None
    head_delta_mean: Estimate | None = Field(description="nats")
    head_delta_p99: Estimate | None = Field(description="nats")
    head_delta_max: float | None = Field(description="nats; shown, never judged")
    bits_per_byte: Estimate | None = Field(description="Growth over the baseline's, on every text.")
    baseline_bits_per_byte: NonNegative
    joined_kl_nats: float | None = Field(
        description="Mean over the text that joins all texts; null if a pruned variant lacks one of its tokens."
    )
    joined_tokens: Count
    top_k: Positive | None = Field(
        default=None,
        description="Tokens of a position that are compared, the rest as one bucket; absent if all tokens are.",
    )


class NoiseRatio(Block):
    """How far a mode is from the baseline in float32, divided by how far the plain engine (mode single) is from it.

    Only for a variant with its baseline's weights, so that both distances are rounding noise. For the joined text there
    is neither an interval nor a p-value, because it is a single text.
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
        name: id of the text, or JOINED for the text that joins all others.
        mode: way of running the variant, one of MODES, or SERVED.
        bytes: length of the text in UTF-8 bytes.
        compared: positions whose distributions were compared.
        kl_nats: sum of divergences over these positions, nats.
        disagreements: positions whose likeliest token differs.
        regret_nats: sum of regrets, nats.
        baseline_bits: negative log2-likelihood of the whole text by the baseline.
        variant_bits: negative log2-likelihood of the whole text by the variant.
        head_deltas: |log-probability difference| of each token to which the baseline gives 1 % or more, nats.
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
        """The comparison as an item of a record: all fields but `head_deltas`."""
        return {name: value for name, value in asdict(self).items() if name != "head_deltas"}


def summarise_texts(texts: Sequence[TextComparison]) -> dict[str, Figures]:
    """Estimate the figures of each mode, by its name, with texts as independent observations."""
    modes = dict.fromkeys(each.mode for each in texts)
    return {mode: _figures([each for each in texts if each.mode == mode]) for mode in modes}


def judge_figures(figures: Figures, limits: FidelityLimits) -> dict[str, Verdict]:
    """A verdict for each figure: pass if its whole interval is within the limit, fail if all of it is beyond.

    Else it is inconclusive, as for a figure that could not be estimated. `joined_kl_nats`, the divergence on all texts
    joined into one, is a single value without an interval: it passes up to the limit of `kl_nats`, else it fails.
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
    """Divide the figures of each mode of one checkpoint by those of its mode single (`PLAIN`), text by text.

    1e-6 nats, what float32 can resolve, are added on both sides, so that engines which are exact to float32 have the
    ratio 1. Over HTTP the divergence counts the tail as one token, which makes its ratio smaller, never larger.

    Args:
        texts: comparisons in the mode single and in other modes; fewer than two texts give no ratios.
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
                continue  # random weights give no token 1 % or more, so there are no head tokens
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
    """Mean of a figure over the positions of a text plus `_FLOAT32_NATS`, nats, and the number of positions."""
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
