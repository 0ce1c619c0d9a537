"""Optimises a checkpoint from its baseline to a proven variant: makes it, judges it, takes back what a check points at.

Nothing here measures or decides by itself: `fit` chooses the first recipe, `proof` judges, `choice` says what to serve.
Each try is judged on the search's side of the items' split, and the last on the side that no try saw.
"""

import json
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

from slimqwen import checkpoint, host
from slimqwen.checkpoint import draft_head, packing
from slimqwen.file_lock import describe_holders, take_lock
from slimqwen.fit.optimised import list_optimised
from slimqwen.fit.subject import find_subject
from slimqwen.formats.compressed_tensors import PackedIntegers
from slimqwen.models.families import SCALED_WITH
from slimqwen.models.layer_error import measure_kind_divergences
from slimqwen.models.outline import Outline
from slimqwen.models.vocabulary import read_tokenizer
from slimqwen.progress import Progress, silent
from slimqwen.recipe import variant_recipe
from slimqwen.recipe.calibration_text import calibration_documents
from slimqwen.recipe.schemes import CalibrateParameters
from slimqwen.records import store
from slimqwen.records.journal import RunInProgressError
from slimqwen.report.choice import Goal
from slimqwen.search.candidate import STAGES_BY_PLATFORM, Candidate
from slimqwen.search.proof import Finalist
from slimqwen.stats.verdict import Verdict
from slimqwen.text.corpus import SELF, text_digest
from slimqwen.variant import Variant

MOST_TRIES = 4
"""Recipes that are judged at most: the first, and three of which a step was taken back."""

_OF_FIT: Mapping[str, Mapping[str, Any]] = {
    "4-bit MLPs": {"mlp": "W4A16"},
    "4-bit attention": {"attention": "W4A16", "linear_attention": "W4A16"},
    "4-bit head": {"head_bits": 4},
    "4-bit MTP": {"mtp": "W4A16"},
    "8-bit embedding": {"embedding_bits": 8},
    "4-bit draft head": {"draft_bits": 4},
}
"""Choices of a candidate by the optimisation's name in `slimqwen fit`; `choose_first` makes those that count rows."""

_DEPTH = 4
_TEXT = 512
"""Tokens of the text on which the kinds of a layer are compared."""


@dataclass(frozen=True)
class Ended:
    """A step of `slimqwen optimise` that ended.

    Attributes:
        said: sentence about its result, for the user.
        passed: whether the next step may begin.
    """

    said: str
    passed: bool = True


@dataclass
class Optimisation:
    """Journal of one run of `slimqwen optimise`: what it has decided so far. After an interruption it continues here.

    Attributes:
        file: file of the journal, replaced after each step.
        asked: inputs that decide the result, such as text and checkpoint digest; if one changes, the run begins anew.
        steps: the steps that ended, by name.
        candidate: the present candidate, as the choices that are not defaults.
        tries: variant, verdict and reason of each judged try, and what was taken back after it.
        step: name of the running step.
        left: names of the steps after it.
        seconds: time of all runs so far.
    """

    file: Path
    asked: dict[str, Any]
    steps: dict[str, Ended] = field(default_factory=dict)
    candidate: dict[str, Any] | None = None
    tries: list[dict[str, str]] = field(default_factory=list)
    step: str = ""
    left: list[str] = field(default_factory=list)
    seconds: float = 0

    @classmethod
    @contextmanager
    def held(cls, root: Path, base: str) -> Iterator[None]:
        """Lock the journal of a baseline for this process, for a `with` block.

        Raises:
            RunInProgressError: another process optimises the baseline.
        """
        file = cls.path(root, base).with_suffix(".lock")
        file.parent.mkdir(parents=True, exist_ok=True)
        with file.open("a+b") as stream:
            if not take_lock(stream, file):
                raise RunInProgressError(
                    f"another process{describe_holders(file)} optimises {base}; "
                    f"wait until it ends; `slimqwen optimise {base} --status` says where it stands"
                )
            yield

    @staticmethod
    def path(root: Path, base: str) -> Path:
        """Path of a baseline's journal."""
        return root / ".cache" / "optimise" / f"{base}.json"

    @classmethod
    def find(cls, root: Path, base: str) -> "Optimisation | None":
        """Read the journal of a baseline; None if there is none, or only one of an older format."""
        file = cls.path(root, base)
        if not file.is_file():
            return None
        known = json.loads(file.read_text(encoding="utf-8"))
        if "asked" not in known:
            return None
        known["steps"] = {name: Ended(**ended) for name, ended in known["steps"].items()}
        return cls(file=file, **known)

    @classmethod
    def open(cls, root: Path, base: str, asked: dict[str, Any]) -> "Optimisation":
        """Read the journal of a baseline if its inputs equal `asked`; else begin a new one."""
        known = cls.find(root, base)
        return known if known and known.asked == asked else cls(cls.path(root, base), asked)

    def write(self) -> None:
        """Write the journal to its file."""
        self.file.parent.mkdir(parents=True, exist_ok=True)
        content = {key: value for key, value in asdict(self).items() if key != "file"}
        store.publish(self.file, (json.dumps(content, indent=1) + "\n").encode(), replace=True)


