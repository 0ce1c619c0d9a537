"""Responses that run away: they hit the token limit, loop, or are empty; counted and compared with the baseline's.

A variant may answer the items of a suite as well as its baseline and still, one time in a hundred, not stop. All
generated responses of a record are judged together, paired by item, and so is their mean length.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from pydantic import BaseModel, ConfigDict, Field, PositiveFloat

from slimqwen.evals.looks import read_looks
from slimqwen.evals.quality import Quality
from slimqwen.evals.suites.loops import is_looping
from slimqwen.records import store
from slimqwen.records.record import Finding, Table
from slimqwen.stats import non_inferiority, sequential
from slimqwen.stats.intervals import Floats
from slimqwen.stats.non_inferiority import Judgement
from slimqwen.stats.verdict import Verdict

_Item = dict[str, Any]

RUNAWAY_FIGURE = "responses that run away (token limit, loop, empty): share above the baseline's"
LENGTH_FIGURE = "mean length of responses: growth, as a share of the baseline's"


class ResponseLimits(BaseModel):
    """Section `responses` of a gate's settings: limits for responses beside their score.

    Attributes:
        runaway_share: largest increase of the share of responses that run away.
        assumed_discordance: share of items of which only one of two equally good variants runs away.
        length_growth: largest growth of the mean length, as a share of the baseline's.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    runaway_share: float = Field(gt=0, lt=1)
    assumed_discordance: float = Field(gt=0, lt=1)
    length_growth: PositiveFloat

    @property
    def items_to_decide(self) -> int:
        """Number of items planned, before the first look, to decide on responses that run away."""
        return sequential.items_to_decide(self.runaway_share, self.assumed_discordance, sequential.RARE_SHARE)


@dataclass(frozen=True)
class Responses:
    """Counts over the generated responses of one record.

    Attributes:
        count: all generated responses.
        truncated: responses that the token limit cut.
        looping: responses that repeat themselves to the end.
        empty: responses of nothing but white space.
        runaway: responses that hit the token limit, loop or are empty.
        mean_length: mean length in `unit`.
        unit: tokens if the server reported them for every response of both sides, else characters.
    """

    count: int
    truncated: int
    looping: int
    empty: int
    runaway: int
    mean_length: float
    unit: str


@dataclass(frozen=True)
class ResponseComparison:
    """Responses of two records, compared in pairs by item.

    Attributes:
        first: responses of the baseline.
        second: responses of the variant.
        runaway: verdict on the growth of the share of responses that run away.
        runaway_growth: that growth.
        length: verdict on the growth of the mean length; None if fewer than two items have responses, or the
            baseline's are all empty.
        length_growth: that growth, as a share of the baseline's mean length.
        items: number of items, each with one response or several.
        items_planned: number of items planned to decide, before the first look.
    """

    first: Responses
    second: Responses
    runaway: Judgement
    runaway_growth: float
    length: Judgement | None
    length_growth: float
    items: int
    items_planned: int

    @property
    def verdicts(self) -> list[Verdict]:
        """Verdicts on the share of runaway responses and on the mean length."""
        return [self.runaway.verdict, *([self.length.verdict] if self.length else [])]

    def findings(self) -> list[Finding]:
        """The figures for the gate, each with limit and verdict; values are increases, so less is better."""
        rows: list[tuple[str, float, Judgement, int | None]] = [
            (RUNAWAY_FIGURE, self.runaway_growth, self.runaway, self.items_planned)
        ]
        if self.length:
            rows.append((LENGTH_FIGURE, self.length_growth, self.length, None))
        return [
            Finding(
                gate="quality",
                figure=figure,
                value=growth,
                low=0 - judged.high,  # no negative zero
                high=0 - judged.low,
                limit=judged.margin,
                verdict=judged.verdict,
                p_value=judged.p_value,
                items_needed=planned,
            )
            for figure, growth, judged, planned in rows
        ]


def runs_away(item: _Item) -> bool:
    """Whether the response of an item hit the token limit, loops, or is empty; False if nothing was generated."""
    return item.get("output") is not None and (bool(item.get("truncated")) or _loops(item) or _is_empty(item))


def _loops(item: _Item) -> bool:
    known = item.get("looping")  # absent in old records
    return is_looping(item["output"]) if known is None else bool(known)


def _is_empty(item: _Item) -> bool:
    return not item["output"].strip()


