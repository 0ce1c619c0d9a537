"""Ratios that a README's prose claims, and those that records give.

A claim such as "1.25x" or "twice as fast" stands where one joint measurement gives it: two latency records of one run
in turns, two acceptance records of one plan, the checkpoints of a variant and its baseline, or one record that holds
both sides. What only two such figures multiplied give, nobody has measured.

It is a claim about the first variant that its sentence names (but not behind "than" or "against"), else about the
README's own, else about those that its section names. A sentence is exempt where it says "(reference)", for figures
that others published; so is a hypothesis.
"""

import bisect
import contextlib
import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import permutations
from typing import Literal

from slimqwen.errors import SlimqwenError
from slimqwen.evaluation import comparison
from slimqwen.records import store
from slimqwen.records.collection import Collection, Found

Sort = Literal["time", "size", "other"]

_GENERATED = re.compile(r"<!-- table:.*?<!-- end -->", re.DOTALL)
_MORE, _FEWER, _WORSE = (
    "faster|quicker|higher|more",
    "smaller|shorter|less|fewer|lower",
    "slower|longer|larger|bigger",
)
_OF_WHAT = "speed|throughput|rate|time|latency|size"
_NUMBERS = ("two", "three", "four", "five", "six", "seven", "eight", "nine", "ten")
_COMPARED = rf"(?:as\b|{_MORE}|{_FEWER}|{_WORSE}|the\s+(?:{_OF_WHAT}))"
_SIGN = r"[x\N{MULTIPLICATION SIGN}]"
_CLAIM = re.compile(
    rf"(?<![\w.,-])(?P<figure>\d[\d,]*(?:\.\d+)?)(?:(?:{_SIGN}|\s{_SIGN}(?!\s*[\d{{(]))(?!\w)|-fold\b|"
    rf"\s+times\s+(?={_COMPARED})|\s?%\s+(?P<way>{_MORE}|{_FEWER}|{_WORSE})\b)"
    rf"|\b(?P<word>{'|'.join(_NUMBERS)})\s+times\s+(?={_COMPARED})"
    rf"|\b(?P<half>twice|half)\s+(?=as\b|the\s+(?:{_OF_WHAT}))",
    re.IGNORECASE,
)
_IS_LOSS = re.compile(
    rf"\s*(?:{_WORSE}|the\s+(?:time|latency|size)|as\s+(?:slow|long|large|big))\b", re.IGNORECASE
)
_SENTENCE_END = re.compile(r"[.!?;](?=\s)|\n\s*\n")
_AGAINST = re.compile(r"\b(?:than|as|against|over|versus|beats?|baseline|of)\s+`?[\w.-]*\w", re.IGNORECASE)
_NAME = re.compile(r"[\w.-]*\w")
_SPEED = re.compile(
    r"fast|slow|quick|speed|latenc|throughput|tokens/s|seconds|start|TTFT|TPOT|E2EL", re.IGNORECASE
)
_SIZE = re.compile(r"small|large|bigger|size|disk|bytes|\b[MG]i?B\b", re.IGNORECASE)
_EXEMPT = re.compile(r"\(reference\b")
_HYPOTHESIS = "**Hypothesis"


@dataclass(frozen=True)
class Claim:
    """A ratio in prose.

    Attributes:
        words: as written.
        line: of the file, from 1.
        gains: intervals, one for each thing that it can mean, of how many times as good its subject is.
        sort: what the sentence is about; None where it does not say.
        sentence: that it stands in; empty in a block of code, where words are in no order of speech.
        section: from the last heading to the end of that sentence.
    """

    words: str
    line: int
    gains: tuple[tuple[float, float], ...]
    sort: Sort | None
    sentence: str
    section: str

    def fits(self, gain: float) -> bool:
        """Whether a measured gain rounds to what is written."""
        return any(low * (1 - 1e-9) <= gain <= high * (1 + 1e-9) for low, high in self.gains)


@dataclass(frozen=True)
class Ratio:
    """How many times as good a variant was in one joint measurement.

    Attributes:
        gain: above 1 where it was better.
        sort: of what.
        variant: that it is of.
        sources: places of the records.
    """

    gain: float
    sort: Sort
    variant: str
    sources: tuple[str, ...]


