"""A record measured again, by what the record itself says was measured, with the present code; then held against it.

Nothing is taken from the command line that a record states: one script may have made several records, and another may
make them today.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Any

import numpy as np

from slimqwen import checkpoint
from slimqwen import variant as variants
from slimqwen.errors import SlimqwenError
from slimqwen.evaluation import comparison, latency, quality, statistics, workload
from slimqwen.progress import Progress, silent
from slimqwen.records import differences, store
from slimqwen.records.differences import Difference
from slimqwen.serving import launch
from slimqwen.variant import Variant

Items = Sequence[Mapping[str, Any]]


class ReplayError(SlimqwenError):
    """A record that cannot be measured again."""


@dataclass(frozen=True)
class Change:
    """One figure then and now.

    Attributes:
        name: the figure, with its unit.
        before: what the record says.
        after: what was measured now.
        value: after minus before over the same items; of a time, after divided by before, over several rounds that of
            their geometric means.
        low: of the value's 95 % interval.
        high: of the value's 95 % interval.
        count: items, or requests, that both sides have.
        none: the value of no change: 0, or 1 for a ratio.
    """

    name: str
    before: float
    after: float
    value: float
    low: float
    high: float
    count: int
    none: float

    @property
    def none_inside(self) -> bool:
        """Whether no change lies within the interval."""
        return self.low <= self.none <= self.high


@dataclass(frozen=True)
class Replay:
    """A record and its repetition.

    Attributes:
        record: that was replayed.
        repetition: the new record.
        reproduced: of answers, every one and its score came out equal; of times, the ratio of all of them together
            has 1.00 within its interval.
        summary: the same in words and numbers.
        changes: figure by figure; of times, all together first.
        differences: in what the circumstances were not the same.
    """

    record: Path
    repetition: Path
    reproduced: bool
    summary: str
    changes: tuple[Change, ...]
    differences: tuple[Difference, ...]


def replay(
    path: Path,
    *,
    command: Sequence[str],
    root: Path | None = None,
    port: int | None = None,
    progress: Progress = silent,
) -> Replay:
    """Measure again what made a record; the new record goes where a record of its kind goes, beside the old one.

    Args:
        path: of a quality or latency record, <folder>/<variant>/<record>.json. A latency record that was made in turns
            with others is made in turns with them again.
        command: the command that asked for it, for the new record.
        root: the repository.
        port: of a server that runs already, or of those to be started; any free one by default.
        progress: told of what the measurement tells.

    Raises:
        ReplayError: no kind of record that can be replayed.
        MissingCheckpointError: the checkpoint is not here; names the command that makes it.
        RecordError: the record or its items are damaged.
        SlimqwenError: what the measurement itself raises; no new record then.
    """
    root = root or variants.repository_root()
    record = store.read(path)
    kind = str(record["schema"]).partition("/")[0]
    if kind not in _KINDS:
        raise ReplayError(
            f"{path.parent.name}/{path.name} is a record of kind {kind}; "
            f"{' and '.join(_KINDS)} records can be replayed, the others are made by the command that they name"
        )
    before = store.read_items(path)
    measure, compare = _KINDS[kind]
    chosen = _variants(record, root)
    port = launch.free_port() if port is None else port
    repetition = measure(chosen, record, path.parent.parent, command=command, port=port, progress=progress)
    after = store.read(repetition)
    reproduced, summary, changes = compare((record, before), (after, store.read_items(repetition)))
    differing = differences.between(record["provenance"], after["provenance"])
    return Replay(path, repetition, reproduced, summary, tuple(changes), tuple(differing))


def _variants(record: store.Record, root: Path) -> list[Variant]:
    """The variants that were measured together, baselines first as every command has it; their checkpoints are here."""
    chosen = [variants.load(name, root) for name in (record["variant"], *record.get("interleaved_with", ()))]
    for one in chosen:
        checkpoint.check(one.weights, variants.making_command(one.weights, root))
    baselines = {one.baseline for one in chosen}
    return sorted(chosen, key=lambda one: one.name not in baselines)


def _measure_quality(chosen: Sequence[Variant], record: store.Record, folder: Path, **told: Any) -> Path:
    (one,) = chosen
    suite = quality.load_suite(record["suite"], one.root)
    # A run may have had all tasks think, or none, whatever the suite says.
    thinking = {task: row["settings"].get("thinking") for task, row in record["tasks"].items()}
    tasks = tuple(
        task.model_copy(update={"thinking": thinking[task.name]})
        if thinking.get(task.name) is not None
        else task
        for task in suite.tasks
    )
    return quality.measure(
        one,
        suite.model_copy(update={"tasks": tasks}),
        limit=record["limit"],
        chat=record["endpoint"] == "chat",
        records_folder=folder / one.name,
        **told,
    )


def _measure_latency(chosen: Sequence[Variant], record: store.Record, folder: Path, **told: Any) -> Path:
    paths = latency.measure(
        chosen,
        workload.load(record["workload"], chosen[0].root),
        rounds=record["rounds"],
        records_folders=[folder / one.name for one in chosen],
        **told,
    )
    return paths[[one.name for one in chosen].index(record["variant"])]


_Side = tuple[store.Record, Items]


def _compare_quality(first: _Side, second: _Side) -> tuple[bool, str, list[Change]]:
    sides = [{_key(item): item for item in items} for _, items in (first, second)]
    shared = [key for key in sides[0] if key in sides[1]]
    unequal = [key for key in shared if _answer(sides[0][key]) != _answer(sides[1][key])]
    alone = len(sides[0].keys() ^ sides[1].keys())
    changes = []
    for task, row in first[0]["tasks"].items():
        mine, theirs = ([side[key] for key in shared if key[0] == task] for side in sides)
        if len(mine) < 2 or task not in second[0]["tasks"]:
            continue
        paired = comparison.compare_items(task, row, second[0]["tasks"][task]["value"], mine, theirs)
        bounds = (paired.judgement.low, paired.judgement.high)
        # The interval that a verdict would rest on, of the difference and not of the gain.
        low, high = bounds if paired.higher_is_better else (-bounds[1], -bounds[0])
        changes.append(
            Change(
                f"{task}, {paired.measure}",
                paired.first,
                paired.second,
                paired.difference.value,
                low,
                high,
                len(mine),
                0.0,
            )
        )
    if not unequal and not alone:
        return True, f"reproduced: all {len(shared):,} answers and their scores are equal", changes
    told = f"{len(unequal):,} of {len(shared):,} answers or their scores differ"
    return False, f"{told}, {alone:,} items are on one side alone" if alone else told, changes


def _key(item: Mapping[str, Any]) -> tuple[str, str, int]:
    return item["task"], item["item"], item.get("repeat", 0)


def _answer(item: Mapping[str, Any]) -> tuple[float, str | None]:
    return item["value"], item["output"]


def _compare_latency(first: _Side, second: _Side) -> tuple[bool, str, list[Change]]:
    sides = [comparison.by_class_and_round(items) for _, items in (first, second)]
    shared = [name for name in first[0]["classes"] if all(side.get(name) for side in sides)]
    if not shared:
        raise ReplayError(
            f"no class of requests of then and now is the same: {', '.join(first[0]['classes'])}"
        )
    counts = {name: sum(map(len, sides[0][name].values())) for name in shared}
    # After over before: how many times as long, where a comparison says how many times as fast.
    found = comparison.time_of_all(sides[::-1], [counts, counts], in_turns=False)
    together = Change(
        "all classes, time of all requests, ms",
        found.second_ms,
        found.first_ms,
        found.speedup.value,
        found.speedup.low,
        found.speedup.high,
        sum(counts.values()),
        1.0,
    )
    changes = [together, *(change for name in shared for change in _of_class(name, sides))]
    other = [
        name
        for name in first[0]["classes"]
        if first[0]["classes"][name].get("prompts_sha256")
        != second[0]["classes"].get(name, {}).get("prompts_sha256")
    ]
    inside = "lies inside" if together.none_inside else "lies outside"
    over = f"{found.rounds} rounds" if found.rounds else "requests"
    summary = f"now / then {together.value:.2f} [{together.low:.2f}, {together.high:.2f}] over {over}: 1.00 {inside}"
    if other:
        summary += f"; other prompts than then in {', '.join(other)}"
    return together.none_inside and not other, summary, changes


def _of_class(name: str, sides: Sequence[Mapping[str, comparison.Rounds]]) -> Iterator[Change]:
    for measure in comparison.LATENCY_MEASURES:
        before, after = (comparison.by_round(side[name], measure) for side in sides)
        found, _ = statistics.ratio_by_round(after, before, in_turns=False)
        all_before, all_after = (np.concatenate(list(one.values())) for one in (before, after))
        yield Change(
            f"{name}, median {measure}",
            float(np.median(all_before)),
            float(np.median(all_after)),
            found.value,
            found.low,
            found.high,
            min(len(all_before), len(all_after)),
            1.0,
        )


_KINDS: Mapping[str, tuple[Callable[..., Path], Callable[[_Side, _Side], tuple[bool, str, list[Change]]]]] = (
    MappingProxyType(
        {"quality": (_measure_quality, _compare_quality), "latency": (_measure_latency, _compare_latency)}
    )
)
