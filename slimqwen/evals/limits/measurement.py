"""Measurement of a model's limits: repeats of the baseline against itself, one record, and the files in eval/."""

import shutil
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from slimqwen.checkpoint.files import sha256
from slimqwen.evals import EvalError, acceptance, acceptance_share, drafting
from slimqwen.evals.drafting import AcceptanceSettings
from slimqwen.evals.engine.combinations import ServedEngine
from slimqwen.evals.engine.isolation import Engines, server_here
from slimqwen.evals.engine.scenarios import EngineSettings
from slimqwen.evals.fidelity import weight_flags
from slimqwen.evals.fidelity_figures import FidelitySettings, Figures, TextComparison, summarise
from slimqwen.evals.limits import files, noise, record
from slimqwen.evals.limits.noise import Baseline, Reference, RepeatNoise
from slimqwen.evals.limits.record import LimitsRecord, RepeatSummary
from slimqwen.evals.limits.settings import LimitsSettings, Repeat, make_texts
from slimqwen.evals.suites.suite import BITS_PER_BYTE, Suite
from slimqwen.progress import Progress, silent
from slimqwen.recipe.stages import round_linears
from slimqwen.recipe.stages.round_linears import RoundLinearsParameters
from slimqwen.records import provenance, store
from slimqwen.records.journal import journal_file, locked
from slimqwen.serving import speed_only
from slimqwen.serving.command import ServerCommand
from slimqwen.stats.intervals import Ratio
from slimqwen.variant import Variant

_ROUNDED = "rounded"
"""Key of the rounded checkpoint's figures in the journal."""


def measure(
    variant: Variant, *, command: Sequence[str], progress: Progress = silent
) -> tuple[Path, files.FileChanges]:
    """Measure the noise of a baseline, write its limits record, and the files of eval/ that are missing.

    Repeats that an interrupted run has measured are not measured again.

    Returns:
        The record's file, and the written and the unchanged files of eval/.

    Raises:
        EvalError: the variant is no baseline, has no MTP head, or an engine failed.
        ServingError: the variant is measured for speed only, or needs a GPU and there is none.
    """
    speed_only.refuse(variant, "the noise of its answers")
    started = provenance.utc_now()
    root = variant.root
    settings = LimitsSettings.load(variant.evaluation, root)
    suite = Suite.load(settings.name, root)
    _require_baseline(variant)
    server = server_here(variant, "measure")
    make_texts(settings, root)
    baseline = _baseline(variant, settings, server)
    inputs = [each.model_dump(mode="json") for each in (settings, baseline.fidelity, baseline.acceptance)]
    repeats = [each for each in settings.repeats if each.platform in (None, server.platform)]
    with locked(journal_file("limits", server, *inputs, baseline.engine.model_dump(mode="json"))) as journal:
        runner = _Runner(variant, server, settings, progress)
        repeat_noises = []
        for number, repeat in enumerate(repeats):
            key = repeat.model_dump(mode="json")
            entry = journal.get(key)
            if entry is None:
                entry = runner.repeat(
                    baseline, repeat, f"{number + 1}/{len(repeats)} {repeat.name}"
                ).as_json()
                journal.add(key, entry)
            repeat_noises.append(RepeatNoise.from_json(entry))
        rounded = journal.get(_ROUNDED)
        if rounded is None:
            rounded = runner.rounded(baseline)
            journal.add(_ROUNDED, rounded)
        committed = files.committed(settings.name, root)
        margins = [task.non_inferiority_margin for task in suite.tasks if task.measure == BITS_PER_BYTE]
        result = LimitsRecord(
            variant=variant.name,
            evaluation=settings.name,
            repeats=tuple(
                _summary(repeat, each) for repeat, each in zip(repeats, repeat_noises, strict=True)
            ),
            rounded=rounded["linears"],
            limits=(
                *record.same_weights(settings, [_figures(each.texts) for each in repeat_noises], committed),
                *record.changed_weights(
                    settings,
                    _figures([TextComparison(**text) for text in rounded["texts"]]),
                    next(iter(margins), None),
                    committed,
                ),
                record.least_share(
                    settings,
                    [
                        _acceptance_ratio(repeat_noises[0], each, baseline.acceptance)
                        for each in repeat_noises[1:]
                    ],
                    committed.get("least_share"),
                ),
                record.near_tie(
                    settings, noise.all_gap_shifts(repeat_noises), committed.get("near_tie_nats")
                ),
            ),
            depth=baseline.depth,
            gap_share=settings.gap_share,
            positions=len(noise.all_gap_shifts(repeat_noises)),
            provenance=provenance.of_variant(
                variant,
                command,
                started,
                **provenance.of_server(server),
                datasets=_digests(settings, baseline, root),
                seeds={"prompts": baseline.acceptance.seed, "requests": baseline.engine.seed},
            ),
        )
        path = store.write(root / "results", result)
        journal.discard()
    return path, files.write(settings, result, path, root)


def _require_baseline(variant: Variant) -> None:
    if variant.baseline is not None:
        raise EvalError(
            f"limits come from a baseline and {variant.name} has one; "
            f"`slimqwen limits --variant {variant.baseline}` measures them"
        )
    variant.require_weights()
    drafting.require_mtp_head(variant)


