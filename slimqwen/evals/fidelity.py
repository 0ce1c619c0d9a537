"""Fidelity: how far a variant's next-token distributions are from its baseline's, token by token on fixed texts.

Transformers evaluates the baseline in float32; vLLM evaluates the variant as it is served. In process, the whole
distributions are compared at every position of the texts, not only the top k. One minute detects differences that task
scores need thousands of responses to detect.

A variant with a pruned vocabulary is compared on the texts whose tokens it kept, with the baseline's distribution over
the kept tokens. Bits per byte are compared on every text, because they do not depend on the vocabulary.
"""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from pydantic import Field

from slimqwen import checkpoint
from slimqwen import variant as variants
from slimqwen.evals.fidelity_figures import (
    FIGURE_NAMES,
    PLAIN,
    FidelityLimits,
    FidelitySettings,
    Figures,
    NoiseRatio,
    judge_figures,
    noise_ratios,
    summarise_texts,
)
from slimqwen.evals.invocation import Invocation
from slimqwen.progress import Progress, silent
from slimqwen.records import provenance, store
from slimqwen.records.journal import journal_file, locked
from slimqwen.records.record import (
    Block,
    Estimate,
    MeasuredCheckpoint,
    NonNegative,
    Positive,
    Table,
    VariantName,
    Verdict,
)
from slimqwen.records.settings import SettingsName
from slimqwen.records.split import SplitRecord
from slimqwen.serving import shared_server, speed_only
from slimqwen.serving.command import ServerCommand
from slimqwen.stats.verdict import overall
from slimqwen.variant import Variant

_HEADINGS = {**FIGURE_NAMES, "joined_kl_nats": "KL of all texts joined into one, nats a token"}
WEIGHT_FLAGS = ("dtype", "kv-cache-dtype", "mamba-ssm-cache-dtype", "quantization")
"""The vLLM flags that affect the next-token distributions of a prompt."""


class Unchanged(Block):
    """Rounding noise of a variant with its baseline's checkpoint and dtypes, as ratios to the mode single.

    Each ratio is the distance from the baseline in float32, divided by that of the mode single (one text at a time,
    eager).
    """

    limit: NonNegative = Field(description="Largest ratio that passes.")
    ratios: tuple[NoiseRatio, ...]


class Reference(Block):
    """The baseline with which a variant was compared."""

    checkpoint: MeasuredCheckpoint
    flags: dict[str, Any] = Field(
        description="The flags that affect the next-token distributions of a prompt, and max-model-len."
    )

    @classmethod
    def of(cls, variant: Variant, progress: Progress = silent) -> "Reference":
        """Describe the present baseline of a variant; for a baseline, itself."""
        baseline = variants.load(variant.baseline, variant.root) if variant.baseline else variant
        server = ServerCommand.resolve(baseline)
        return cls(
            checkpoint=provenance.checkpoint_files(baseline.weights, baseline.root, progress),
            flags={**weight_flags(server.flags), "max-model-len": server.max_model_len},
        )


def changed_reference(
    before: Reference | None, side: Variant, *, on_any_machine: bool, progress: Progress
) -> list[str]:
    """Check whether the baseline of a side has changed since a record was made.

    Args:
        before: the baseline that the record states; None in an old record, which then counts as changed.
        side: the variant, or the baseline itself.
        on_any_machine: whether another build of the baseline's checkpoint, and an old record, count as unchanged.
        progress: receives (activity, done, total) where the checkpoint is hashed.

    Returns:
        ["baseline"] if it has changed, else an empty list.
    """
    if before is None:
        return [] if on_any_machine else ["baseline"]
    present = Reference.of(side, progress)
    builds = ("same", "another build") if on_any_machine else ("same",)
    is_same = before.flags == present.flags and before.checkpoint.compare_build(present.checkpoint) in builds
    return [] if is_same else ["baseline"]


class Fidelity(SplitRecord):
    """Distance of a variant's next-token distributions from its baseline's."""

    kind = "fidelity"
    version = 3
    verb = "eval fidelity"

    baseline: VariantName = Field(description="The baseline; the variant itself if it has none.")
    reference: Reference | None = Field(
        default=None, description="The baseline as it was measured; absent in old records."
    )
    settings_name: SettingsName = Field(description="Name of the settings file in eval/gates/.")
    limits: FidelityLimits
    unchanged: Unchanged | None = Field(description="null if checkpoint or dtypes are not the baseline's.")
    texts_available: Positive | None = Field(
        default=None,
        description="Number of texts in the file, of which only the first were read; absent if all were read.",
    )
    modes: dict[str, Figures] = Field(min_length=1)
    verdicts: dict[str, dict[str, Verdict]] = Field(description="Verdict of each figure in each mode.")
    verdict: Verdict

    def tables(self, path: Path) -> list[Table]:
        """A table with a row per figure and mode, with its limit; then the noise ratios of unchanged weights."""
        limits = {**self.limits.model_dump(), "joined_kl_nats": self.limits.kl_nats}
        rows = [
            (heading, mode, _cell(figures, name), f"{limits[name]:g}", str(self.verdicts[mode][name]))
            for name, heading in _HEADINGS.items()
            for mode, figures in self.modes.items()
            if name in self.verdicts[mode]
        ]
        first = next(iter(self.modes.values()))
        notes = [
            f"{first.positions_compared:,} positions of {first.texts_compared} of {first.texts} texts; bits per byte "
            "of all texts."
        ]
        if self.texts_available:
            notes.append(
                f"The first {first.texts} of {self.texts_available:,} texts were read; most_texts in the section "
                "fidelity of gate.yaml sets how many."
            )
        notes += [
            f"{mode}: over HTTP; KL over the likeliest {figures.top_k} tokens, with all other tokens as one bucket."
            for mode, figures in self.modes.items()
            if figures.top_k is not None
        ]
        if self.unchanged:
            notes.append(
                f"Noise ratio: checkpoint and dtypes are those of {self.baseline}; distance from it in float32, "
                f"divided by that of the mode {PLAIN}."
            )
            for ratio in self.unchanged.ratios:
                interval = "" if ratio.low is None else f" [{ratio.low:.2f}, {ratio.high:.2f}]"
                name, limit = f"noise ratio: {_HEADINGS[ratio.figure]}", f"{self.unchanged.limit:g}"
                rows.append((name, ratio.mode, f"{ratio.value:.2f}{interval}", limit, str(ratio.verdict)))
        title = f"Fidelity of {self.variant} to {self.baseline}: {self.verdict}"
        columns = "figure", "mode", "value ± SE", "limit", "verdict"
        return [Table(title, columns, tuple(rows), (*notes, provenance.source_note(self, path)), 2)]


