"""Measurement of MTP drafts in vLLM: settings, prompts of each class, and counts of accepted draft tokens.

`slimqwen.evals.acceptance` turns the counts into estimates and a record.
"""

import dataclasses
import itertools
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, ClassVar, Self

from pydantic import Field, model_validator

from slimqwen import host
from slimqwen.checkpoint.weights import has_mtp_head
from slimqwen.evals import EvalError
from slimqwen.progress import Progress, silent
from slimqwen.records.settings import Settings
from slimqwen.records.split import Split
from slimqwen.serving import draft_counts, in_process
from slimqwen.serving.command import ServerCommand
from slimqwen.text import prompts
from slimqwen.text.corpus import resolve_text
from slimqwen.variant import Variant
from slimqwen.yaml_file import YamlPart

_UNSERVED_DEPTH = 4

Item = Mapping[str, Any]
"""Counters of one group: {"depth", "class", "temperature", "group", "drafts", "accepted_per_position",
"output_tokens", "seconds"}."""


class AcceptanceSettings(Settings):
    """Section acceptance of eval/gates/<name>.yaml.

    Attributes:
        documents: text from which prompts are cut: name of a text in eval/texts, or a path relative to the repository.
        seed: seed of the first document, and of sampled continuations.
        tokens: length of a continuation, tokens.
        groups: number of groups into which the prompts of a class are divided, the units of every interval.
        prompts: number of prompts of a class.
        proof_prompts: number on the proof's side of a split; None for as many as `prompts`.
        temperatures: sampling temperatures; 0 is greedy.
        classes: name of a class -> length of its prompts, tokens, cut where the served context is shorter.
        gpu: GPU whose data sheet `slimqwen fit` takes where speed cannot be measured.
        gate_depth: tokens drafted at a time (K) at which the gate compares; 0 for the variant's served K.
        least_share: smallest share of the baseline's acceptance length that passes.
    """

    folder: ClassVar[str] = "gates"
    section: ClassVar[str] = "acceptance"
    own_file: ClassVar[str] = "gate"

    documents: str
    seed: int
    tokens: int = Field(ge=1)
    groups: int = Field(ge=2)
    prompts: int = Field(ge=2)
    proof_prompts: int | None = Field(default=None, ge=2)
    temperatures: tuple[float, ...] = Field(min_length=1)
    classes: dict[str, int] = Field(min_length=1)
    gpu: str
    gate_depth: int = Field(ge=0)
    least_share: float = Field(gt=0, le=1)

    @model_validator(mode="after")
    def _groups_have_prompts(self) -> Self:
        for key, number in (("prompts", self.prompts), ("proof_prompts", self.proof_prompts)):
            if number is not None and number < self.groups:
                raise ValueError(
                    f"{number} prompts cannot be divided into {self.groups} groups; raise {key} or lower groups"
                )
        return self

    def inputs(self, root: Path) -> Sequence[Path | YamlPart]:
        """Files that the measurement reads: the YAML files of the settings, and the documents."""
        return [*super().inputs(root), resolve_text(self.documents, root)]

    def depth_of(self, variant: Variant) -> int:
        """The K at which the gate compares a variant with its baseline: `gate_depth`, else the served K, else 4."""
        if self.gate_depth:
            return self.gate_depth
        served = ServerCommand.resolve(variant).flags.get("speculative-config") or {}
        return int(served.get("num_speculative_tokens") or _UNSERVED_DEPTH)

    def at_depth_of(self, variant: Variant) -> Self:
        """A copy of the settings for one variant: `gate_depth` is the K at which the gate compares it."""
        return self.model_copy(update={"gate_depth": self.depth_of(variant)})

    def prompt_count(self, split: Split | None) -> int:
        """Number of prompts in each class: on the proof's side of a split `proof_prompts` if set, else `prompts`."""
        is_proof = split is not None and split.side == "proof"
        return self.proof_prompts if is_proof and self.proof_prompts else self.prompts


def require_mtp_head(variant: Variant) -> None:
    """Raise an EvalError if the checkpoint of a variant has no MTP head."""
    if not has_mtp_head(variant.weights):
        raise EvalError(
            f"{variant.name} has no MTP head, so nothing is drafted; use a checkpoint with mtp.* tensors"
        )


