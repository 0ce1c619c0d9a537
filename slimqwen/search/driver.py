"""The driver of a search: finds the variant of a base to serve on a GPU within a quality budget, and records it."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from slimqwen.checkpoint.files import sha256
from slimqwen.plan import devices
from slimqwen.processes import Executor
from slimqwen.progress import Progress, silent
from slimqwen.records import provenance, store
from slimqwen.search.candidate import Candidate, make_overlay
from slimqwen.search.ladder import Ladder
from slimqwen.search.proof import prove_finalists
from slimqwen.search.record import Search, SearchTrial
from slimqwen.search.rungs import Budget
from slimqwen.search.space import SearchSettings, Space
from slimqwen.search.study import Study
from slimqwen.variant import Variant
from slimqwen.workspace import locate


@dataclass(frozen=True)
class Extent:
    """How much a search measures.

    Attributes:
        trials: number of candidates.
        finalists: largest number of candidates that are proven.
        seconds: time after which no further candidate is begun.
        width: number of candidates measured at a time; None for as many as the executor runs.
    """

    trials: int
    finalists: int
    seconds: float = math.inf
    width: int | None = None


def search_variants(
    base: Variant,
    gpu_name: str,
    budget: str,
    settings: SearchSettings,
    executor: Executor,
    extent: Extent,
    *,
    command: Sequence[str],
    progress: Progress = silent,
) -> Path:
    """Search for the fastest variant of a base on a GPU within a quality budget, prove it, and write the record.

    The fastest candidates of the front become variants of experiments/ and are gated on items new to the search.

    Args:
        base: variant to search from; its checkpoint is the base of every candidate's recipe.
        gpu_name: name of a GPU in eval/devices.yaml.
        budget: name of a gate in eval/gates/.
        settings: settings of the space that cannot be derived from checkpoint and GPU.
        extent: how much is measured.

    Returns:
        The record.

    Raises:
        SlimqwenError: base, GPU, budget or settings cannot be used, or the incumbent could not be measured.
    """
    started = provenance.utc_now()
    root = base.root
    base.require_weights()
    gpu = devices.read_gpu(gpu_name, root)
    space = Space.derive(base, gpu, settings)
    folder = root / ".cache" / "search" / base.name
    ladder = Ladder(base, make_overlay(base, folder / "overlay"), gpu, space, Budget.of_variant(base, budget))
    with executor:
        study = Study(ladder, executor, folder, root / "logs" / "search.log", progress)
        trials = study.run(extent.trials, extent.seconds, extent.width or executor.width)
    record = Search(
        variant=base.name,
        gpu=gpu.name,
        budget=budget,
        space=space.as_text(),
        context_len=settings.decoding.context_len,
        sequences=settings.decoding.sequences,
        incumbent=study.incumbent,
        trials=tuple(trials),
        provenance=provenance.of_variant(
            base,
            command,
            started,
            devices=sha256(locate(devices.FILE, root)),
            datasets={
                provenance.portable(str(file), root): sha256(file)
                for file in (*settings.files(root), locate(ladder.budget.fidelity.texts, root))
                if file.is_file()
            },
            seeds={"sampler": settings.seed},
        ),
    )
    within_budget = [trial for trial in record.faster if ladder.budget.is_met_by(trial)]
    finalists = [_make_finalist(trial, ladder) for trial in within_budget[: extent.finalists]]
    proof = prove_finalists(finalists, executor, root, command=command) if finalists else None
    return store.write_record(base.folder, record.model_copy(update={"proof": proof}))


def _make_finalist(trial: SearchTrial, ladder: Ladder) -> str:
    """Write a trial's candidate as a variant of experiments/, under the name of the trial, which is returned."""
    hypothesis = (
        f"With {trial.label}, {ladder.base.name} keeps within every limit of {ladder.budget.name} on items that the "
        f"search did not see, and the roofline of the {ladder.gpu.name} is {trial.tokens_per_second:,.0f} tokens/s."
    )
    return Candidate(**trial.changes).scaffold(ladder.base, ladder.space, hypothesis, ladder.base.root).name
