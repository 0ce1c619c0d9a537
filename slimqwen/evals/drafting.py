"""Drafts of vLLM's MTP head, measured: settings, prompts of each class, and counts of accepted drafts.

`slimqwen.evals.acceptance` makes estimates and a record of the counts.
"""

import dataclasses
import itertools
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, ClassVar, Self

from pydantic import Field, model_validator

from slimqwen.checkpoint.weights import has_mtp_head
from slimqwen.evals import EvalError
from slimqwen.progress import Progress, silent
from slimqwen.records.settings import Settings
from slimqwen.records.split import Split
from slimqwen.serving import draft_counts, in_process
from slimqwen.serving import platform as platforms
from slimqwen.serving.command import ServerCommand
from slimqwen.text import prompts
from slimqwen.variant import Variant

_UNSERVED_DEPTH = 4

Item = Mapping[str, Any]
"""Counters of one group: {"depth", "class", "temperature", "group", "drafts", "accepted_per_position",
"output_tokens", "seconds"}."""


class AcceptanceSettings(Settings):
    """Section acceptance of eval/gates/<name>.yaml; tinyworld.yaml explains each field.

    Attributes:
        gate_depth: tokens drafted at a time (K) at which the gate compares; 0: those that are served.
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
        fewest = min(self.prompts, self.proof_prompts or self.prompts)
        if fewest < self.groups:
            raise ValueError(f"{fewest} prompts do not make {self.groups} groups")
        return self

    def depth_of(self, variant: Variant) -> int:
        """The K at which the gate compares a variant with its baseline; 4 for one that is served without drafts."""
        if self.gate_depth:
            return self.gate_depth
        served = ServerCommand.resolve(variant).flags.get("speculative-config") or {}
        return int(served.get("num_speculative_tokens") or _UNSERVED_DEPTH)

    def at_depth_of(self, variant: Variant) -> Self:
        """The settings with `depth_of` a variant as their depth."""
        return self.model_copy(update={"gate_depth": self.depth_of(variant)})

    def prompt_count(self, split: Split | None) -> int:
        """Prompts of each class; `proof_prompts` gives their number on the proof's side of a split."""
        is_proof = split is not None and split.side == "proof"
        return self.proof_prompts if is_proof and self.proof_prompts else self.prompts


def require_mtp_head(variant: Variant) -> None:
    """Raise an EvalError if the checkpoint of a variant has nothing that drafts."""
    if not has_mtp_head(variant.weights):
        raise EvalError(f"{variant.name} has no MTP head, so nothing is drafted; take a checkpoint with one")


def cut_prompts(
    settings: AcceptanceSettings,
    variant: Variant,
    baseline: Variant,
    max_tokens: int,
    split: Split | None = None,
) -> dict[str, list[list[int]]]:
    """Prompts of each class in the variant's token ids.

    Both sides get the same text: the baseline's tokenizer cuts it to length, also for a pruned variant.

    Args:
        max_tokens: longest prompt, in tokens of the variant.
        split: side of the split that the documents are on; None for both.

    Raises:
        CorpusError: the documents are missing, malformed or used up.
        EvalError: the context holds no prompt.
    """
    import transformers

    if max_tokens < 1:
        raise EvalError(
            f"the context of {variant.name} holds no prompt beside {settings.tokens} tokens and their drafts; raise "
            "VLLM_MAX_MODEL_LEN in its config.env"
        )
    variant_tokenizer, baseline_tokenizer = (
        transformers.AutoTokenizer.from_pretrained(side.weights, local_files_only=True)
        for side in (variant, baseline)
    )
    documents = prompts.documents(settings.documents, settings.seed, variant.root)
    cutter = prompts.PromptCutter(
        documents if split is None else filter(split.has, documents),
        lambda text: list(baseline_tokenizer(text, add_special_tokens=False)["input_ids"]),
        settings.documents,
    )
    classes = {}
    for name, length in settings.classes.items():
        texts = [
            baseline_tokenizer.decode(ids)
            for ids in cutter.cut(settings.prompt_count(split), min(length, max_tokens))
        ]
        # A pruned tokenizer may need more tokens for the same text.
        classes[name] = [
            list(variant_tokenizer(text, add_special_tokens=False)["input_ids"])[-max_tokens:]
            for text in texts
        ]
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
    """Have vLLM continue the prompts of each class, group by group, in an engine that drafts.

    Args:
        classes: class name -> prompts in token ids.
        depth: tokens drafted at a time (K).
        flags: vLLM's flags, by name without dashes.

    Returns:
        Items of a record.

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
        # CUDA graphs decide a GPU's speed. On a CPU only counts matter, and compiling costs minutes.
        enforce_eager=platforms.detect() == "cpu",
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
    """The acceptance length of each group, and its weight: the number of drafts."""
    drafts = [item["drafts"] for item in items]
    return [1 + sum(item["accepted_per_position"]) / item["drafts"] for item in items], drafts
