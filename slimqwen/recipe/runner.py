"""The runner: runs each stage of a recipe once per content key and publishes its output, for every variant to reuse.

The store is weights/store/<key>/; weights/<variant> is a link to the output of the variant's last stage. A content key
is a SHA-256 over the digest of the input checkpoint, the parameters, the outside data, the environment, and the code
that the stage reaches with the versions of the packages that this code imports (`slimqwen.identity.source`). A stage is
therefore reused if its input is the same, even if an earlier stage has changed.
"""

import contextlib
import functools
import json
import os
import platform
import secrets
import shutil
import tempfile
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from slimqwen import checkpoint
from slimqwen.checkpoint import Manifest
from slimqwen.checkpoint.files import COMPILE_CACHE, MANIFEST, bytes_on_disk, file_records, publish, withdraw
from slimqwen.errors import SlimqwenError
from slimqwen.file_lock import describe_holders, hold_lock, take_lock
from slimqwen.identity import changed_names, digest_of
from slimqwen.identity.source import reach
from slimqwen.models.outline import Outline
from slimqwen.processes import spawner, worker
from slimqwen.progress import Progress, progress_of, silent
from slimqwen.recipe.inspection import OPERATIONS, inspect_steps, lacking_space, manifest_files
from slimqwen.recipe.recipe_file import Recipe, RecipeError, Step
from slimqwen.recipe.stage import Facts

_SCHEME = "3"
"""Version of the way in which content keys are made: an output with a key of another version proves nothing here."""

_REMOVE_AND_RERUN = "delete that folder and run the recipe again"


@dataclass(frozen=True)
class Outcome:
    """Result of one stage.

    Attributes:
        folder: the stage's output in the store.
        reused: whether the store had the output already.
        outdated: whether the store had an output with a key of an earlier version, which was not reused.
        manifest: manifest of the output; wall time and peak memory are those of the run that made it.
        bytes_before: size of the input, bytes.
        bytes_after: size of the output, bytes.
        log: file with what the stage and its libraries printed.
    """

    stage: str
    folder: Path
    reused: bool
    outdated: bool
    manifest: Manifest
    bytes_before: int
    bytes_after: int
    log: Path


@dataclass(frozen=True)
class IngredientChange:
    """An ingredient of a content key that differs between two runs; None on a side that lacks the ingredient."""

    ingredient: str
    before: str | None
    after: str | None


@dataclass(frozen=True)
class StageForecast:
    """Whether a recipe's run would reuse a stage's output or run the stage, and why.

    Attributes:
        key: the stage's content key; None if its input does not exist yet.
        reused: whether the store has the stage's output.
        reason: the reason in a few words.
        changes: ingredients that differ from the nearest stored output of the same stage.
        is_upgrade: whether a stored output differs only in code and package versions.
    """

    stage: str
    key: str | None
    reused: bool
    reason: str
    changes: tuple[IngredientChange, ...] = ()
    is_upgrade: bool = False


def run_recipe(
    recipe: Recipe,
    variant: str,
    weights: Path,
    resolve: Callable[[str], Path],
    stages: int | None = None,
    progress: Progress = silent,
) -> list[Outcome]:
    """Make a variant's checkpoint: reuse the stages whose output the store has, run the others.

    Args:
        variant: name; weights/<variant> is linked to the output of the last stage. With `stages`, it is linked to an
            earlier output only if all later stages merely add a cache, and the link is missing or leads to a checkpoint
            with another digest.
        resolve: function from a recipe's base to its checkpoint folder, which it checks.
        stages: number of stages to run, from the first; None for the whole recipe.
        progress: receives (activity, done, total) of each stage; the activity begins with the stage's name.

    Returns:
        One outcome per stage, in order.

    Raises:
        RecipeError: before any stage starts: weights/<variant> is not or cannot be a link, the recipe has faults on
            this base, or disk or memory are too small. Later: a stage failed, and the store is as before that stage.
        SlimqwenError: a stage refuses its input or parameters.
    """
    link, store = weights / variant, weights / "store"
    if link.exists() and not link.is_symlink():
        raise RecipeError(f"{link} was not made by a recipe; move it away so that the recipe can write it")
    _require_symbolic_links(weights)
    steps = recipe.steps[:stages]
    outcomes: list[Outcome] = []
    try:
        source = resolve(recipe.base)
    except SlimqwenError as error:
        if not recipe.faults:
            raise
        raise RecipeError(*recipe.faults, *error.faults) from None
    _require_sound(recipe, steps, Outline.read(source), weights)
    with hold_lock(store / ".lock", shared=True, reason="the store is being cleaned", progress=progress):
        for number, step in enumerate(steps, start=1):
            title = f"{step.stage.name} ({number} of {len(steps)})"
            outcome = _ensure(step, source, store, progress_of(title, progress))
            outcomes.append(outcome)
            source = outcome.folder
        if len(steps) == len(recipe.steps) or _is_news(recipe.steps[len(steps) :], source, link):
            _set_link(link, source)
    return outcomes


