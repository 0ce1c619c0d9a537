"""The gate: is a variant as good as its baseline, and does the engine serve it rightly? Four witnesses, one verdict.

Fidelity sees small damage of weights, acceptance the MTP head, quality what the answers are worth, and the engine
matrix whether the combination of modes that is served gives the model's own tokens. A witness's record is used again
where nothing that decides it has changed since; else it is made.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pydantic import BaseModel, ConfigDict

from slimqwen import checkpoint
from slimqwen import variant as variants
from slimqwen.errors import SlimqwenError
from slimqwen.evaluation import (
    acceptance,
    acceptance_share,
    comparison,
    engine_matrix,
    fidelity,
    plan_file,
    quality,
    statistics,
)
from slimqwen.evaluation.verdict import Verdict, overall
from slimqwen.progress import Progress, silent
from slimqwen.records import provenance, store
from slimqwen.serving import launch
from slimqwen.variant import Variant


class GateError(SlimqwenError):
    """A variant that cannot be gated, or a plan that cannot be used."""


class Plan(BaseModel):
    """eval/gates/<name>.yaml: what each witness is asked, by the name of a file of its own folder of eval/."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    fidelity: str
    acceptance: str
    quality: str
    engine: str


@dataclass(frozen=True)
class Finding:
    """One figure of a witness.

    Attributes:
        gate: the witness.
        figure: what it is, with its unit.
        value: of the variant against the baseline.
        low: of its interval; None where it has none.
        high: of its interval.
        limit: what the interval is held against.
        verdict: of this figure.
    """

    gate: str
    figure: str
    value: float | None
    low: float | None
    high: float | None
    limit: float
    verdict: Verdict


def load_plan(name: str, root: Path) -> Plan:
    """Read eval/gates/<name>.yaml.

    Raises:
        GateError: no such file, or a field is missing or wrong.
    """
    return plan_file.read("gates", name, root, Plan, GateError, "name each witness's plan there")


def run(one: Variant, plan_name: str, *, command: Sequence[str], progress: Progress = silent) -> Path:
    """Have all witnesses speak of a variant and write its gate record.

    Args:
        one: the variant; records of it and of its baseline lie in, and go to, their folders.
        plan_name: of eval/gates/.
        command: the command that asked for it, for the records.
        progress: hears each witness's own progress.

    Returns:
        The record's path.

    Raises:
        GateError: the variant has no baseline.
        SlimqwenError: a witness cannot be heard; what the others said is recorded and used next time.
    """
    started = provenance.utc_now()
    plan = load_plan(plan_name, one.root)
    if one.baseline is None:
        raise GateError(f"{one.name} has no baseline to be as good as; name one in its measurements.json")
    baseline = variants.load(one.baseline, one.root)
    for side in (one, baseline):
        checkpoint.check(side.weights, variants.making_command(side.weights, side.root))
    told: dict[str, Any] = {"command": command, "progress": progress}
    fidelity_path = _held(one, "fidelity", plan=plan.fidelity) or fidelity.measure(
        one, plan.fidelity, stages=False, **told
    )
    depth = acceptance.load_plan(plan.acceptance, one.root).gate_depth
    counted = [
        _held(side, "acceptance", plan=plan.acceptance)
        or acceptance.measure(side, plan.acceptance, [depth], greedy_only=True, **told)
        for side in (baseline, one)
    ]
    scored = _scored((baseline, one), plan.quality, told)
    engine_path = _held(one, "engine", plan=plan.engine) or engine_matrix.measure(one, plan.engine, **told)
    findings = [
        *_of_fidelity(store.read(fidelity_path)),
        _of_acceptance(*counted),
        *_of_quality(*scored),
        _of_engine(store.read(engine_path)),
    ]
    served = launch.resolve(one)
    verdicts = {
        gate: overall([finding.verdict for finding in findings if finding.gate == gate])
        for gate in dict.fromkeys(finding.gate for finding in findings)
    }
    record = {
        "schema": "gate/1",
        "variant": one.name,
        "baseline": baseline.name,
        "plan": plan_name,
        "verdict": overall(list(verdicts.values())),
        "verdicts": verdicts,
        "records": [
            f"{path.parent.name}/{path.name}" for path in (fidelity_path, *counted, *scored, engine_path)
        ],
        "provenance": provenance.describe(
            root=one.root,
            command=command,
            started=started,
            flags=served.flags,
            environment=served.environment,
            weights=one.weights,
            datasets=[one.root / "eval" / "gates" / f"{plan_name}.yaml"],
            seeds={},
            server="started",
        ),
    }
    return store.write(one.folder, record, (vars(finding) for finding in findings))


