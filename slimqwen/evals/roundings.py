"""Roundings: divergence on text that each way to round a checkpoint's weights costs, in one table.

Transformers evaluates the original checkpoint in float32. It evaluates each row's rounded weights in float32, too,
unless the row names another arithmetic, so that only the weights differ. A row is made by stages of a recipe, or is
rounded to nearest in memory where no stage or kernel has that width. The texts are not those of the gate.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Annotated, Any, ClassVar, Literal

from pydantic import BaseModel, ConfigDict, Field, model_validator

from slimqwen.checkpoint import packing
from slimqwen.checkpoint.tensors import list_tensors
from slimqwen.evals.fidelity_figures import (
    FidelityLimits,
    FidelitySettings,
    Figures,
    TextComparison,
    judge_figures,
    summarise_texts,
)
from slimqwen.evals.invocation import Invocation
from slimqwen.formats.compressed_tensors import PackedIntegers
from slimqwen.progress import Progress, progress_of
from slimqwen.recipe import runner
from slimqwen.recipe.recipe_file import Recipe, Step
from slimqwen.recipe.registry import STAGES
from slimqwen.records import provenance, store
from slimqwen.records.journal import journal_file, locked
from slimqwen.records.record import Block, Count, Ratio, Record, Table, Verdict
from slimqwen.records.settings import Settings
from slimqwen.serving.command import ServerCommand
from slimqwen.stats import intervals
from slimqwen.stats.verdict import overall
from slimqwen.variant import Variant
from slimqwen.workspace import locate


class Rounding(BaseModel):
    """One way to round, a row of the table: to nearest in memory, or by stages of a recipe.

    Attributes:
        name: name of the row.
        bits: kind of weights (a key of `packing.LINEARS`) -> bits to which it is rounded to nearest.
        group_size: number of neighbouring weights of a row that share a scale; None for one scale a row.
        zero_points: whether a group has a zero point.
        stages: stages that round instead, as in recipe.yaml; paths are relative to the repository.
        arithmetic: dtype of weights and activations.
        over: name of an earlier row: the divergence of this row is also shown as a ratio to that row's. None for no
            ratio.
    """

    model_config = ConfigDict(extra="forbid", frozen=True)

    name: str
    bits: Mapping[str, Annotated[int, Field(ge=2, le=8)]] = {}
    group_size: int | None = None
    zero_points: bool = False
    stages: tuple[dict[str, dict[str, Any]], ...] = ()
    arithmetic: Literal["float32", "bfloat16", "float16"] = "float32"
    over: str | None = None

    @property
    def layouts(self) -> Mapping[str, PackedIntegers]:
        """Kind of weights that is rounded in memory (a key of `packing.LINEARS`) -> its bits and groups."""
        return {
            kind: PackedIntegers(bits, self.group_size, not self.zero_points)
            for kind, bits in self.bits.items()
        }

    def steps(self, root: Path) -> tuple[Step, ...]:
        """The stages with their parameters, as a recipe has them; relative paths are taken from the folder `root`."""
        return tuple(
            Step(STAGES[name], STAGES[name].parameters.model_validate(values, context={"folder": root}))
            for entry in self.stages
            for name, values in entry.items()
        )


class RoundingsSettings(Settings):
    """Settings of eval/roundings/<name>.yaml.

    Attributes:
        gate: name of the gate whose texts, prefix and limits are used.
        first: index of the first text that is read, from 0.
        texts: number of texts that are read.
        rows: the ways to round.
    """

    folder: ClassVar[str] = "roundings"

    gate: str
    first: int = Field(ge=0)
    texts: int = Field(ge=2)
    rows: tuple[Rounding, ...]

    @model_validator(mode="after")
    def _rows_name_earlier_ones(self) -> "RoundingsSettings":
        names = [row.name for row in self.rows]
        for number, row in enumerate(self.rows):
            if names.count(row.name) > 1 or (row.over is not None and row.over not in names[:number]):
                raise ValueError(
                    f"the row {row.name} is there twice, or its `over` is no earlier row; give each row a name of "
                    "its own, and `over` the name of a row above"
                )
        return self


class _LaterTexts(FidelitySettings):
    """The settings of a gate with other texts of its file."""

    first: int

    def read_texts(self, root: Path, split: Any = None) -> list[tuple[str, str]]:
        return super().read_texts(root, split)[self.first :]


class RoundingFigures(Block):
    """Size and divergence of one way to round."""

    name: str = Field(min_length=1)
    tensor_bytes: Count = Field(description="Of all tensors, as the layout stores them.")
    figures: Figures
    over: str | None = Field(description="Row whose divergence this one's is divided by.")
    kl_ratio: Ratio | None = Field(description="Divergence over that row's, paired by text.")
    verdict: Verdict = Field(description="By the limits of the gate, on these texts.")


class Roundings(Record):
    """How far each way to round a checkpoint's weights moves its distributions from those in float32."""

    kind = "roundings"
    verb = "eval roundings"

    limits: FidelityLimits
    rows: tuple[RoundingFigures, ...] = Field(min_length=1)

    @property
    def topic(self) -> str:
        """Name of the settings, eval/roundings/<name>.yaml."""
        return next(Path(name).stem for name in self.provenance.datasets if "/roundings/" in name)

    def tables(self, path: Path) -> list[Table]:
        """One row for each rounding."""
        rows = []
        for row in self.rows:
            figures = row.figures
            ratio = f"{row.kl_ratio:.2f} of {row.over}" if row.kl_ratio else ""
            cells = [
                f"{each:.4f}" if each else "-"
                for each in (figures.kl_nats, figures.top1_disagreement, figures.bits_per_byte)
            ]
            rows.append((row.name, f"{row.tensor_bytes / 1e6:.1f}", *cells, ratio, str(row.verdict)))
        first = self.rows[0].figures
        heading = (
            "rounding",
            "MB",
            "KL ± SE, nats a token",
            "other argmax ± SE",
            "bits per byte ± SE",
            "KL over another row's",
            "by the gate's limits",
        )
        notes = (
            f"{first.positions_compared:,} positions of {first.texts} texts; a smaller vocabulary is compared on those "
            "whose tokens it kept. Bits per byte: growth on all texts. Ratios are paired by text, with 95 % intervals.",
            provenance.source_note(self, path),
        )
        return [Table(f"Roundings of {self.variant}", heading, tuple(rows), notes, 1)]


