"""Run a variant's recipe, say what a run would do, verify its checkpoint, or clean the store of all recipes."""

import argparse
from collections.abc import Callable
from pathlib import Path

from _console import console, progress_bar, run, table

from slimqwen import checkpoint, variant
from slimqwen.evaluation.output import output_to
from slimqwen.recipe import recipe_file, runner
from slimqwen.serving import in_process

WEIGHTS = variant.repository_root() / "weights"


def main() -> int:
    """Dispatch to the action named on the command line."""
    parser = argparse.ArgumentParser(description=__doc__)
    actions = parser.add_subparsers(dest="action", required=True)
    for name in ("run", "status", "verify"):
        actions.add_parser(name).add_argument("--variant", required=True)
    actions.add_parser("clean")
    arguments = parser.parse_args()
    if arguments.action == "clean":
        return clean()
    act: Callable[[str], int] = {"run": bring_about, "status": status, "verify": verify}[arguments.action]
    return act(arguments.variant)


def bring_about(name: str, until: str | None = None) -> int:
    """Run the recipe, up to and including a stage if one is named, and print how each stage came out."""
    recipe = recipe_of(name)
    with progress_bar() as progress:
        outcomes = runner.run(recipe, name, WEIGHTS, base_folder, until, progress)
    shown = table(["stage", ""], ("time", "peak memory", "size before", "after"))
    for outcome in outcomes:
        shown.add_row(
            outcome.stage,
            "cached" if outcome.reused else "done",
            f"{outcome.manifest.wall_seconds:.0f} s",
            f"{outcome.manifest.peak_memory_bytes / 1e9:.2f} GB",
            f"{outcome.bytes_before / 1e6:.1f} MB",
            f"{outcome.bytes_after / 1e6:.1f} MB",
        )
    console.print(shown)
    whole = len(outcomes) == len(recipe.steps)
    console.print(f"checkpoint: {relative(WEIGHTS / name if whole else outcomes[-1].folder)}", soft_wrap=True)
    for outcome in outcomes:
        if not outcome.reused:
            console.print(f"log of {outcome.stage}: {relative(outcome.log)}", soft_wrap=True)
    return 0


def status(name: str) -> int:
    """Print for each stage whether a run would reuse it, and why."""
    forecasts = table(["stage", "would be", "why"], [])
    for forecast in runner.status(recipe_of(name), WEIGHTS, base_folder):
        forecasts.add_row(forecast.stage, "reused" if forecast.reused else "run", forecast.reason)
        for change in forecast.changes:
            forecasts.add_row("", "", f"{change.ingredient}: {shown(change.before)} -> {shown(change.after)}")
    console.print(forecasts)
    return 0


def verify(name: str) -> int:
    """Re-hash the variant's checkpoint, hold its tensors against its config, and have vLLM load it."""
    one = variant.load(name)
    log = one.root / "logs" / f"verify-{name}.log"
    with progress_bar() as progress:
        manifest = checkpoint.verify(one.weights, variant.making_command(one.weights, one.root), progress)
        progress("loading in vLLM", 0, 0)
        with output_to(log):
            in_process.try_out(one.weights)
    size = sum(record.bytes for record in manifest.files.values())
    console.print(
        f"{relative(one.weights)}: {len(manifest.files)} files, {size / 1e6:.1f} MB, as its manifest says; "
        f"its tensors are those its config.json promises; vLLM loads it and answers (log: {relative(log)})",
        markup=False,
        soft_wrap=True,
    )
    return 0


def clean() -> int:
    """Drop the store entries that no variant's recipe would reuse and no link needs."""
    keep = []
    for name in variant.names():
        if variant.load(name).recipe:
            try:
                forecasts = runner.status(recipe_of(name), WEIGHTS, base_folder)
            except checkpoint.MissingCheckpointError:
                continue
            keep += [forecast.key for forecast in forecasts if forecast.key]
    freed = runner.clean_store(WEIGHTS, keep)
    console.print(f"freed {freed / 1e6:.1f} MB of {relative(WEIGHTS / 'store')}", markup=False)
    return 0


def recipe_of(name: str) -> recipe_file.Recipe:
    """The recipe of a variant."""
    return recipe_file.read(variant.load(name).folder / "recipe.yaml")


def base_folder(base: str) -> Path:
    """The checked weights of a recipe's base: of a variant, or of the one that copies that hub repository."""
    if "/" in base:
        base = _copy_of(base)
    one = variant.load(base)
    checkpoint.check(one.weights, variant.making_command(one.weights, one.root))
    return one.weights


def _copy_of(repository: str) -> str:
    for name in variant.names():
        source = variant.load(name).settings.get("SOURCE")
        if source and source.value == repository and source.file.parent.name == name:
            return name
    raise recipe_file.RecipeError(
        f"no variant is a copy of {repository}; add one whose config.env says SOURCE={repository}"
    )


def relative(path: Path) -> Path:
    """The path as seen from the repository."""
    return path.relative_to(variant.repository_root())


def shown(value: str | None) -> str:
    """An ingredient's value, hashes cut short."""
    if value is None:
        return "none"
    return f"{value[:12]}…" if len(value) == 64 else value


if __name__ == "__main__":
    run(main)
