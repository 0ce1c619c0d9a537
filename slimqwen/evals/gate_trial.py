"""Gate trial: the whole gate on an identical copy of a variant, and on one copy with each kind of damage.

`slimqwen.evals.gate_sensitivity` runs only the check responsible for a kind of damage, on many damaged copies. Here all
four checks run, with the code of `slimqwen gate check`, and only the gate's verdict counts.
"""

import shutil
import tempfile
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path

from pydantic import Field

from slimqwen import variant as variants
from slimqwen.evals import damage, gate
from slimqwen.evals.damage import Damage
from slimqwen.evals.gate import CHECKS, Gate
from slimqwen.progress import Progress, silent
from slimqwen.records import provenance, store
from slimqwen.records.record import Block, Finding, Record, Table
from slimqwen.stats.verdict import Verdict
from slimqwen.variant import Variant

_SEED = 0


class Trial(Block):
    """The gate's verdict on one copy."""

    damage: str | None = Field(description="null for the identical copy.", min_length=1)
    target: str | None = Field(
        min_length=1,
        description="Damaged layer or tensor; null where nothing is damaged.",
        validation_alias="place",
        serialization_alias="place",
    )
    verdict: Verdict
    verdicts: dict[str, Verdict] = Field(description="Of each check.")
    findings: tuple[Finding, ...] = Field(description="Items of the copy's gate record.")


class GateTrial(Record):
    """The gate's verdicts on copies of a variant that are known to be identical or damaged."""

    kind = "gate_trial"
    verb = "gate trial"

    seed: int = Field(description="Of the damages.")
    trials: tuple[Trial, ...] = Field(min_length=1)

    @property
    def verdict(self) -> Verdict:
        """Pass where the gate fails every damaged copy and does not fail the identical one."""
        correct = all((trial.verdict == Verdict.FAIL) == bool(trial.damage) for trial in self.trials)
        return Verdict.PASS if correct else Verdict.FAIL

    def tables(self, path: Path) -> list[Table]:
        """One row per copy: the verdict of each check, and the gate's."""
        columns: dict[str, Callable[[Trial], object]] = {
            "copy": lambda trial: trial.damage or "identical",
            **{check: partial(lambda check, trial: trial.verdicts[check], check) for check in CHECKS},
            "gate": lambda trial: trial.verdict,
        }
        title = f"Gate of copies of {self.variant}"
        return [Table.from_rows(title, self.trials, columns, text_columns=len(columns))]


def measure(
    variant: Variant, settings_name: str, *, command: Sequence[str], progress: Progress = silent
) -> Path:
    """Gate an identical copy and one copy with each damage, in a temporary repository, and write the record.

    Args:
        variant: quantised variant with an MTP head, and a baseline; the baseline's valid records are reused.

    Raises:
        EvalError: the variant has no baseline, or nothing to damage.
    """
    started = provenance.utc_now()
    variant.require_weights()
    trials = []
    # Beside the weights: a copy needs as much disk space as they do.
    with tempfile.TemporaryDirectory(dir=variant.root / "weights", prefix=".trial-") as folder:
        root = Path(folder)
        for kind in (None, *Damage):
            name = f"{variant.name}-{'same' if kind is None else kind.name.lower()}"
            _add_copy(variant, name, root)
            weights = root / "weights" / name
            if kind is None:
                weights.symlink_to(variant.weights.resolve())
                target = None
            else:
                weights.mkdir()
                target = damage.damage(variant.weights.resolve(), weights, kind, _SEED)
            copy = variants.load(name, root)
            path = gate.measure(copy, settings_name, command=command, progress=progress)
            record = store.read(path, Gate)
            trials.append(
                Trial(
                    damage=kind,
                    target=target,
                    verdict=record.verdict,
                    verdicts=record.verdicts,
                    findings=tuple(Finding.model_validate(item) for item in store.read_items(path)),
                )
            )
            if kind is not None:
                shutil.rmtree(weights)
    record_of_trials = GateTrial(
        variant=variant.name,
        seed=_SEED,
        trials=tuple(trials),
        provenance=provenance.of_variant(variant, command, started),
    )
    return store.write(variant.root / "results", record_of_trials)


def _add_copy(variant: Variant, name: str, root: Path) -> None:
    """Make `name` a variant of the repository `root` that differs from `variant` in its weights alone."""
    for ancestor in {*variant.lineage, *([variant.baseline] if variant.baseline else [])}:
        if not (root / "experiments" / ancestor).exists():
            shutil.copytree(variant.root / "experiments" / ancestor, root / "experiments" / ancestor)
            weights = variants.load(ancestor, variant.root).weights
            link = root / "weights" / weights.name
            if weights.exists() and not link.exists():
                link.parent.mkdir(exist_ok=True)
                link.symlink_to(weights.resolve())
    if not (root / "eval").exists():
        # A copy, because unsafe engine modes of a damaged checkpoint must not enter the original's list.
        shutil.copytree(variant.root / "eval", root / "eval")
    folder = root / "experiments" / name
    folder.mkdir()
    shutil.copy(variant.folder / "measurements.json", folder)
    (folder / "config.env").write_text(f"BASE={variant.name}\nVLLM_MODEL=weights/{name}\n", encoding="utf-8")