def find(text: str) -> list[Claim]:
    """The claims of a Markdown text outside its generated tables, but for exempt ones."""
    prose = _GENERATED.sub(lambda m: re.sub(r"[^\n]", " ", m[0]), text)
    ends = [0, *(match.end() for match in _SENTENCE_END.finditer(prose)), len(prose)]
    found = []
    for match in _CLAIM.finditer(prose):
        start = ends[bisect.bisect_right(ends, match.start()) - 1]
        stop = ends[bisect.bisect_left(ends, match.end())]
        sentence = prose[start:stop]
        paragraph = prose[: match.start()].rpartition("\n\n")[2]
        if _EXEMPT.search(sentence) or paragraph.lstrip().startswith(_HYPOTHESIS):
            continue
        speed, size = bool(_SPEED.search(sentence)), bool(_SIZE.search(sentence))
        found.append(
            Claim(
                words=" ".join((match[0] + prose[match.end() : stop]).split()[:3]),
                line=prose.count("\n", 0, match.start()) + 1,
                gains=_gains(match, prose),
                sort=None if speed == size else "time" if speed else "size",
                sentence="" if prose[: match.start()].count("```") % 2 else sentence,
                section=prose[:stop].rpartition("\n#")[2],
            )
        )
    return found


def measured(collection: Collection) -> list[Ratio]:
    """Every ratio that one record, or two that were made together, give."""
    found = [ratio for one in collection.records for ratio in _of_one(one)]
    by_run: dict[tuple[str, str], list[Found]] = {}
    for one in collection.of_kind("latency"):
        by_run.setdefault((one.record["run"], one.record["workload"]), []).append(one)
    for together in by_run.values():
        for pair in permutations(together, 2):
            found += _of_latency(*pair)
    for name, stands in collection.measurements.items():
        if stands["baseline"] is not None:
            for against, of in permutations((stands["baseline"], name), 2):
                found += _of_acceptance(collection, against, of)
                found += _of_sizes(collection, against, of)
    return found


def refute(claim: Claim, ratios: Sequence[Ratio], owner: str | None) -> str | None:
    """Why a claim does not stand; None where it does.

    Args:
        claim: of a README.
        ratios: all that were measured.
        owner: the variant whose README it is; None for the repository's.
    """
    known = {ratio.variant for ratio in ratios}
    named = [word for word in _NAME.findall(_AGAINST.sub("", claim.sentence)) if word in known]
    if named:
        subjects = {named[0]}
    elif owner and claim.sentence:
        subjects = {owner}
    else:
        subjects = set(_NAME.findall(claim.section)) & known
    mine = [
        ratio
        for ratio in ratios
        if ratio.variant in subjects or any(place in claim.section for place in ratio.sources)
    ]
    fitting = (ratio for ratio in mine if claim.sort is None or ratio.sort in (claim.sort, "other"))
    if any(claim.fits(ratio.gain) for ratio in fitting):
        return None
    parts = _as_product(claim, [ratio for ratio in mine if claim.sort in (None, ratio.sort)])
    if parts is None:
        return f"{claim.words!r} is what no single measurement gives"
    told = " and ".join(f"{one.gain:.2f} ({', '.join(one.sources)})" for one in parts)
    return f"{claim.words!r} is what no single measurement gives, but a product of two: {told}"


def _as_product(claim: Claim, ratios: Sequence[Ratio]) -> tuple[Ratio, Ratio] | None:
    """Two ratios of different records that multiplied are what is claimed."""
    ordered = sorted((ratio for ratio in ratios if ratio.gain != 1), key=lambda ratio: ratio.gain)
    gains = [ratio.gain for ratio in ordered]
    for one in ordered:
        for low, high in claim.gains:
            for at in range(bisect.bisect_left(gains, low / one.gain), len(gains)):
                if gains[at] > high / one.gain:
                    break
                if not set(one.sources) & set(ordered[at].sources):
                    return one, ordered[at]
    return None


def _gains(match: re.Match[str], prose: str) -> tuple[tuple[float, float], ...]:
    """What the words can mean, each as an interval that its rounding leaves open."""
    digits = match["figure"]
    if digits is None:
        word = (match["word"] or match["half"]).lower()
        value = {"twice": 2.0, "half": 0.5}.get(word) or _NUMBERS.index(word) + 2.0
        half_unit = 0.05 if match["half"] else 0.5
    else:
        value, half_unit = float(digits.replace(",", "")), 0.5 * 10.0 ** -len(digits.partition(".")[2])
    if match["way"] is None:
        meanings: list[Callable[[float], float]] = [
            (lambda times: 1 / times) if _IS_LOSS.match(prose, match.end()) else (lambda times: times)
        ]
    else:
        value, half_unit = value / 100, half_unit / 100
        # Of a speed that is 1.2 times as high, or of a time that is 0.8 times as long.
        meanings = (
            [lambda share: 1 - share, lambda share: 1 / (1 + share)]
            if re.fullmatch(_WORSE, match["way"], re.IGNORECASE)
            else [lambda share: 1 + share, lambda share: 1 / (1 - share) if share < 1 else 1e9]
        )
    low, high = max(value - half_unit, 1e-9), value + half_unit
    ends = [sorted((meaning(low), meaning(high))) for meaning in meanings]
    return tuple((first, last) for first, last in ends)