def list_deciding(
    base: Variant, text: str, evaluation: str, goal: Goal, progress: Progress = silent
) -> dict[str, Any]:
    """List the inputs that decide an optimisation, by name; files and the checkpoint are stated by digests.

    Args:
        base: the baseline, whose checkpoint is hashed.
        text: calibration text, as a recipe names it.
        evaluation: name of the evaluation.
        goal: speed or memory.
    """
    files = {text: base.folder / text, evaluation: base.root / "eval" / "own" / evaluation}
    digests = {name: text_digest(path) for name, path in files.items() if path.exists()}
    weights = checkpoint.digest(base.weights, progress)
    return {"checkpoint": weights, "text": text, "evaluation": evaluation, "goal": goal, "files": digests}


def describe_try(judged: Mapping[str, str]) -> str:
    """One line about a judged try: variant, verdict, reason, and the change that was taken back after it.

    Args:
        judged: an entry of `Optimisation.tries`.
    """
    back = f"; taken back: {judged['taken back']}" if "taken back" in judged else ""
    return f"{judged['variant']}: {judged['verdict']}: {judged['reason']}{back}"


def choose_first(base: Variant, corpus: str, goal: Goal = "speed") -> Candidate:
    """The first candidate: every optimisation that `fit` lists for the base; without drafts if the goal is memory.

    Args:
        corpus: calibration text, as a recipe names it; by text that the model itself writes no vocabulary is pruned.
        goal: speed or memory.
    """
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
    if goal == "speed" and choices.keys() & {"mtp", "draft_vocabulary"}:
        choices["depth"] = _DEPTH
    absent = _absent_kinds(base)
    return Candidate.of({key: value for key, value in choices.items() if key not in absent})


def _absent_kinds(base: Variant) -> set[str]:
    tensors = Outline.read(base.weights).tensors
    return {kind for kind in SCALED_WITH if not packing.linears(tensors, kind)}


def make_variant(
    candidate: Candidate,
    base: Variant,
    corpus: str,
    evaluation: str | None = None,
    goal: Goal = "speed",
    stages: Mapping[str, Any] | None = None,
) -> Variant:
    """The candidate as a variant, whose folder is written into experiments/ if it does not exist.

    Args:
        corpus: calibration text that recipe.yaml names.
        evaluation: name of the evaluation that judges the variant; None for the base's.
        goal: what its hypothesis promises: faster for speed, smaller for memory.
        stages: further parameters by stage; None for those of this machine's platform (`STAGES_BY_PLATFORM`).
    """
    gain = "faster" if goal == "speed" else "smaller"
    return candidate.scaffold(
        base, "optimised", stages or STAGES_BY_PLATFORM[host.detect()], corpus, evaluation, gain
    )