def cut_prompts(
    settings: AcceptanceSettings,
    variant: Variant,
    baseline: Variant,
    max_tokens: int,
    split: Split | None = None,
) -> dict[str, list[list[int]]]:
    """Cut prompts of each class from the documents.

    Variant and baseline get the same text: the baseline's tokenizer cuts it to length, also for a pruned variant.

    Args:
        settings: documents, and number and length of the prompts.
        variant: variant in whose token ids the prompts are returned.
        baseline: variant whose tokenizer cuts them.
        max_tokens: longest prompt, in tokens of the variant.
        split: side of the split whose documents are used; None for both sides.

    Returns:
        Name of the class -> prompts in token ids.

    Raises:
        CorpusError: the documents are missing, malformed or too few.
        EvalError: the context is too short for a prompt.
    """
    import transformers

    if max_tokens < 1:
        raise EvalError(
            f"the context of {variant.name} is too short for a prompt, {settings.tokens} output tokens and their "
            "drafts; raise VLLM_MAX_MODEL_LEN in its config.env"
        )
    variant_tokenizer, baseline_tokenizer = (
        transformers.AutoTokenizer.from_pretrained(side.weights, local_files_only=True)
        for side in (variant, baseline)
    )
    classes = cut_class_tokens(
        settings,
        lambda text: list(baseline_tokenizer(text, add_special_tokens=False)["input_ids"]),
        max_tokens,
        variant.root,
        split,
    )
    # A pruned tokenizer may need more tokens for the same text.
    return {
        name: [
            list(variant_tokenizer(baseline_tokenizer.decode(ids), add_special_tokens=False)["input_ids"])[
                -max_tokens:
            ]
            for ids in class_prompts
        ]
        for name, class_prompts in classes.items()
    }


def cut_class_tokens(
    settings: AcceptanceSettings,
    tokenize: Callable[[str], prompts.Tokens],
    max_tokens: int,
    root: Path,
    split: Split | None = None,
    *,
    skips_faults: bool = False,
) -> dict[str, list[prompts.Tokens]]:
    """Cut prompts of each class from the settings' documents, in token ids of the tokenizer that cuts.

    Args:
        settings: documents, and number and length of the prompts.
        tokenize: function from a text to token ids.
        max_tokens: longest prompt, tokens.
        root: folder that the documents' path is relative to.
        split: side of the split whose documents are used; None for both sides.
        skips_faults: whether to skip malformed documents instead of raising; only for checks of own files.

    Returns:
        Name of the class -> prompts in token ids.

    Raises:
        CorpusError: the documents are missing, malformed or too few; the message says how many tokens each class lacks.
    """
    documents = prompts.documents(settings.documents, settings.seed, root, skips_faults=skips_faults)
    cutter = prompts.PromptCutter(
        documents if split is None else filter(split.has, documents), tokenize, settings.documents
    )
    classes: dict[str, list[prompts.Tokens]] = {}
    lacking: dict[str, int] = {}
    for name, length in settings.classes.items():
        try:
            classes[name] = cutter.cut(settings.prompt_count(split), min(length, max_tokens))
        except prompts.UsedUpError as error:
            lacking |= {f"{wanted} ({name})": tokens for wanted, tokens in error.lacking.items()}
    if lacking:
        raise prompts.UsedUpError(settings.documents, lacking)
    return classes


def measure_drafts(
    weights: Path,
    classes: Mapping[str, Sequence[Sequence[int]]],
    settings: AcceptanceSettings,
    depth: int,
    temperatures: Sequence[float],
    flags: Mapping[str, Any],
    progress: Progress = silent,
) -> list[dict[str, Any]]:
    """Have a vLLM engine with MTP drafts continue the prompts of each class, group by group.

    Args:
        weights: folder of the checkpoint.
        classes: class name -> prompts in token ids.
        settings: groups, length of a continuation, and seed.
        depth: tokens drafted at a time (K); 0 for none.
        temperatures: sampling temperatures; 0 is greedy.
        flags: vLLM's flags, by name without dashes.
        progress: receives (activity, done, total) in groups.

    Returns:
        Items of an acceptance record (`Item`), one per class, temperature and group.

    Raises:
        EvalError: the engine drafts nothing.
    """
    items: list[dict[str, Any]] = []
    cells = list(itertools.product(classes, temperatures, range(settings.groups)))
    longest = max(len(ids) for class_prompts in classes.values() for ids in class_prompts) + settings.tokens
    with in_process.engine(
        weights,
        num_speculative_tokens=depth,
        max_model_len=draft_counts.needed_context(longest, depth),
        # On a GPU the measured times need CUDA graphs. On a CPU only the counts matter, and compiling costs minutes.
        enforce_eager=host.detect() == "cpu",
        **{name.replace("-", "_"): value for name, value in flags.items()},
    ) as llm:
        # The first requests run cold code; their time must not count for the first group.
        draft_counts.count_drafts(llm, [next(iter(classes.values()))[0]], tokens=8)
        for name, temperature, group in cells:
            progress(f"K = {depth}: {name}, temperature {temperature:g}", len(items), len(cells))
            counts = draft_counts.count_drafts(
                llm,
                classes[name][group :: settings.groups],
                tokens=settings.tokens,
                temperature=temperature,
                seed=settings.seed,
            )
            if depth and not counts.drafts:
                raise EvalError(
                    f"vLLM drafted nothing for the class {name}; raise `tokens` in section acceptance of eval/gates/"
                )
            labels = {"depth": depth, "class": name, "temperature": temperature, "group": group}
            items.append(labels | dataclasses.asdict(counts))
    progress(f"K = {depth}", len(cells), len(cells))
    return items


def acceptance_lengths(items: Sequence[Item]) -> tuple[list[float], list[int]]:
    """Acceptance length of each item, and the number of its drafts as its weight."""
    drafts = [item["drafts"] for item in items]
    return [1 + sum(item["accepted_per_position"]) / item["drafts"] for item in items], drafts