def weight_flags(flags: Mapping[str, Any]) -> dict[str, Any]:
    """Select those of vLLM's `flags` that affect the next-token distributions of a prompt."""
    return {name: flags[name] for name in WEIGHT_FLAGS if name in flags}


def measure_fidelity(
    variant: Variant,
    settings: FidelitySettings,
    invocation: Invocation,
) -> Path:
    """Compare a variant with its baseline, or a baseline with itself, and write its fidelity record.

    The variant is compared twice: as an uncompiled engine in this process with its weights, dtype and KV cache dtype;
    then as its server with the whole config.env.

    Args:
        variant: the variant.
        settings: texts and limits.
        invocation: settings that all measurements of a command share.

    Returns:
        Path of the record.

    Raises:
        ServingError: the variant's weights are random, or a flag sets its acceptance length.
        MissingCheckpointError, CorruptCheckpointError: a checkpoint of variant or baseline is missing or damaged.
        EvalError: the checkpoints, texts or settings allow no comparison.
        CorpusError: the file of texts is missing or malformed.
        RunInProgressError: another process compares the same two.
        ServerLostError: the server died or refused a request; nothing is recorded.
    """
    speed_only.refuse_speed_only(variant, "fidelity")
    baseline = variants.load(variant.baseline, variant.root) if variant.baseline else variant
    for side in (variant, baseline):
        side.require_weights()
    key = settings.model_dump(mode="json"), checkpoint.digest(baseline.weights), invocation.split
    # For its lock: the comparison takes a minute and begins anew if it is interrupted.
    with locked(journal_file("fidelity", ServerCommand.resolve(variant), *map(str, key))) as journal:
        path = _compare(variant, baseline, settings, invocation)
        journal.discard()
    return path


def _compare(variant: Variant, baseline: Variant, settings: FidelitySettings, invocation: Invocation) -> Path:
    """Compare a variant with its baseline, and write the record."""
    from slimqwen.evals import token_distributions

    started = provenance.utc_now()
    root = variant.root
    server_command = ServerCommand.resolve(variant)
    reference = token_distributions.ReferenceTexts.load(
        variant.weights,
        baseline.weights,
        settings,
        root,
        max_model_len=min(server_command.max_model_len, ServerCommand.resolve(baseline).max_model_len),
        split=invocation.split,
    )
    texts = token_distributions.compare_in_process(
        reference, variant.weights, flags=weight_flags(server_command.flags), progress=invocation.progress
    )
    reference.baseline.free_layers()
    log = root / "logs" / f"fidelity-server-{variant.name}.log"
    with shared_server.share_server(
        variant, port=invocation.port, log=log, progress=invocation.progress
    ) as server:
        texts += token_distributions.compare_served(reference, server, progress=invocation.progress)
    modes = summarise_texts(texts)
    verdicts = {mode: judge_figures(figures, settings.limits) for mode, figures in modes.items()}
    unchanged = None
    if _has_same_model(variant, baseline):
        limit = settings.unchanged_ratio
        unchanged = Unchanged(limit=limit, ratios=tuple(noise_ratios(texts, limit)))
    ratios = unchanged.ratios if unchanged else ()
    leaves_out = settings.most_texts is not None and reference.available > settings.most_texts
    record = Fidelity(
        variant=variant.name,
        baseline=baseline.name,
        reference=Reference.of(variant, invocation.progress),
        settings_name=settings.name,
        split=invocation.split,
        limits=settings.limits,
        unchanged=unchanged,
        texts_available=reference.available if leaves_out else None,
        modes=modes,
        verdicts=verdicts,
        verdict=overall(
            [
                *(verdict for of_mode in verdicts.values() for verdict in of_mode.values()),
                *(row.verdict for row in ratios),
            ]
        ),
        provenance=provenance.describe(
            server.server.command,
            invocation.command,
            started,
            datasets=settings.inputs(root),
            already_running=server.already_running,
        ),
    )
    return store.write_record(invocation.records_of(variant), record, (each.as_item() for each in texts))


def _has_same_model(variant: Variant, baseline: Variant) -> bool:
    """Whether both have the same checkpoint and dtypes, so that they can differ only by rounding."""
    first, second = (weight_flags(ServerCommand.resolve(side).flags) for side in (variant, baseline))
    return first == second and checkpoint.digest(variant.weights) == checkpoint.digest(baseline.weights)


def _cell(figures: Figures | None, name: str) -> str:
    figure: Estimate | float | None = getattr(figures, name, None)
    return "-" if figure is None else f"{figure:.5f}"
