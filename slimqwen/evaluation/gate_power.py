"""Figures about the gates themselves: do they catch damage, and how often do they cry wolf?

Every kind of damage is done with many seeds and shown to the gate that is responsible for it. False alarms are counted
on the baseline against itself: its figures in two batch compositions, resampled.
"""

import tempfile
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from slimqwen import checkpoint
from slimqwen import variant as variants
from slimqwen.errors import SlimqwenError
from slimqwen.evaluation import acceptance, acceptance_share, comparison, damage, fidelity, gate, statistics
from slimqwen.evaluation.answers import kept, unfinished
from slimqwen.evaluation.damage import Damage
from slimqwen.evaluation.verdict import Verdict, overall
from slimqwen.progress import Progress, silent
from slimqwen.records import store
from slimqwen.serving import launch
from slimqwen.variant import Variant

STATED_FALSE_ALARM_RATE = 0.05
"""Of a gate that fails what is the same: 1 - CONFIDENCE_LEVEL, as its intervals promise."""

REPLICATES = 200

RESPONSIBLE = {Damage.SCALES: "fidelity", Damage.ROWS: "fidelity", Damage.HEAD: "acceptance"}


class GatePowerError(SlimqwenError):
    """There is not enough to say anything about the gates."""


def examine(
    one: Variant, plan_name: str, seeds: Sequence[int], again: Variant | None, progress: Progress = silent
) -> dict[str, Any]:
    """Damage a variant's checkpoint in every way and with every seed; count false alarms on its baseline.

    What an interrupted run has shown a gate is not shown again.

    Args:
        one: a quantised variant with an MTP head, and a baseline.
        plan_name: of eval/gates/.
        seeds: of the damages.
        again: the baseline's weights served in other batches, both having quality records on the same items; without
            it quality's false alarms are not counted.
        progress: hears the damages done.

    Returns:
        {"seeds", "undamaged": {gate: {"value", "verdict"}}, "damages": [{"damage", "gate", "caught", "of",
        "rows": [{"seed", "place", "value", "verdict"}]}], "false_alarms": [{"gate", "replicates", "failed",
        "inconclusive", "rate", "stated", "verdict"}], "scale_sigma", "swapped_share"}. A value is the mean KL in nats a
        token, or the share of the baseline's acceptance length; caught is what failed.

    Raises:
        GatePowerError: no baseline.
        DamageError: nothing to damage.
        SlimqwenError: weights or records are missing.
    """
    if one.baseline is None:
        raise GatePowerError(f"{one.name} has no baseline; name a variant that has one")
    baseline = variants.load(one.baseline, one.root)
    for side in (one, baseline):
        checkpoint.check(side.weights, variants.making_command(side.weights, side.root))
    plan = gate.load_plan(plan_name, one.root)
    witnesses: dict[str, Callable[[Path], tuple[float, Verdict]]] = {
        "fidelity": _fidelity_witness(one, baseline, plan.fidelity),
        "acceptance": _acceptance_witness(one, baseline, plan.acceptance),
    }
    undamaged = {}
    damages = []
    limits = fidelity.load_plan(plan.fidelity, one.root).model_dump(mode="json")
    counting = acceptance.load_plan(plan.acceptance, one.root).model_dump(mode="json")
    with kept(unfinished("gate_power", launch.resolve(one), plan_name, limits, counting)) as seen:

        def look(name: str, key: Sequence[Any], folder: Path) -> dict[str, Any]:
            found: dict[str, Any] | None = seen.get(key)
            if found is None:
                value, verdict = witnesses[name](folder)
                found = {"value": value, "verdict": verdict}
                seen.keep(key, found)
            return found

        for name in witnesses:
            undamaged[name] = look(name, [name], one.weights.resolve())
        for kind, name in RESPONSIBLE.items():
            rows = []
            for done, seed in enumerate(seeds):
                progress(f"{kind}, seen by {name}", done, len(seeds))
                with tempfile.TemporaryDirectory() as place:
                    what = damage.damage(one.weights.resolve(), Path(place), kind, seed)
                    rows.append({"seed": seed, "place": what, **look(name, [kind, seed], Path(place))})
            progress(f"{kind}, seen by {name}", len(seeds), len(seeds))
            caught = sum(row["verdict"] == Verdict.FAIL for row in rows)
            damages.append({"damage": kind, "gate": name, "caught": caught, "of": len(rows), "rows": rows})
        alarms = false_alarms(baseline, plan, again, progress)
        seen.discard()
    return {
        "seeds": list(seeds),
        "undamaged": undamaged,
        "damages": damages,
        "false_alarms": alarms,
        "scale_sigma": damage.SCALE_SIGMA,
        "swapped_share": damage.SWAPPED_SHARE,
    }


