"""Optimises a checkpoint from its baseline to a proven variant: makes it, judges it, takes back what a check points at.

Nothing here measures or decides by itself: `fit` chooses the first recipe, `proof` judges, `choice` says what to serve.
Each try is judged on the search's side of the items' split, and the last on the side that no try saw.
"""

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

from slimqwen import checkpoint
from slimqwen import variant as variants
from slimqwen.checkpoint import draft_head, packing
from slimqwen.fit.optimised import list_optimised
from slimqwen.fit.subject import find_subject
from slimqwen.identity import digest_of
from slimqwen.models.families import SCALED_WITH
from slimqwen.models.layer_error import measure_kind_errors
from slimqwen.models.outline import Outline
from slimqwen.models.vocabulary import read_tokenizer
from slimqwen.progress import Progress, silent
from slimqwen.recipe import runner, variant_recipe
from slimqwen.recipe.calibration_text import calibration_documents
from slimqwen.recipe.recipe_file import Step
from slimqwen.recipe.stages.calibrate import CalibrateParameters
from slimqwen.records import store
from slimqwen.search.candidate import Candidate, describe_changes
from slimqwen.search.proof import Finalist
from slimqwen.stats.verdict import Verdict
from slimqwen.text.corpus import SELF
from slimqwen.variant import Variant, scaffold

MOST_TRIES = 3
"""Recipes that are judged at most."""

_OF_FIT: Mapping[str, Mapping[str, Any]] = {
    "4-bit MLPs": {"mlp": "W4A16"},
    "4-bit attention": {"attention": "W4A16", "linear_attention": "W4A16"},
    "4-bit head": {"head_bits": 4},
    "4-bit MTP": {"mtp": "W4A16"},
}
"""Choices of a candidate by the optimisation's name in `slimqwen fit`; `choose_first` makes those that count rows."""

_DEPTH = 4
_TEXT = 512
"""Tokens of the text on which the kinds of a layer are compared."""


@dataclass
class Optimisation:
    """What an optimisation has decided so far; a file, replaced after each step, from which it goes on.

    Attributes:
        model: what the user named.
        steps: names of the steps that ended, with a sentence on each.
        candidate: choices of the present try that are not defaults.
        tries: variant, verdict and reason of each judged try.
        step: the step that runs; `left` are those after it.
    """

    file: Path
    model: str
    steps: dict[str, str] = field(default_factory=dict)
    candidate: dict[str, Any] | None = None
    tries: list[dict[str, str]] = field(default_factory=list)
    step: str = ""
    left: list[str] = field(default_factory=list)
    seconds: float = 0

    @classmethod
    def open(cls, root: Path, base: str, model: str) -> "Optimisation":
        """The journal of a baseline, new or as it was left."""
        file = root / ".cache" / "optimise" / f"{base}.json"
        known = json.loads(file.read_text(encoding="utf-8")) if file.is_file() else {"model": model}
        return cls(file=file, **known)

    def write(self) -> None:
        """Replace the file."""
        self.file.parent.mkdir(parents=True, exist_ok=True)
        content = {key: value for key, value in asdict(self).items() if key != "file"}
        store.publish(self.file, (json.dumps(content, indent=1) + "\n").encode(), replace=True)


def choose_first(base: Variant, corpus: str) -> Candidate:
    """The first candidate: every optimisation that `fit` lists for the checkpoint."""
    rows = int(checkpoint.text_config(checkpoint.read_config(base.weights))["vocab_size"])
    choices: dict[str, Any] = {}
    for step in list_optimised(find_subject(base.name, base.root)):
        choices |= _OF_FIT.get(step.optimisation, {})
        kept = step.outline.text["vocab_size"]
        # The model's own text does not say what users write, so nothing is pruned by it.
        if step.optimisation == "64k tokens" and corpus != str(SELF):
            choices["vocabulary"] = kept / rows
        if step.optimisation == "32k drafted":
            choices |= {"draft_vocabulary": step.outline.text[draft_head.SIZE_KEY] / rows}
    if "mtp" in choices or "draft_vocabulary" in choices:
        choices["depth"] = _DEPTH
    absent = _absent_kinds(base)
    return Candidate.from_point({key: value for key, value in choices.items() if key not in absent})


