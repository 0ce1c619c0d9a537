"""The whole pipeline on the embedded model: calibrate tiny-awq, score and time it beside tiny, compare."""

import argparse
import sys
import time
from collections.abc import Callable
from pathlib import Path

from _console import console, progress_bar, run

from slimqwen import checkpoint, variant
from slimqwen.evaluation import latency, quality, workload
from slimqwen.recipe import recipe_file, runner
from slimqwen.records import provenance, store
from slimqwen.report import tables
from slimqwen.serving import launch

BASELINE, QUANTISED = "tiny", "tiny-awq"


def main() -> int:
    """Run the four steps, each of which reuses what an earlier run on this machine has left."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--limit", type=int, default=150, help="items a task (default: %(default)s)")
    parser.add_argument("--rounds", type=int, default=3, help="latency rounds (default: %(default)s)")
    arguments = parser.parse_args()
    root = variant.repository_root()
    folders = [root / "demo" / name for name in (BASELINE, QUANTISED)]
    started = time.monotonic()

    _say(started, f"1/4 calibrate {QUANTISED}: AWQ 4-bit weights by llmcompressor")
    recipe = recipe_file.read(variant.load(QUANTISED).folder / "recipe.yaml")
    with progress_bar() as progress:
        outcomes = runner.run(recipe, QUANTISED, root / "weights", _weights, report=progress)
    for outcome in outcomes:
        how = "reused" if outcome.reused else f"{outcome.manifest.wall_seconds:.0f} s"
        sizes = f"{outcome.bytes_before / 1e6:.1f} -> {outcome.bytes_after / 1e6:.1f} MB"
        console.print(f"    {outcome.stage}: {how}, {sizes}", markup=False)

    chosen = [variant.load(name) for name in (BASELINE, QUANTISED)]
    suite = quality.load_suite("tinyworld", root)
    for step, one, folder in zip(("2/4", "3/4"), chosen, folders, strict=True):
        _say(
            started,
            f"{step} score {one.name}: {arguments.limit} items a task, served by vLLM, scored by lm-eval",
        )
        if _standing(folder, "quality", one, lambda record: record["limit"] == arguments.limit):
            continue
        with progress_bar() as progress:
            quality.measure(
                one,
                suite,
                command=sys.argv,
                limit=arguments.limit,
                port=launch.free_port(),
                records_folder=folder,
                progress=progress,
            )

    _say(started, f"4/4 time {BASELINE} and {QUANTISED} in turns over short, medium and long prompts")
    if not all(
        _standing(folder, "latency", one, lambda record: record["rounds"] == arguments.rounds)
        for folder, one in zip(folders, chosen, strict=True)
    ):
        with progress_bar() as progress:
            latency.measure(
                chosen,
                workload.load("classes", root),
                command=sys.argv,
                rounds=arguments.rounds,
                port=launch.free_port(),
                records_folders=folders,
                progress=progress,
            )

    for table in tables.comparison_tables(*folders):
        console.print(table.as_rich())
    console.print(f"records: {', '.join(str(folder.relative_to(root)) for folder in folders)}")
    console.print(f"checkpoint: weights/{QUANTISED}; serve it: make serve VARIANT={QUANTISED}")
    _say(started, "done")
    return 0


def _weights(name: str) -> Path:
    base = variant.load(name)
    checkpoint.check(base.weights, variant.making_command(base.weights, base.root))
    return base.weights


def _standing(folder: Path, kind: str, one: variant.Variant, fits: Callable[[store.Record], bool]) -> bool:
    """Whether the folder has a record that measuring again would only repeat; says so."""
    command = launch.resolve(one)
    try:
        path = store.latest(
            folder,
            kind,
            lambda record: fits(record) and provenance.still_holds(record["provenance"], command),
        )
    except store.MissingRecordError:
        return False
    console.print(f"    reused: {path.relative_to(one.root)}", markup=False)
    return True


def _say(started: float, what: str) -> None:
    console.print(f"[bold]{what}[/bold] ({time.monotonic() - started:.0f} s)")


if __name__ == "__main__":
    run(main)
