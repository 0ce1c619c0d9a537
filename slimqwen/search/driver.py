"""The driver of a search: from a base, a GPU and a quality budget to a record of the variant to serve."""

import math
from collections.abc import Sequence
from pathlib import Path

from slimqwen import variant as variants
from slimqwen.checkpoint.files import sha256
from slimqwen.progress import Progress, silent
from slimqwen.records import provenance, store
from slimqwen.roofline import gpu as data_sheets
from slimqwen.search.candidate import Candidate, make_overlay
from slimqwen.search.executors import Executor
from slimqwen.search.ladder import Ladder
from slimqwen.search.proof import prove
from slimqwen.search.record import Search, SearchTrial
from slimqwen.search.rungs import Budget
from slimqwen.search.space import SearchSettings, Space
from slimqwen.search.study import Study
from slimqwen.variant import Variant, config_env


def search(
    base: Variant,
    gpu_name: str,
    budget: str,
    settings: SearchSettings,
    executor: Executor,
    *,
    command: Sequence[str],
    trials: int | None = None,
    minutes: float | None = None,
    finalists: int | None = None,
    width: int | None = None,
    progress: Progress = silent,
) -> Path:
    """Search for the fastest variant of a base on a GPU within a quality budget, prove it, and write the record.

    The fastest of the front become variants of experiments/ and are gated on items that the search did not see.

    Args:
        base: variant to search from; its checkpoint is the base of every candidate's recipe.
        gpu_name: name of a GPU in eval/devices.yaml.
        budget: name of a gate in eval/gates/.
        settings: everything that the space cannot derive.
        trials: number of candidates instead of the settings'.
        minutes: time after which no further candidate is begun.
        finalists: number of candidates that are proven at most, instead of the settings'.
        width: candidates that are measured at a time, instead of as many as the executor runs.

    Returns:
        The record in results/.

    Raises:
        SlimqwenError: base, GPU, budget or settings cannot be used, or the incumbent could not be measured.
    """
    started = provenance.utc_now()
    root = base.root
    base.require_weights()
    gpu = data_sheets.read_gpu(gpu_name, root)
    space = Space.derive(base, gpu, settings)
    folder = root / ".cache" / "search" / base.name
    ladder = Ladder(base, make_overlay(base, folder / "overlay"), gpu, space, Budget.of_variant(base, budget))
    with executor:
        study = Study(ladder, executor, folder, root / "logs" / "search.log", progress)
        seconds = math.inf if minutes is None else 60 * minutes
        findings = study.run(trials or settings.trials, seconds, width or executor.width)
    record = Search(
        variant=base.name,
        gpu=gpu.name,
        timed=False,
        budget=budget,
        space=space.as_text(),
        context_len=settings.decoding.context_len,
        sequences=settings.decoding.sequences,
        incumbent=findings.incumbent,
        repeated_suggestions=findings.repeated,
        trials=tuple(findings.trials),
        importance=findings.importance,
        provenance=provenance.of_variant(
            base,
            command,
            started,
            devices=sha256(root / data_sheets.FILE),
            datasets={
                provenance.portable(str(file), root): sha256(file)
                for file in (settings.file(root), root / ladder.budget.fidelity.texts)
                if file.is_file()
            },
            seeds={"sampler": settings.seed},
        ),
    )
    limit = settings.finalists if finalists is None else finalists
    within_budget = [trial for trial in record.faster if ladder.budget.is_met_by(trial)]
    if not limit or not within_budget:
        return store.write_record(root / "results", record)
    names = {_finalist(trial, ladder): trial.name for trial in within_budget[:limit]}
    proof = prove(list(names), executor, root, command=command)
    return store.write_record(
        root / "results", record.model_copy(update={"proof": proof, "proof_names": names})
    )


def _finalist(trial: SearchTrial, ladder: Ladder) -> str:
    """The variant of experiments/ for a trial: an existing one with its recipe and lines, or a new one."""
    base, candidate = ladder.base, Candidate(**trial.changes)
    number = 1
    while (name := f"{base.name}-search-{number}") in variants.names(base.root):
        if _has_recipe_and_lines(base.root / "experiments" / name, candidate, ladder):
            return name
        number += 1
    hypothesis = (
        f"With {trial.label}, {base.name} keeps within every limit of {ladder.budget.name} on items that the search "
        f"did not see, and the roofline of the {ladder.gpu.name} is {trial.tokens_per_second:,.0f} tokens/s."
    )
    return candidate.scaffold(name, base, ladder.space, hypothesis, base.root).name


def _has_recipe_and_lines(folder: Path, candidate: Candidate, ladder: Ladder) -> bool:
    """Whether a variant's folder has the recipe and the lines of a candidate."""
    recipe = folder / "recipe.yaml"
    written_recipe = recipe.read_text(encoding="utf-8") if recipe.is_file() else None
    if written_recipe != candidate.recipe(ladder.base, ladder.space):
        return False
    folder_lines = {
        key: setting.value for key, setting in config_env.read_config_env(folder / "config.env").items()
    }
    lines = {key: value.strip("'") for key, value in candidate.lines(ladder.base).items()}
    return {key: value for key, value in folder_lines.items() if key not in ("BASE", "VLLM_MODEL")} == lines
