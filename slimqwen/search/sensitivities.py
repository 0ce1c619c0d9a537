"""Sensitivities: what each change of a base costs alone, in divergence for weights and in accepted tokens for drafts.

Three tasks measure in memory, without writing a checkpoint: one samples outputs of the base, one rounds one kind of
linears at a time, one drafts with one change at a time.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import yaml

from slimqwen import checkpoint, host
from slimqwen.checkpoint import packing
from slimqwen.checkpoint.weights import has_mtp_head
from slimqwen.formats import find_format
from slimqwen.formats.compressed_tensors import PackedIntegers
from slimqwen.models.outline import Outline
from slimqwen.processes import ENGINE_BYTES, Executor, Failure, Outcome, Resources, Task, run_tasks
from slimqwen.progress import Progress
from slimqwen.recipe import recipe_file, runner, schemes, variant_recipe
from slimqwen.recipe.sampled_outputs import read_outputs
from slimqwen.recipe.stages.prune_vocab import stored_rows
from slimqwen.records import provenance
from slimqwen.records.journal import locked
from slimqwen.search import SearchError
from slimqwen.search.candidate import KINDS
from slimqwen.variant import Variant

DEEPEST = 6
"""Most tokens that a candidate drafts at a time (K)."""

_SCHEMES = ("W8A16", "W6A16", "W5A16", "W4A16", "W3A16", "W2A16")
_GROUP_SIZES = (32, 64, 128)
_DRAFTED = (0.5, 0.375, 0.25, 0.125)
_TOKENS = 1024
"""Length of the text on which distributions are compared."""


@dataclass(frozen=True)
class Change:
    """One choice of a `Candidate` that is not the default.

    Attributes:
        choice: field of `Candidate`.
        value: the field's value.
        group_size: number of weights in a row that share a scale; None where there are no groups.
    """

    choice: str
    value: str | int | float
    group_size: int | None = None

    @property
    def label(self) -> str:
        """The change in words."""
        groups = f" in groups of {self.group_size}" if self.group_size else ""
        return f"{self.choice} {self.value}{groups}"

    @property
    def form(self) -> PackedIntegers:
        """How the change stores the weights: bits, groups and tensors."""
        scheme = self.value if isinstance(self.value, str) else f"W{self.value}A16"
        return schemes.packing_of(scheme, self.group_size or 0).layout


@dataclass(frozen=True)
class Sensitivities:
    """Measured cost of each change, made alone.

    Attributes:
        kl_nats: change of the weights -> divergence of the next-token distributions from the base's, nats a token.
        rates: change of the drafts -> for each position 1..K, the share of verify steps that accept the draft's tokens
            up to and including it.
        base_rates: the same rates without a change; empty without an MTP head.
    """

    kl_nats: Mapping[Change, float]
    rates: Mapping[Change, Sequence[float]]
    base_rates: Sequence[float]

    def rates_with(self, changes: Sequence[Change]) -> list[float]:
        """Forecast the acceptance rate at each position with several changes of the drafts.

        It is the base's rate times, for each change, the share of that rate that the change alone keeps.
        """
        rates = list(self.base_rates)
        for change in changes:
            pairs = zip(self.rates[change], self.base_rates, strict=True)
            rates = [
                rate * min(1, own / base) if base else 0
                for rate, (own, base) in zip(rates, pairs, strict=True)
            ]
        return rates


def list_changes(base: Variant) -> tuple[list[Change], list[Change]]:
    """List the changes that can be tried on a base and served by this host's kernels.

    Returns:
        The changes of weights, and those of drafts; either is empty if none is possible.
    """
    outline = Outline.read(base.weights)
    widths = {
        info.shape[1]
        for name, info in outline.tensors.items()
        if name.endswith("_proj.weight") and len(info.shape) == 2
    }
    groups = [size for size in _GROUP_SIZES if all(width % size == 0 for width in widths)]
    takes_more = find_format(checkpoint.quantisation(outline.config)).takes_more
    is_plain = not checkpoint.quantisation(outline.config)

    def in_groups(choice: str, values: Sequence[str | int]) -> list[Change]:
        changes = []
        for value in values:
            sizes: Sequence[int | None] = [None] if value in ("W8A16", 8) else groups
            changes += [Change(choice, value, size) for size in sizes]
        is_cpu = host.detect() == "cpu"
        return [each for each in changes if not is_cpu or each.form.has_cpu_kernel(choice)]

    weights: list[Change] = []
    if is_plain:
        for kind in KINDS:
            weights += in_groups(kind, _SCHEMES) if packing.linears(outline.tensors, kind) else []
        weights += in_groups("head_bits", [4])
    drafts: list[Change] = []
    if is_plain and has_mtp_head(base.weights) and takes_more:
        drafts += in_groups("mtp", _SCHEMES[::3])
        if "num_experts" not in outline.text:
            drafts += [Change("draft_vocabulary", share) for share in _DRAFTED]
            drafts += in_groups("draft_bits", [8, 4])
    return weights, drafts


def measure_sensitivities(
    base: Variant, sampling: Mapping[str, Any], corpus: str | None, executor: Executor, folder: Path
) -> Sensitivities:
    """Measure every change of `list_changes`; results of an interrupted run in `folder` are reused.

    Args:
        sampling: parameters of the stage sample_outputs.
        corpus: text with the prompts of the samples; None if `sampling` names its own.
        executor: runs the measurements; the caller has entered it.
        folder: folder of the results so far.

    Raises:
        SearchError: a measurement failed.
    """
    weights, drafts = list_changes(base)
    needs = Resources(gpus=1 if host.detect() == "cuda" else 0, memory_bytes=ENGINE_BYTES)

    def task(title: str, function: Callable[[Path, Any, Progress], Any], *argument: Any) -> Task:
        return Task(title, title, function, argument, needs)

    with locked(folder / "sensitivities.jsonl") as journal:
        sample = task("outputs of the base", sample_outputs, base.name, dict(sampling), corpus)
        outputs = _value(run_tasks([sample], executor)[sample.key])
        tasks = [task("what rounding costs", round_kinds, outputs, weights)]
        tasks += [task("what changes of the drafts cost", change_drafts, outputs, drafts)] if drafts else []
        asked = {
            each.key: [each.key, outputs, list(map(asdict, each.argument[1])), provenance.package_versions()]
            for each in tasks
        }
        missing = [each for each in tasks if journal.get(asked[each.key]) is None]
        for key, outcome in run_tasks(missing, executor).items():
            journal.add(asked[key], _value(outcome))
        divergences, *rates = [journal.get(asked[each.key]) or [] for each in tasks]
    base_rates, *others = rates[0] if rates else [[]]
    return Sensitivities(
        dict(zip(weights, divergences, strict=True)), dict(zip(drafts, others, strict=True)), base_rates
    )


def _value(outcome: Outcome) -> Any:
    if isinstance(outcome, Failure):
        raise SearchError(f"{outcome.key}: {outcome.reason}")
    return outcome.value


def sample_outputs(root: Path, argument: tuple[str, dict[str, Any], str | None], _: Progress) -> str:
    """Sample outputs of a base by the stage sample_outputs; returns their folder, relative to `root`.

    Args:
        argument: name of the base, parameters of the stage, and text with the prompts (None if the parameters name it).
    """
    base, sampling, corpus = argument
    # Two folders deep, as recipes of variants are, so that relative paths lead to the same files.
    file = root / ".cache" / "search" / f"{base}.yaml"
    content = {"description": "Outputs.", "base": base, **({"corpus": corpus} if corpus else {})}
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text(yaml.safe_dump({**content, "stages": [{"sample_outputs": sampling}]}), encoding="utf-8")
    name = f"{base}-search-outputs"
    outcomes = runner.run_recipe(
        recipe_file.read_recipe(file),
        name,
        root / "weights",
        lambda each: variant_recipe.base_folder(each, root),
    )
    (root / "weights" / name).unlink(missing_ok=True)
    return str(outcomes[-1].folder.relative_to(root))


def round_kinds(root: Path, argument: tuple[str, Sequence[Change]], _: Progress) -> list[float]:
    """Measure what each change of the weights costs on sampled outputs: divergence from the base, nats a token.

    Args:
        argument: folder of `sample_outputs`, and the changes.
    """
    from slimqwen.models.layer_error import measure_kind_divergences

    folder, changes = argument
    ids: list[int] = []
    for output in read_outputs(root / folder):
        ids += [] if output.held_out else [*output.prompt, *output.continuation]
    forms = {each: ("lm_head" if each.choice == "head_bits" else each.choice, each.form) for each in changes}
    costs = measure_kind_divergences(root / folder, forms, ids[:_TOKENS])
    return [costs[each] for each in changes]


def change_drafts(
    root: Path, argument: tuple[str, Sequence[Change]], progress: Progress
) -> list[list[float]]:
    """Measure acceptance rates by draft position on held-out sampled outputs: first without a change, then with each.

    Args:
        argument: folder of `sample_outputs`, and the changes of the drafts.

    Returns:
        For each of them, a rate at each position 1..K: the share of verify steps that accept the draft's tokens up to
        and including that position.
    """
    from slimqwen.models.draft_sensitivity import DraftChange, measure_draft_rates
    from slimqwen.recipe.stages.trim_draft_vocab import rank_ids

    source = root / argument[0]
    ids = rank_ids(source)
    made = [DraftChange()]
    for each in argument[1]:
        if each.choice == "draft_vocabulary":
            size = stored_rows(round(len(ids) * float(each.value)))
            made.append(DraftChange(token_ids=sorted(ids[:size].tolist())))
        else:
            is_head = each.choice == "mtp"
            made.append(DraftChange(head=each.form) if is_head else DraftChange(rows=each.form))
    texts = [(each.prompt, each.continuation) for each in read_outputs(source) if each.held_out]
    with TemporaryDirectory(dir=root / ".cache" / "search") as states:
        return measure_draft_rates(source, texts, made, DEEPEST, Path(states), progress)