def _baseline(variant: Variant, settings: LimitsSettings, server: ServerCommand) -> Baseline:
    acceptance_settings: AcceptanceSettings = settings.acceptance(variant.root)
    engine: EngineSettings = settings.engine(variant.root)
    fidelity: FidelitySettings = settings.fidelity(variant.root)
    longest = server.max_model_len - acceptance_settings.tokens - acceptance_settings.gate_depth - 1
    return Baseline(
        served=ServedEngine.from_command(server),
        fidelity=fidelity,
        acceptance=acceptance_settings,
        engine=engine,
        classes=drafting.cut_prompts(acceptance_settings, variant, variant, longest),
    )


class _Runner:
    """Runs engines of a baseline, each in a process of its own."""

    def __init__(
        self, variant: Variant, server: ServerCommand, settings: LimitsSettings, progress: Progress
    ) -> None:
        self._variant, self._server, self._settings = variant, server, settings
        self._progress = progress
        self._log = variant.root / "logs" / f"limits-{variant.name}.engine.log"
        self._reference: Reference | None = None

    def repeat(self, baseline: Baseline, repeat: Repeat, title: str) -> RepeatNoise:
        """Measure one repeat; before the first repeat the reference engine answers."""
        if self._reference is None:
            self._reference = self._isolated(
                noise.answer_by_reference, self._variant.weights, baseline, "reference engine"
            )
        task = (baseline, repeat.flags, self._reference)
        result: RepeatNoise = self._isolated(noise.measure_repeat, self._variant.weights, task, title)
        return result

    def rounded(self, baseline: Baseline) -> dict[str, Any]:
        """Compare the baseline with a copy whose MLPs are rounded to 4 bits; the copy is deleted."""
        copy = self._variant.root / ".cache" / "limits" / f"{self._variant.name}-rounded"
        shutil.rmtree(copy, ignore_errors=True)
        copy.mkdir(parents=True)
        try:
            parameters = RoundLinearsParameters.model_validate({"group_size": self._settings.group_size})
            facts = round_linears.run(self._variant.weights, copy, parameters, self._progress)
            texts = self._isolated(compare_rounded, copy, (baseline, self._variant.weights), "MLPs in 4 bits")
        finally:
            shutil.rmtree(copy, ignore_errors=True)
        return {"linears": facts["rounded_linears"], "texts": [vars(text) for text in texts]}

    def _isolated(self, function: Callable[..., Any], weights: Path, task: Any, title: str) -> Any:
        with Engines.started(self._server, self._settings.timeout_s, self._log) as engines:
            result = engines.run(
                function,
                task,
                lambda activity, done, total: self._progress(f"{title}: {activity}", done, total),
                weights=weights,
            )
        if isinstance(result, str):
            raise EvalError(
                f"{self._variant.name}: {title} failed ({result}); run again to continue: {self._log}"
            )
        return result


def compare_rounded(
    weights: Path, _: Path, task: tuple[Baseline, Path], progress: Progress
) -> list[TextComparison]:
    """Compare a rounded checkpoint with the baseline; `Engines` calls it in a process of its own.

    Args:
        task: the baseline, and its checkpoint.
    """
    from slimqwen.evals import token_distributions

    progress("starting", 0, 0)
    baseline, original = task
    return token_distributions.compare(
        weights,
        original,
        baseline.fidelity,
        baseline.served.root,
        max_model_len=baseline.served.context_len,
        flags=weight_flags(baseline.served.flags),
        modes=["single"],
        progress=progress,
    )


def _figures(texts: Sequence[TextComparison]) -> Figures:
    (figures,) = summarise(texts).values()
    return figures


def _acceptance_ratio(first: RepeatNoise, second: RepeatNoise, settings: AcceptanceSettings) -> Ratio:
    share = acceptance_share.judge(
        first.drafts, second.drafts, depth=settings.gate_depth, least_share=settings.least_share
    )
    return share.ratio


def _summary(repeat: Repeat, measured: RepeatNoise) -> RepeatSummary:
    figures = _figures(measured.texts)
    (depth,) = acceptance.summarise(measured.drafts)
    assert figures.kl_nats is not None
    assert depth.length is not None
    return RepeatSummary(
        repeat=repeat.name,
        flags=repeat.flags,
        kl_nats=figures.kl_nats.value,
        acceptance_length=depth.length.value,
        answers=measured.answers,
        differing=measured.differing,
        largest_gap_shift_nats=max(measured.gap_shifts),
    )


def _digests(settings: LimitsSettings, baseline: Baseline, root: Path) -> Mapping[str, str]:
    """SHA-256 of the settings and texts, by path."""
    folders = (FidelitySettings.folder, AcceptanceSettings.folder, EngineSettings.folder)
    inputs = [settings.file(root), root / baseline.fidelity.texts]
    inputs += [root / "eval" / folder / f"{settings.settings}.yaml" for folder in folders]
    if baseline.acceptance.documents != "tinyworld":
        inputs.append(root / baseline.acceptance.documents)
    return {provenance.portable(str(file), root): sha256(file) for file in inputs}