def _of_one(found: Found) -> Iterator[Ratio]:
    """Ratios that a record holds, or whose two sides it holds as one kind of figure."""
    record = found.record

    def ratio(gain: float | None, sort: Sort = "time", of: str = found.variant) -> Iterator[Ratio]:
        if gain:
            yield Ratio(gain, sort, of, (found.place,))

    if found.kind == "start_up":
        for kind in ("warm", "baked"):
            yield from ratio((record.get(f"ready_cold_over_{kind}") or {}).get("value"))
    elif found.kind == "bench_prune_vocab":
        yield from ratio(record["copy_seconds_over_prune_seconds"]["median"])
    elif found.kind == "redistill_mtp":
        for after, before in (("after", "before"), ("kept_vllm", "before_vllm")):
            lengths = (record[f"acceptance_length_{when}"] for when in (after, before))
            yield from ratio(next(lengths) / next(lengths), "other")
    elif found.kind == "lm_head":
        for row in record["heads"]:
            yield from ratio(1 / row["bytes_share"], "size")
    elif found.kind == "vocab_coverage":
        for size in record["sizes"]:
            for row in size["sources"].values():
                yield from ratio(row["inflation"], "other")
    elif found.kind == "roofline":
        for one in record["variants"]:
            for row in one["decode"]:
                yield from ratio(row["one_over_baseline"], of=one["variant"])
                yield from ratio(row["all_over_baseline"], of=one["variant"])
    elif found.kind == "latency":
        for row in record["classes"].values():
            yield from ratio(((row.get("prefix_cache") or {}).get("repeat_speedup") or {}).get("value"))


def _of_latency(first: Found, second: Found) -> Iterator[Ratio]:
    """Speed-ups of the second, measured in turns with the first."""
    a, b = first.record["classes"], second.record["classes"]
    if a.keys() != b.keys():
        return
    gains = []
    for name in a:
        gains += [(a[name][key]["median"], b[name][key]["median"]) for key in comparison.LATENCY_MEASURES]
        gains += [
            (b[name][key], a[name][key])
            for key in ("output_throughput_tokens_per_s", "request_throughput_per_s")
        ]
        if a[name].get("goodput") and b[name].get("goodput"):
            gains.append(tuple(side[name]["goodput"]["requests_per_s"] for side in (b, a)))
    # Of all classes together.
    gains.append(
        tuple(sum(row["request_count"] * row["e2el_ms"]["mean"] for row in side.values()) for side in (a, b))
    )
    found = [above / below for above, below in gains if above and below]
    with contextlib.suppress(SlimqwenError):  # damaged items: `make check-records` names them
        found += [row.speedup for row in comparison.compare_latency(first.path, second.path) if row.speedup]
    for gain in found:
        yield Ratio(gain, "time", second.variant, (first.place, second.place))


def _of_acceptance(collection: Collection, against: str, name: str) -> Iterator[Ratio]:
    for one in collection.of(name, "acceptance"):
        for other in collection.of(against, "acceptance"):
            if not _alike(one.record, other.record):
                continue
            theirs = {row["depth"]: row["length"] for row in other.record["depths"]}
            for row in one.record["depths"]:
                before = theirs.get(row["depth"])
                if row["length"] and before and before["value"]:
                    gain = row["length"]["value"] / before["value"]
                    yield Ratio(gain, "other", name, (other.place, one.place))


def _alike(one: store.Record, other: store.Record) -> bool:
    return (one["plan"], one["classes"]) == (other["plan"], other["classes"]) and (
        one["provenance"]["datasets"] == other["provenance"]["datasets"]
    )


def _of_sizes(collection: Collection, against: str, name: str) -> Iterator[Ratio]:
    """Of the checkpoints on disk that were measured last."""
    newest = [
        max(
            [*collection.of(of, "quality"), *collection.of(of, "latency")],
            key=lambda one: str(one.record["provenance"]["ended"]),
            default=None,
        )
        for of in (against, name)
    ]
    sizes = [one.record["provenance"]["checkpoint"]["size_bytes"] for one in newest if one]
    if len(sizes) == 2 and all(sizes):
        yield Ratio(sizes[0] / sizes[1], "size", name, tuple(one.place for one in newest if one))
