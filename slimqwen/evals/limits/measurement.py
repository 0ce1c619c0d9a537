"""Measurement of a model's limits: repeats of the baseline against itself, one record, and the files in eval/."""

import shutil
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from functools import cached_property, partial
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
from slimqwen.text.corpus import resolve_text
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
        runner = _Runner(variant, server, settings, baseline, progress)
        repeat_noises = []
        for number, repeat in enumerate(repeats):
            title = f"{number + 1}/{len(repeats)} {repeat.name}"
            entry = journal.answer(repeat.model_dump(mode="json"), partial(runner.repeat, repeat, title))
            repeat_noises.append(RepeatNoise.from_json(entry))
        rounded = journal.answer(_ROUNDED, runner.rounded)
        shifts = [shift for each in repeat_noises for shift in each.gap_shifts]
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
                    _acceptance_ratios(repeat_noises, baseline.acceptance),
                    committed.get("least_share"),
                ),
                record.near_tie(settings, shifts, committed.get("near_tie_nats")),
            ),
            depth=baseline.acceptance.gate_depth,
            gap_share=settings.gap_share,
            positions=len(shifts),
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
    acceptance_settings = settings.of_check(AcceptanceSettings, variant.root)
    longest = server.max_model_len - acceptance_settings.tokens - acceptance_settings.gate_depth - 1
    served = ServedEngine.from_command(server)
    budget = int(server.flags.get("max-num-batched-tokens") or server.max_model_len)
    return Baseline(
        served=replace(served, flags={**served.flags, "max-num-batched-tokens": budget}),
        fidelity=settings.of_check(FidelitySettings, variant.root),
        acceptance=acceptance_settings,
        engine=settings.of_check(EngineSettings, variant.root),
        classes=drafting.cut_prompts(acceptance_settings, variant, variant, longest),
    )


@dataclass(frozen=True)
class _Runner:
    """Runs engines of a baseline, each in a process of its own; results are JSON for the journal."""

    variant: Variant
    server: ServerCommand
    settings: LimitsSettings
    baseline: Baseline
    progress: Progress

    @cached_property
    def _reference(self) -> Reference:
        """The answers of the reference engine, which only a repeat needs."""
        reference: Reference = self._isolated(
            noise.answer_by_reference, self.variant.weights, self.baseline, "reference engine"
        )
        return reference

    def repeat(self, repeat: Repeat, title: str) -> dict[str, Any]:
        task = (self.baseline, repeat.flags, self._reference)
        return asdict(self._isolated(noise.measure_repeat, self.variant.weights, task, title))

    def rounded(self) -> dict[str, Any]:
        """Compare the baseline with a copy whose MLPs are rounded to 4 bits; the copy is deleted."""
        weights = self.variant.weights
        copy = self.variant.root / ".cache" / "limits" / f"{self.variant.name}-rounded"
        shutil.rmtree(copy, ignore_errors=True)
        copy.mkdir(parents=True)
        try:
            parameters = RoundLinearsParameters.model_validate({"group_size": self.settings.group_size})
            facts = round_linears.run(weights, copy, parameters, self.progress)
            texts = self._isolated(compare_rounded, copy, (self.baseline, weights), "MLPs in 4 bits")
        finally:
            shutil.rmtree(copy, ignore_errors=True)
        return {"linears": facts["rounded_linears"], "texts": [asdict(text) for text in texts]}

    def _isolated(self, function: Callable[..., Any], weights: Path, task: Any, title: str) -> Any:
        log = self.variant.root / "logs" / f"limits-{self.variant.name}.engine.log"
        with Engines.started(self.server, self.settings.timeout_s, log) as engines:
            result = engines.run(
                function,
                task,
                lambda activity, done, total: self.progress(f"{title}: {activity}", done, total),
                weights=weights,
            )
        if isinstance(result, str):
            raise EvalError(f"{self.variant.name}: {title} failed ({result}); run again to continue: {log}")
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


def _acceptance_ratios(repeats: Sequence[RepeatNoise], settings: AcceptanceSettings) -> list[Ratio]:
    """The acceptance lengths of further repeats over that of the first."""
    depth, least_share = settings.gate_depth, settings.least_share
    first, *others = (each.drafts for each in repeats)
    return [
        acceptance_share.judge(first, other, depth=depth, least_share=least_share).ratio for other in others
    ]


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
    inputs.append(resolve_text(baseline.acceptance.documents, root))
    return {provenance.portable(str(file), root): sha256(file) for file in inputs}