PRETRAINED = "smollm2-135m"
"""The variant whose records say what a width costs a pretrained model."""


def costs_seen(bits: int, root: Path) -> str | None:
    """Say in a sentence what rounding to `bits` cost the model `PRETRAINED`; None if that was not measured.

    Args:
        bits: bits of a weight.
        root: folder of the workspace or checkout with the records.
    """
    rows = {
        row.name: row.figures.kl_nats
        for path in reversed(store.records(locate(f"experiments/{PRETRAINED}", root), Roundings))
        for row in store.read_record(path, Roundings).rows
        if row.name.startswith(f"W{bits} ") and row.figures.kl_nats
    }
    if not rows:
        return None
    costs = ", ".join(f"{name} {kl.value:.2f}" for name, kl in rows.items())
    return (
        f"{bits} bits cost {PRETRAINED}, in nats of divergence a token: {costs}; larger models lose less, and by a "
        "budget of widths more is kept (docs/real-model.md). Nothing of this was measured on this model."
    )


def measure_roundings(
    variant: Variant,
    settings: RoundingsSettings,
    invocation: Invocation,
) -> Path:
    """Measure what each way to round costs, and write the record.

    A run that was interrupted continues after its last row.

    Args:
        variant: variant whose checkpoint is rounded.
        settings: the ways to round, and the texts.
        invocation: settings that all measurements of a command share.

    Returns:
        Path of the record.

    Raises:
        EvalError: the texts allow no comparison.
        RecipeError: a stage failed.
        MissingCheckpointError, CorruptCheckpointError: the variant's checkpoint is missing or damaged.
    """
    variant.require_weights()
    started, root = provenance.utc_now(), variant.root
    gate = FidelitySettings.load(settings.gate, root)
    fields = {**gate.model_dump(), "most_texts": settings.texts, "first": settings.first}
    texts = _LaterTexts.model_validate(fields)
    journal = journal_file("roundings", ServerCommand.resolve(variant), fields | {"texts": str(gate.texts)})
    rows: list[RoundingFigures] = []
    comparisons: dict[str, list[TextComparison]] = {}
    with locked(journal) as answers:
        for number, row in enumerate(settings.rows):
            shown = progress_of(f"{row.name} ({number + 1} of {len(settings.rows)})", invocation.progress)
            answer = answers.answer(
                row.model_dump(mode="json"), partial(_measure, row, variant, texts, shown)
            )
            comparisons[row.name] = [TextComparison(**each) for each in answer["texts"]]
            rows.append(_summarise(row, answer["tensor_bytes"], comparisons, gate.limits))
        record = Roundings(
            variant=variant.name,
            limits=gate.limits,
            rows=tuple(rows),
            provenance=provenance.of_variant(
                variant,
                invocation.command,
                started,
                datasets=provenance.data_digests([*settings.files(root), *gate.inputs(root)], root),
            ),
        )
        path = store.write_record(invocation.records_of(variant), record)
        answers.discard()
    return path