def _held(of: Variant, kind: str, **asked: Any) -> Path | None:
    """The newest record of a kind that says what is asked and would only be repeated."""
    for path in store.records(of.folder, kind):
        record = store.read(path)
        if all(record.get(name) == value for name, value in asked.items()) and _holds(record, of):
            return path
    return None


def _scored(sides: Sequence[Variant], suite_name: str, told: Mapping[str, Any]) -> list[Path]:
    """Quality records of all sides: of all items where all have them, else of the sample that decides."""
    whole = [_held(side, "quality", suite=suite_name, limit=None, endpoint="completions") for side in sides]
    if all(whole):
        return [path for path in whole if path]
    suite = quality.load_suite(suite_name, sides[0].root)
    return [
        _held(side, "quality", suite=suite_name, limit=quality.DECIDING, endpoint="completions")
        or quality.measure(side, suite, limit=quality.DECIDING, **told)
        for side in sides
    ]


def _holds(record: store.Record, of: Variant) -> bool:
    """Whether measuring again would only repeat the record."""
    block, served = record["provenance"], launch.resolve(of)
    if record["schema"].startswith(("quality/", "engine/", "fidelity/")):
        return provenance.still_holds(block, served)
    # Made in an engine of its own, which takes these flags alone from the variant.
    mine = fidelity.weight_flags(served.flags)
    theirs = fidelity.weight_flags(block["flags"])
    return mine == theirs and provenance.same_inputs(block, of.weights, of.root)


def _of_fidelity(record: store.Record) -> Iterable[Finding]:
    """The worse mode of each figure."""
    for figure, limit in record["limits"].items():
        if figure == "of":
            continue
        mode = max(record["modes"], key=lambda each: (record["modes"][each][figure] or {"value": 0})["value"])
        found = record["modes"][mode][figure]
        verdict = overall([Verdict(record["verdicts"][each][figure]) for each in record["modes"]])
        half = statistics.Z * found["standard_error"] if found else None
        yield Finding(
            "fidelity",
            figure,
            found["value"] if found else None,
            found["value"] - half if found else None,
            found["value"] + half if found else None,
            limit,
            verdict,
        )
    joined = {mode: figures["joined_kl_nats"] for mode, figures in record["modes"].items()}
    values = [value for value in joined.values() if value is not None]
    if values:
        verdict = overall([Verdict(record["verdicts"][mode]["joined_kl_nats"]) for mode in joined])
        limit = record["limits"]["kl_nats"]
        yield Finding("fidelity", "joined_kl_nats", max(values), None, None, limit, verdict)
    if layers := record.get("layers"):
        worst = max(row["ratio"] for row in layers["rows"])
        verdict = Verdict(layers["verdict"])
        yield Finding("fidelity", "layer_error_ratio", worst, None, None, layers["limit"], verdict)


def _of_acceptance(first: Path, second: Path) -> Finding:
    share = acceptance_share.compare(first, second)
    least = store.read(second)["least_share"]
    ratio = share.ratio
    figure = f"acceptance length at K = {share.depth}, share of the baseline's"
    return Finding("acceptance", figure, ratio.value, ratio.low, ratio.high, least, share.verdict)


def _of_quality(first: Path, second: Path) -> Iterable[Finding]:
    for row in comparison.compare_quality(first, second):
        judged = row.judgement
        sign = 1 if row.higher_is_better else -1
        yield Finding(
            "quality",
            f"{row.task}: gain of {row.measure}",
            sign * row.difference.value,
            judged.low,
            judged.high,
            -judged.margin,
            judged.verdict,
        )


def _of_engine(record: store.Record) -> Finding:
    unsafe = sum(row["state"] == engine_matrix.State.UNSAFE for row in record["cells"])
    tried = sum(row["state"] != engine_matrix.State.NOT_AVAILABLE for row in record["cells"])
    figure = f"unsafe combinations of {tried} tried; the verdict is that of the one served"
    return Finding("engine", figure, unsafe, None, None, 0, engine_matrix.verdict(record))