def _absent_kinds(base: Variant) -> set[str]:
    tensors = Outline.read(base.weights).tensors
    return {kind for kind in SCALED_WITH if not packing.linears(tensors, kind)}


def make_variant(candidate: Candidate, base: Variant, corpus: str, stages: Mapping[str, Any]) -> Variant:
    """The variant of a candidate, written if it is not there."""
    recipe, lines = candidate.render(base, stages, corpus), candidate.lines(base)
    name = f"{base.name}-optimised-{digest_of([recipe, lines])[:6]}"
    if name not in variants.names(base.root):
        hypothesis = (
            f"{base.name} with {describe_changes(candidate.changes)} is faster and keeps every limit."
        )
        scaffold.create(name, base.name, hypothesis, recipe=recipe, lines=lines, root=base.root)
    return variants.load(name, base.root)


def take_back(
    candidate: Candidate, judged: Finalist, variant: Variant, progress: Progress = silent
) -> tuple[Candidate, str] | None:
    """The candidate without the step that a failed check points at, and why; None if nothing is left to take back.

    Drafts change no answer, so acceptance points at them; fidelity and quality point at the weights: first the 4-bit
    kind with the largest error in the worst layer becomes 8-bit, and the next one; then the vocabulary is whole again,
    then the head is in 16 bits.
    """
    failed = {finding.gate for finding in judged.findings if finding.verdict != Verdict.PASS}
    if failed == {"acceptance"} and candidate.depth:
        if candidate.draft_vocabulary < 1:
            share = min(1.0, 2 * candidate.draft_vocabulary)
            return replace(
                candidate, draft_vocabulary=share
            ), f"acceptance: {share:.0%} of the ids may be drafted"
        if candidate.mtp != "none":
            return replace(candidate, mtp="none"), "acceptance: the MTP head stays in 16 bits"
        return None
    if not failed & {"fidelity", "quality"}:
        return None
    why = " and ".join(sorted(failed))
    if narrow := [kind for kind, scheme in candidate.calibrated.items() if scheme == "W4A16"]:
        kind, layer = _worst_kind(variant, progress) if len(narrow) > 1 else (narrow[0], None)
        kind = kind if kind in narrow else narrow[0]
        where = f", which has the largest error in layer {layer}" if layer is not None else ""
        wider: dict[str, Any] = {kind: "W8A16"}
        return replace(candidate, **wider), f"{why}: 8 bits for {kind}{where}"
    if candidate.vocabulary < 1:
        return replace(candidate, vocabulary=1.0), f"{why}: the whole vocabulary"
    if candidate.head_bits == 4:
        return replace(candidate, head_bits=16), f"{why}: the output head in 16 bits"
    return None


def _worst_kind(variant: Variant, progress: Progress) -> tuple[str, int | None]:
    """The kind of linears with the largest error in the layer with the largest error, and that layer."""
    recipe = variant_recipe.read_recipe(variant)
    outcomes = variant_recipe.run_recipe(variant, progress=progress)
    number, calibrated = next(
        (at, each)
        for at, each in enumerate(outcomes)
        if each.stage == "calibrate" and "layers" in each.manifest.facts
    )
    layer = _worst_layer(calibrated)
    step: Step = recipe.steps[number]
    parameters = step.parameters
    assert isinstance(parameters, CalibrateParameters)
    base = variant_recipe.base_folder(recipe.base, variant.root)
    source = outcomes[number - 1].folder if number else base
    ids = _first_tokens(parameters, source)
    errors = measure_kind_errors(base, layer, parameters.targets.calibrated, parameters.group_size, ids)
    return max(errors, key=lambda kind: errors[kind]), layer


def _worst_layer(calibrated: runner.Outcome) -> int:
    facts: Mapping[str, Any] = calibrated.manifest.facts
    errors: Sequence[float] = facts["layer_errors"]
    return int(facts["layers"][max(range(len(errors)), key=lambda at: errors[at])])


def _first_tokens(parameters: CalibrateParameters, source: Path) -> list[int]:
    text = "".join(calibration_documents(parameters.corpus, source)[:64])
    ids: list[int] = read_tokenizer(source / "tokenizer.json").encode(text, add_special_tokens=False).ids
    return ids[:_TEXT]
