"""What stands in for a part of a suite asked from a real server: the same answers on every node, after a while."""

import json
import os
import time
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from slimqwen.evals.quality import ScoredPart
from slimqwen.evals.suites.lm_eval_run import Item, Part, TaskRun
from slimqwen.evals.suites.suite import Suite
from slimqwen.progress import Progress
from slimqwen.records import provenance, store
from slimqwen.records.record import ServedProvenance
from slimqwen.search.measurements import Measurement, Options

ITEMS = 7
OPTIONS = Options(measures=("quality",), command=("slimqwen", "demo"), parts=3, limit=ITEMS)


def describe_variants(names: Iterable[str], root: Path) -> None:
    """Write the provenance of each variant to a file, because vLLM's parser takes seconds in every process."""
    from slimqwen import variant
    from slimqwen.serving.command import ServerCommand

    for name in names:
        server = ServerCommand.resolve(variant.load(name, root))
        made = provenance.describe(server, OPTIONS.command, provenance.utc_now(), datasets=[])
        (root / f"{name}.provenance.json").write_text(json.dumps(made.as_json()))


def contents(root: Path) -> dict[str, Any]:
    """Quality records without their times, with their items, by variant."""
    found = {}
    for path in sorted(root.glob("experiments/*/quality_*.json")):
        record = json.loads(path.read_text())
        record["items"]["file"] = record["provenance"]["started"] = record["provenance"]["ended"] = None
        found.setdefault(path.parent.name, []).append([record, store.read_items(path)])
    return found


def score(root: Path, what: Measurement) -> dict[str, Any]:
    """What `measurements.ask_part` would give: an item's score is its index modulo two."""
    suite, part = Suite.load(what.settings_name, root), Part(what.part, what.options.parts)
    runs = [
        TaskRun(
            each,
            [Item(each.name, n, f"{n:016x}", float(n % 2), 1.0, None, None) for n in part.positions(ITEMS)],
            100,
            False,
        )
        for each in suite.tasks
    ]
    described = ServedProvenance.model_validate_json((root / f"{what.sides[0]}.provenance.json").read_text())
    made = described.model_copy(update={"started": provenance.utc_now(), "ended": provenance.utc_now()})
    value: dict[str, Any] = json.loads(json.dumps(ScoredPart(runs, made).as_json()))
    return value


def ask_part(root: Path, what: Measurement, progress: Progress) -> dict[str, Any]:
    """Leave the process id in a file, wait until there is a file named go, 60 s at most, and answer."""
    with (root / "pids.txt").open("a") as stream:
        stream.write(f"{os.getpid()}\n")
    progress("answering", 0, 1)
    for _ in range(600):
        if (root / "go").is_file():
            break
        time.sleep(0.1)
    return score(root, what)