def take_back(
    candidate: Candidate, judged: Finalist, variant: Variant, progress: Progress = silent
) -> tuple[Candidate, str] | None:
    """Take back the change that a failed check points at; None if none is left. An inconclusive check counts as failed.

    A failed acceptance check points at the drafts, because drafts change no response. Taken back in this order: twice
    as many ids may be drafted, up to all; the draft head has 16 bits; the MTP head has 16 bits.

    Fidelity and quality point at the weights. Taken back in this order: of the kinds of linears in 4 bits the one whose
    rounding costs most becomes 8-bit (the output head 16-bit), then the next; then the vocabulary is whole again; then
    the embedding has 16 bits.

    Args:
        judged: the try with its failed check.
        variant: the variant of the try.

    Returns:
        The next candidate, and the reason in words.
    """
    failed = {finding.gate for finding in judged.findings if finding.verdict != Verdict.PASS}
    if failed == {"acceptance"} and candidate.depth:
        if candidate.draft_vocabulary < 1:
            share = min(1.0, 2 * candidate.draft_vocabulary)
            return replace(
                candidate, draft_vocabulary=share
            ), f"acceptance: {share:.0%} of the ids may be drafted"
        if candidate.draft_bits < candidate.head_bits:
            return replace(candidate, draft_bits=16), "acceptance: the draft head in 16 bits"
        if candidate.mtp != "none":
            return replace(candidate, mtp="none"), "acceptance: the MTP head stays in 16 bits"
        return None
    if not failed & {"fidelity", "quality"}:
        return None
    why = " and ".join(sorted(failed))
    narrow = [kind for kind, scheme in candidate.calibrated.items() if scheme == "W4A16"]
    narrow += ["lm_head"] if candidate.head_bits == 4 else []
    if narrow:
        kind, cost = _find_costliest(variant, narrow, progress) if len(narrow) > 1 else (narrow[0], "")
        if kind == "lm_head":
            return replace(candidate, head_bits=16), f"{why}: the output head in 16 bits{cost}"
        wider: dict[str, Any] = {kind: "W8A16"}
        return replace(candidate, **wider), f"{why}: 8 bits for {kind}{cost}"
    if candidate.vocabulary < 1:
        return replace(candidate, vocabulary=1.0), f"{why}: the whole vocabulary"
    if candidate.embedding_bits < 16:
        return replace(candidate, embedding_bits=16), f"{why}: the embedding in 16 bits"
    return None


def _find_costliest(variant: Variant, kinds: Sequence[str], progress: Progress) -> tuple[str, str]:
    """Of these 4-bit kinds the one whose rounding alone changes the distributions most, and what it costs."""
    recipe = variant_recipe.read_recipe(variant)
    outcomes = variant_recipe.run_recipe(variant, progress=progress)
    number, step = next((at, each) for at, each in enumerate(recipe.steps) if each.stage.name == "calibrate")
    parameters = step.parameters
    assert isinstance(parameters, CalibrateParameters)
    base = variant_recipe.base_folder(recipe.base, variant.root)
    ids = _first_tokens(parameters, outcomes[number - 1].folder if number else base)
    form = PackedIntegers(4, parameters.group_size)
    costs = measure_kind_divergences(base, {kind: (kind, form) for kind in kinds}, ids)
    kind = max(costs, key=lambda each: costs[each])
    return kind, f", which costs most ({costs[kind]:.4f} nats a token)"


def _first_tokens(parameters: CalibrateParameters, source: Path) -> list[int]:
    text = "".join(calibration_documents(parameters.corpus, source)[:64])
    ids: list[int] = read_tokenizer(source / "tokenizer.json").encode(text, add_special_tokens=False).ids
    return ids[:_TEXT]