def _measure(row: Rounding, variant: Variant, texts: FidelitySettings, progress: Progress) -> dict[str, Any]:
    """Size and comparisons of a row, as JSON."""
    import torch

    from slimqwen.evals.token_distributions import ReferenceTexts, compare_model
    from slimqwen.models.language_model import load_in_float32

    folder = variant.weights
    if steps := row.steps(variant.root):
        name = f"rounding-{variant.name}"
        recipe = Recipe(variant.root, row.name, variant.name, steps)
        folder = runner.run_recipe(
            recipe, name, variant.root / "weights", lambda _: variant.weights, progress=progress
        )[-1].folder
        (variant.root / "weights" / name).unlink()
    # A token has two characters or more on average, and the joined text is as long as a long text.
    longest = max(len(text) for _, text in texts.read_texts(variant.root)[: texts.most_texts]) // 2
    reference = ReferenceTexts.load(folder, variant.weights, texts, variant.root, max_model_len=longest)
    model = load_in_float32(folder)
    round_in_memory(model, row.layouts)
    model.to(getattr(torch, row.arithmetic))
    return {
        "tensor_bytes": sum(_stored_bytes(folder, row.layouts)),
        "texts": [asdict(each) for each in compare_model(reference, model, row.name, progress)],
    }


def round_in_memory(model: Any, layouts: Mapping[str, PackedIntegers]) -> None:
    """Round a language model's weights to nearest, in place; a tied head gets weights of its own.

    Args:
        model: model of transformers, in float32.
        layouts: kind of weights (a key of `packing.LINEARS`) -> bits and groups; other kinds stay as they are.
    """
    import torch

    from slimqwen.checkpoint.rtn import round_to_nearest

    head, embedding = model.get_output_embeddings(), model.get_input_embeddings()
    if head.weight is embedding.weight and not layouts.keys().isdisjoint(packing.TABLES):
        head.weight = torch.nn.Parameter(head.weight.detach().clone())
    for name, module in model.named_modules():
        for kind, layout in layouts.items():
            if packing.is_linear(f"{name}.weight", kind):
                with torch.no_grad():
                    module.weight.copy_(round_to_nearest(module.weight, layout))


def _stored_bytes(folder: Path, layouts: Mapping[str, PackedIntegers]) -> Iterator[int]:
    """Bytes of each tensor; where it is rounded in memory, those that its layout would store."""
    stored = list_tensors(folder)
    tables = dict.fromkeys(packing.TABLES if "lm_head.weight" not in stored else ())
    for name, info in stored.items():
        # A tied embedding is the head too: where one of the two is rounded, both are stored.
        is_tied = tables and packing.is_linear(name, "embed_tokens") and not layouts.keys().isdisjoint(tables)
        names = [name, "lm_head.weight"] if is_tied else [name]
        for each in names:
            kind = next((kind for kind in layouts if packing.is_linear(each, kind)), None)
            if kind is None:
                yield info.end - info.start
            else:
                yield packing.stored_bytes(layouts[kind], *info.shape)


def _summarise(
    row: Rounding,
    tensor_bytes: int,
    comparisons: Mapping[str, Sequence[TextComparison]],
    limits: FidelityLimits,
) -> RoundingFigures:
    (figures,) = summarise_texts(comparisons[row.name]).values()
    ratio = None
    if row.over is not None:
        first, second = (
            [each for each in comparisons[name] if each.compared] for name in (row.over, row.name)
        )
        values = [[each.kl_nats / each.compared for each in side] for side in (first, second)]
        weights = [[each.compared for each in side] for side in (first, second)]
        ratio = intervals.paired_ratio(*values, *weights)
    verdicts = judge_figures(figures, limits)
    return RoundingFigures(
        name=row.name,
        tensor_bytes=tensor_bytes,
        figures=figures,
        over=row.over,
        kl_ratio=ratio,
        verdict=overall(list(verdicts.values())),
    )