def compare_responses(first: Path, second: Path, limits: ResponseLimits) -> ResponseComparison | None:
    """Compare the responses of two quality records on the same items; None if nothing was generated.

    Args:
        first: file of the baseline's record.
        second: file of the variant's record.
        limits: largest increases that pass.

    Raises:
        RecordError: a record or its items are damaged.
    """
    sides = [_generated(path) for path in (first, second)]
    shared = sorted(sides[0].keys() & sides[1].keys())
    pairs = [(sides[0][key], sides[1][key]) for key in shared]
    if not pairs:
        return None
    looks = read_looks(second)
    pairs.sort(key=lambda pair: looks[pair[0]["task"]].order(pair[0]["item"]))
    has_tokens = all(item.get("output_tokens") is not None for pair in pairs for item in pair)
    first_look = len({item["item"] for item, _ in pairs if looks[item["task"]].first_look[item["item"]] == 1})
    growth = _growths(pairs, lambda item: float(runs_away(item)))
    runaway = non_inferiority.judge_loss(
        -growth,
        None,
        first_look=first_look,
        margin=limits.runaway_share,
        largest_bet_share=sequential.RARE_SHARE,
    )
    lengths = _growths(pairs, lambda item: _length(item, has_tokens=has_tokens))
    counted = [_count([pair[side] for pair in pairs], has_tokens=has_tokens) for side in (0, 1)]
    mean_length = counted[0].mean_length
    length = None
    if first_look >= 2 and mean_length:
        lengths = lengths / mean_length
        length = non_inferiority.judge_loss(
            -lengths, np.ones(len(lengths)), first_look=first_look, margin=limits.length_growth
        )
    return ResponseComparison(
        first=counted[0],
        second=counted[1],
        runaway=runaway,
        runaway_growth=float(growth.mean()),
        length=length,
        length_growth=float(lengths.mean()) if length else 0.0,
        items=len(growth),
        items_planned=limits.items_to_decide,
    )


def _generated(path: Path) -> dict[tuple[str, str, int], _Item]:
    """Items with a generated response, by task, hash and repeat."""
    return {
        (item["task"], item["item"], item.get("repeat", 0)): item
        for item in store.read_items(path)
        if item.get("output") is not None
    }


def _growths(pairs: Sequence[tuple[_Item, _Item]], measure: Callable[[_Item], float]) -> Floats:
    """By how much the second side's measure is above the first's: the mean over the responses of each item."""
    by_item: dict[tuple[str, str], list[float]] = {}
    for first, second in pairs:
        by_item.setdefault((first["task"], first["item"]), []).append(measure(second) - measure(first))
    return np.array([np.mean(growths) for growths in by_item.values()])


def _count(items: Sequence[_Item], *, has_tokens: bool) -> Responses:
    return Responses(
        count=len(items),
        truncated=sum(bool(item.get("truncated")) for item in items),
        looping=sum(map(_loops, items)),
        empty=sum(map(_is_empty, items)),
        runaway=sum(map(runs_away, items)),
        mean_length=float(np.mean([_length(item, has_tokens=has_tokens) for item in items])),
        unit="tokens" if has_tokens else "characters",
    )


def _length(item: _Item, *, has_tokens: bool) -> float:
    return float(item["output_tokens"]) if has_tokens else float(len(item["output"]))


def responses_table(first: Path, second: Path, limits: ResponseLimits) -> Table | None:
    """Table of the responses of two quality records that run away; None if nothing was generated.

    Args:
        first: file of the baseline's record.
        second: file of the variant's record.
        limits: largest increases that pass.

    Raises:
        RecordError: a record or its items are damaged.
    """
    compared = compare_responses(first, second, limits)
    if compared is None:
        return None
    names = [store.read_record(path, Quality).variant for path in (first, second)]
    if names[0] == names[1]:
        names[1] += " again"
    sides = compared.first, compared.second
    runaway, length = compared.runaway, compared.length
    rows = [
        (
            "run away, in all",
            *(f"{side.runaway} of {side.count}" for side in sides),
            f"{compared.runaway_growth:+.2%}",
            f"{-runaway.high:+.2%} to {-runaway.low:+.2%}",
            f"{runaway.margin:.2%}",
            str(runaway.verdict),
            f"{compared.items} ({compared.items_planned:,})",
        )
    ]
    for name, counts in (
        ("hit the token limit", [side.truncated for side in sides]),
        ("loop", [side.looping for side in sides]),
        ("are empty", [side.empty for side in sides]),
    ):
        rows.append((name, *map(str, counts), "", "", "", "", ""))
    if length:
        rows.append(
            (
                f"mean length, {sides[0].unit}",
                *(f"{side.mean_length:.1f}" for side in sides),
                f"{compared.length_growth:+.1%}",
                f"{-length.high:+.1%} to {-length.low:+.1%}",
                f"{length.margin:.0%}",
                str(length.verdict),
                f"{compared.items}",
            )
        )
    columns = ("responses", *names, "growth", "95 % interval", "limit", "verdict", "items (planned)")
    note = "Pass: the interval rules out a growth beyond the limit, for all looks together."
    return Table(f"Responses that run away: {names[0]} and {names[1]}", columns, tuple(rows), (note,))