def forecast_recipe(recipe: Recipe, weights: Path, resolve: Callable[[str], Path]) -> list[StageForecast]:
    """Forecast for each stage whether a run would reuse its stored output, and which ingredients have changed.

    Args:
        weights: the folder weights/, which has the store.
        resolve: function from a recipe's base to its checkpoint folder, which it checks.

    Raises:
        SlimqwenError: the base, the data of a stage or a manifest of the store is missing or damaged.
    """
    store = weights / "store"
    source: Path | None = resolve(recipe.base)
    forecasts = []
    for step in recipe.steps:
        name = step.stage.name
        if source is None:
            forecasts.append(StageForecast(name, None, False, "its input will be made first"))
            continue
        ingredients = _ingredients(step, checkpoint.digest(source))
        key = digest_of(ingredients)
        input_, source = source, store / key
        if source.is_dir():
            forecasts.append(StageForecast(name, key, True, "no ingredient has changed"))
            continue
        source = None
        nearest = _nearest_entry(name, ingredients, store)
        if nearest is None:
            forecasts.append(StageForecast(name, key, False, "never run"))
            continue
        if _is_earlier(nearest):
            same = nearest.recipe_key == _recipe_key(step, input_)
            reason = "its output has a key of an earlier version"
            forecasts.append(StageForecast(name, key, False, reason, is_upgrade=same))
            continue
        changes = _changes(nearest.ingredients, ingredients)
        names = ", ".join(change.ingredient for change in changes)
        is_upgrade = all(change.ingredient.startswith(("code.", "version.")) for change in changes)
        forecasts.append(StageForecast(name, key, False, f"changed: {names}", changes, is_upgrade))
    return forecasts


def clean_store(weights: Path, keep: Iterable[str]) -> int:
    """Delete the store entries that no variant uses, and the unfinished work of killed runs.

    Entries to which a link under weights leads are kept, and the entries from which they were made.

    Args:
        keep: keys of further entries to keep, such as those that the variants' recipes would reuse.

    Returns:
        Bytes freed.

    Raises:
        RecipeError: a recipe is running.
    """
    store = weights / "store"
    if not store.is_dir():
        return 0
    file = store / ".lock"
    with file.open("a+b") as lock:
        if not take_lock(lock, file):
            raise RecipeError(
                f"a recipe is running on {store}{describe_holders(file)}; try again when the recipe has ended"
            )
        entries = {folder.name: folder for folder in store.iterdir() if not folder.name.startswith(".")}
        # An unchanged output has its input's digest. So has one with a baked cache, which is never an input.
        inputs: dict[str, list[str]] = {}
        for name, folder in entries.items():
            if not (folder / COMPILE_CACHE[0]).is_file():
                inputs.setdefault(checkpoint.digest(folder), []).append(name)
        linked = [link.resolve().name for link in weights.iterdir() if link.is_symlink()]
        used, pending = set(), [*linked, *keep]
        while pending:
            name = pending.pop()
            if name in entries and name not in used:
                used.add(name)
                pending += inputs.get(Manifest.read(entries[name]).ingredients["input"], [])
        freed = sum(file.stat().st_size for file in (store / ".unfinished").rglob("*") if file.is_file())
        shutil.rmtree(store / ".unfinished", ignore_errors=True)
        for name in entries.keys() - used:
            freed += bytes_on_disk(entries[name])
            withdraw(entries[name])
            (store / ".locks" / name).unlink(missing_ok=True)
            for log in (store / ".logs").glob(f"*-{name[:16]}.log"):
                log.unlink()
        return freed