def false_alarms(
    baseline: Variant, plan: gate.Plan, again: Variant | None, progress: Progress = silent
) -> list[dict[str, Any]]:
    """How often each gate would fail the baseline for being itself, over resampled texts, groups and items.

    Args:
        baseline: what is compared with itself, read and asked in two batch compositions.
        plan: of the gate.
        again: as for `examine`.
        progress: hears the gates done.
    """
    judges: dict[str, Callable[[np.random.Generator], list[Verdict]]] = {}
    limits = fidelity.load_plan(plan.fidelity, baseline.root)
    readings = fidelity.compare(
        baseline.weights,
        baseline.weights,
        limits,
        baseline.root,
        max_model_len=launch.resolve(baseline).max_model_len,
        progress=progress,
    )

    def fidelity_again(chance: np.random.Generator) -> list[Verdict]:
        verdicts: list[Verdict] = []
        for mode in fidelity.MODES:
            of_mode = [one for one in readings if one.mode == mode]
            drawn = [of_mode[place] for place in chance.integers(len(of_mode), size=len(of_mode))]
            figures = fidelity.summarise(drawn)[mode]
            verdicts += fidelity.judge(figures, limits.limits["same_weights"]).values()
        return verdicts

    judges["fidelity"] = fidelity_again

    counting = acceptance.load_plan(plan.acceptance, baseline.root)
    sides = [
        _counted(baseline.weights, baseline, baseline, counting, {"max-num-seqs": sequences})
        for sequences in (1, 32)
    ]

    def acceptance_again(chance: np.random.Generator) -> list[Verdict]:
        places = chance.integers(len(sides[0]), size=len(sides[0]))
        drawn = [[{**side[place], "group": n} for n, place in enumerate(places)] for side in sides]
        share = acceptance_share.judge(*drawn, depth=counting.gate_depth, least_share=counting.least_share)
        return [share.verdict]

    judges["acceptance"] = acceptance_again

    if again is not None:
        paths = comparison.quality_pair(baseline.folder, again.folder)
        record = store.read(paths[0])
        items = [comparison.by_task(path) for path in paths]

        def quality_again(chance: np.random.Generator) -> list[Verdict]:
            verdicts = []
            for task, row in record["tasks"].items():
                first, second = items[0][task], items[1][task]
                places = chance.integers(len(first), size=len(first))
                drawn = (
                    [{**side[place], "item": str(n), "cluster": None} for n, place in enumerate(places)]
                    for side in (first, second)
                )
                verdicts.append(comparison.compare_items(task, row, row["value"], *drawn).judgement.verdict)
            return verdicts

        judges["quality"] = quality_again

    found = []
    for name, judge in judges.items():
        chance = np.random.default_rng(statistics.BOOTSTRAP_SEED)
        results = []
        for done in range(REPLICATES):
            progress(f"false alarms of {name}", done, REPLICATES)
            results.append(overall(judge(chance)))
        progress(f"false alarms of {name}", REPLICATES, REPLICATES)
        failed = results.count(Verdict.FAIL)
        found.append(
            {
                "gate": name,
                "replicates": REPLICATES,
                "failed": failed,
                "inconclusive": results.count(Verdict.INCONCLUSIVE),
                "rate": failed / REPLICATES,
                "stated": STATED_FALSE_ALARM_RATE,
                "verdict": Verdict.PASS if failed / REPLICATES <= STATED_FALSE_ALARM_RATE else Verdict.FAIL,
            }
        )
    return found


def _fidelity_witness(
    one: Variant, baseline: Variant, plan_name: str
) -> Callable[[Path], tuple[float, Verdict]]:
    """Mean KL in nats a token, and the verdict of all figures, texts read alone, and of the layers."""
    plan = fidelity.load_plan(plan_name, one.root)
    served = launch.resolve(one)
    flags = fidelity.weight_flags(served.flags)

    def witness(folder: Path) -> tuple[float, Verdict]:
        readings = fidelity.compare(
            folder,
            baseline.weights,
            plan,
            one.root,
            max_model_len=served.max_model_len,
            flags=flags,
            modes=["single"],
        )
        figures = fidelity.summarise(readings)["single"]
        verdicts = list(fidelity.judge(figures, plan.limits["changed_weights"]).values())
        layers = fidelity.compare_layers(folder, baseline.weights, plan, one.root)
        return figures["kl_nats"]["value"], overall([*verdicts, *([layers["verdict"]] if layers else [])])

    return witness


def _acceptance_witness(
    one: Variant, baseline: Variant, plan_name: str
) -> Callable[[Path], tuple[float, Verdict]]:
    """The acceptance length as a share of the baseline's, and its verdict."""
    plan = acceptance.load_plan(plan_name, one.root)
    first: list[dict[str, Any]] = []

    def witness(folder: Path) -> tuple[float, Verdict]:
        if not first:
            first.extend(_counted(baseline.weights, baseline, baseline, plan))
        share = acceptance_share.judge(
            first,
            _counted(folder, one, baseline, plan),
            depth=plan.gate_depth,
            least_share=plan.least_share,
        )
        return share.ratio.value, share.verdict

    return witness


def _counted(
    folder: Path,
    one: Variant,
    baseline: Variant,
    plan: acceptance.Plan,
    more: Mapping[str, Any] | None = None,
) -> list[dict[str, Any]]:
    """Greedy continuations at the gate's depth, by a checkpoint in the place of the variant's own."""
    served = launch.resolve(one)
    flags = fidelity.weight_flags(served.flags)
    room = served.max_model_len - plan.tokens - plan.gate_depth - 1
    classes = acceptance.cut_prompts(plan, one, baseline, room)
    return acceptance.count(folder, classes, plan, [plan.gate_depth], [0.0], {**flags, **(more or {})})
