"""The whole gate on copies of a variant whose worth is known: one that is the same, and one of each damage.

`slimqwen.evaluation.gate_power` shows one damage many times to the gate responsible for it; here every gate speaks, by
the code that `make gate` runs, and the one verdict counts.
"""

import shutil
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from slimqwen import checkpoint
from slimqwen import variant as variants
from slimqwen.evaluation import damage, gate
from slimqwen.evaluation.damage import Damage
from slimqwen.progress import Progress, silent
from slimqwen.records import store
from slimqwen.variant import Variant

_SEED = 0


def run(
    one: Variant, plan_name: str, *, command: Sequence[str], progress: Progress = silent
) -> dict[str, Any]:
    """Gate an identical copy and one copy of each damage, in a repository of their own that goes afterwards.

    Args:
        one: a quantised variant with an MTP head, and a baseline; the baseline's records are used where they hold.
        plan_name: of eval/gates/.
        command: the command that asked for it.
        progress: hears each gate's own progress.

    Returns:
        {"seed", "trials": [{"damage": null for the copy that is the same, "place", "verdict", "verdicts": {gate:
        verdict}, "findings": [a gate record's items]}]}.

    Raises:
        GateError: the variant has no baseline.
        DamageError: there is nothing to damage.
        SlimqwenError: a witness cannot be heard.
    """
    checkpoint.check(one.weights, variants.making_command(one.weights, one.root))
    trials = []
    # Beside the weights: a copy of them needs as much room again.
    with tempfile.TemporaryDirectory(dir=one.root / "weights", prefix=".trial-") as place:
        root = Path(place)
        for kind in (None, *Damage):
            name = f"{one.name}-{'same' if kind is None else kind.name.lower()}"
            _lay_out(one, name, root)
            weights = root / "weights" / name
            if kind is None:
                weights.symlink_to(one.weights.resolve())
                damaged = None
            else:
                weights.mkdir()
                damaged = damage.damage(one.weights.resolve(), weights, kind, _SEED)
            path = gate.run(variants.load(name, root), plan_name, command=command, progress=progress)
            record = store.read(path)
            trials.append(
                {
                    "damage": kind,
                    "place": damaged,
                    "verdict": record["verdict"],
                    "verdicts": record["verdicts"],
                    "findings": store.read_items(path),
                }
            )
            if kind is not None:
                shutil.rmtree(weights)
    return {"seed": _SEED, "trials": trials}


def _lay_out(one: Variant, name: str, root: Path) -> None:
    """Make `name` a variant of `root` that differs from `one` in its weights alone."""
    for needed in {*one.lineage, *([one.baseline] if one.baseline else [])}:
        if not (root / "experiments" / needed).exists():
            shutil.copytree(one.root / "experiments" / needed, root / "experiments" / needed)
            weights = variants.load(needed, one.root).weights
            if weights.exists() and not (root / "weights" / weights.name).exists():
                (root / "weights").mkdir(exist_ok=True)
                (root / "weights" / weights.name).symlink_to(weights.resolve())
    if not (root / "eval").exists():
        # A copy: what a damaged checkpoint does to an engine is nothing to remember.
        shutil.copytree(one.root / "eval", root / "eval")
    copy = root / "experiments" / name
    copy.mkdir()
    shutil.copy(one.folder / "measurements.json", copy)
    (copy / "config.env").write_text(f"BASE={one.name}\nVLLM_MODEL=weights/{name}\n", encoding="utf-8")