def _require_sound(recipe: Recipe, steps: Sequence[Step], base: Outline, weights: Path) -> None:
    """Raise a RecipeError with all faults of the steps, and lack of memory or disk, before any stage starts."""
    store = weights / "store"
    faults, costs = inspect_steps(steps, base, store)
    if recipe.faults or faults:
        raise RecipeError(*recipe.faults, *faults)
    if lacking_space(costs, store):
        # A reused output needs no memory or disk.
        forecasts = forecast_recipe(replace(recipe, steps=tuple(steps)), weights, lambda _: base.folder)
        new = [cost for cost, forecast in zip(costs, forecasts, strict=True) if not forecast.reused]
        if lines := lacking_space(new, store):
            raise RecipeError(*lines)


def _ensure(step: Step, source: Path, store: Path, progress: Progress) -> Outcome:
    """Return the step's output from the store, after making it if necessary."""
    stage = step.stage
    ingredients = _ingredients(step, checkpoint.digest(source, progress))
    key = digest_of(ingredients)
    entry, log = store / key, store / ".logs" / f"{stage.name}-{key[:16]}.log"
    reused = entry.is_dir()
    nearest = None if reused else _nearest_entry(stage.name, ingredients, store)
    outdated = (
        nearest is not None and _is_earlier(nearest) and nearest.recipe_key == _recipe_key(step, source)
    )
    if not reused:
        reason = f"another run is at work on {stage.name}"
        with hold_lock(store / ".locks" / key, reason=reason, progress=progress):
            reused = entry.is_dir()
            if not reused:
                needs = stage.needs(Outline.read(source), step.parameters)
                log.parent.mkdir(exist_ok=True)
                unfinished = store / ".unfinished" / key
                with publish(entry) as staging:
                    started = time.monotonic()
                    facts, peak = _run_in_process(step, source, staging, unfinished, log, progress)
                    checkpoint.check_folder(staging, f"the stage {stage.name} is defective, its log is {log}")
                    Manifest(
                        stage=stage.name,
                        key=key,
                        recipe_key=_recipe_key(step, source),
                        ingredients=ingredients,
                        files=file_records(staging),
                        wall_seconds=round(time.monotonic() - started, 3),
                        peak_memory_bytes=peak,
                        versions={
                            name.removeprefix("version."): value
                            for name, value in ingredients.items()
                            if name.startswith("version.")
                        },
                        facts=facts | ({OPERATIONS: needs.operations} if needs.operations else {}),
                    ).write(staging)
                shutil.rmtree(unfinished, ignore_errors=True)
    if reused:
        checkpoint.check_folder(entry, _REMOVE_AND_RERUN)
    manifest = Manifest.read(entry)
    before, after = bytes_on_disk(source), bytes_on_disk(entry)
    return Outcome(stage.name, entry, reused, outdated, manifest, before, after, log)


def _ingredients(step: Step, input_digest: str) -> dict[str, str]:
    """Everything that affects the stage's output, by dotted name."""
    stage = step.stage
    source = reach(f"{stage.run.__module__}.{stage.run.__qualname__}")
    named = {
        "data": stage.data(step.parameters),
        "environment": stage.environment,
        "code": source.digests,
        "version": {"python": platform.python_version(), **source.versions()},
    }
    return {
        "scheme": _SCHEME,
        "stage": stage.name,
        "input": input_digest,
        **_flat("parameters", step.parameters.model_dump(mode="json")),
        **{f"{kind}.{name}": value for kind, values in named.items() for name, value in values.items()},
    }


def _recipe_key(step: Step, source: Path) -> str:
    """The recipe key of a step's output: of what a recipe says, without the bytes, code and versions that carry it out.

    A cache changes no checkpoint, so the key stays that of the input. A parameter at its default counts as not said: a
    new one must not give every recipe another key.
    """
    before = checkpoint.recipe_key(source) or checkpoint.digest(source)
    stage, parameters = step.stage, step.parameters
    if stage.only_caches(parameters):
        return before
    said = _flat("parameters", parameters.model_dump(mode="json", exclude_defaults=True))
    data = {f"data.{name}": digest for name, digest in stage.data(parameters).items()}
    return digest_of({"stage": stage.name, "input": before} | said | data)


def add_facts(entry: Path, facts: Facts) -> Manifest:
    """Add facts to the manifest of a stored output, for instance measured after the stage; returns the new manifest.

    Args:
        entry: folder of the output in the store.
        facts: facts by name; they replace facts of the same names.
    """
    manifest = Manifest.read(entry)
    manifest = manifest.model_copy(update={"facts": {**manifest.facts, **facts}})
    times = (entry / MANIFEST).stat()  # kept, because `digest` trusts it
    with tempfile.TemporaryDirectory(dir=entry.parent, prefix=".") as folder:
        manifest.write(Path(folder))
        file = Path(folder) / MANIFEST  # a new one, for only its owner may set the times of a file
        os.utime(file, ns=(times.st_atime_ns, times.st_mtime_ns))
        file.replace(entry / MANIFEST)
    return manifest


def _flat(prefix: str, value: Any) -> dict[str, str]:
    if isinstance(value, dict):
        return {name: text for key in value for name, text in _flat(f"{prefix}.{key}", value[key]).items()}
    return {prefix: json.dumps(value)}


def _nearest_entry(stage: str, ingredients: Mapping[str, str], store: Path) -> Manifest | None:
    """Manifest of the same stage with the fewest different ingredients; the newest of several such manifests."""
    entries = []
    for file in manifest_files(store):
        # A damaged entry of another recipe is no reason to stop.
        with contextlib.suppress(checkpoint.CorruptCheckpointError):
            if (manifest := Manifest.read(file.parent)).stage == stage:
                entries.append(manifest)
    return min(entries, key=lambda manifest: len(_changes(manifest.ingredients, ingredients)), default=None)


def _is_earlier(manifest: Manifest) -> bool:
    """Whether an output has a key of an earlier version, which nothing here can be compared with."""
    return manifest.ingredients.get("scheme") != _SCHEME


def _changes(before: Mapping[str, str], after: Mapping[str, str]) -> tuple[IngredientChange, ...]:
    names = changed_names(before, after)
    return tuple(IngredientChange(name, before.get(name), after.get(name)) for name in names)


def _run_in_process(
    step: Step, source: Path, staging: Path, unfinished: Path, log: Path, progress: Progress
) -> tuple[Facts, int]:
    """Run a stage in a process of its own; returns the stage's facts and the process's peak memory in bytes.

    What the process prints goes to the log, its end frees main and GPU memory, and its crash does not end the run.
    """
    run: Callable[..., Facts] = step.stage.run
    if step.stage.resumes:
        unfinished.mkdir(parents=True, exist_ok=True)
        run = functools.partial(run, unfinished=unfinished)
    # A server that the stage starts is a fork of this process's spawner, so that it need not import vLLM once more.
    inherited, descriptors = spawner.pass_on()
    environment = {**os.environ, **step.stage.environment, **inherited}
    with (
        log.open("wb") as output,
        worker.started(environment, output, descriptors=descriptors) as (process, messages),
    ):
        try:
            worker.give(process, staging, run, source.resolve(), staging, step.parameters)
            while (message := messages.recv())[0] == "progress":
                progress(*message[1:])
            worker.wait_for_end(process)
        except (EOFError, BrokenPipeError):
            cause = worker.death_cause(process.wait())
            raise RecipeError(f"{step.stage.name} died ({cause}); read why in its log: {log}") from None
    kind, *content = message
    if kind == "refused":
        raise content[0]
    if kind == "failed":
        raise RecipeError(f"{step.stage.name} failed: {content[0]}; read more in its log: {log}")
    return content[0], content[1]


def _is_news(left: Sequence[Step], source: Path, link: Path) -> bool:
    """Whether an intermediate output already gives the responses of the recipe's result, and the link's target not.

    Args:
        left: the stages that have not run.
        source: the intermediate output.
    """
    if not all(step.stage.only_caches(step.parameters) for step in left):
        return False
    return not link.exists() or checkpoint.digest(link) != checkpoint.digest(source)


def _require_symbolic_links(folder: Path) -> None:
    """Check before the first stage that symbolic links can be made in a folder, which is needed after the last."""
    probe = folder / f".link.{secrets.token_hex(4)}"
    try:
        folder.mkdir(parents=True, exist_ok=True)
        probe.symlink_to("store")
        probe.unlink()
    except OSError as error:
        raise RecipeError(
            f"{folder} takes no symbolic link ({error.strerror}), but a recipe's result is linked there; make "
            "that folder writable, or move the checkout to a local disk"
        ) from error


def _set_link(link: Path, target: Path) -> None:
    """Make a link point to a target, atomically: another process sees the old or the new link."""
    destination = Path(os.path.relpath(target, link.parent))
    if link.is_symlink() and link.readlink() == destination:
        return
    new_link = link.with_name(f".{link.name}.{secrets.token_hex(4)}")
    new_link.symlink_to(destination)
    new_link.replace(link)
