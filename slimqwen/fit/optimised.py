"""A checkpoint after each optimisation that the project offers: names and shapes of its tensors, without content."""

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from slimqwen.checkpoint import draft_head, packing
from slimqwen.checkpoint.config import quantisation
from slimqwen.checkpoint.tensors import find_output_head
from slimqwen.checkpoint.weights import group_parts
from slimqwen.fit.architecture import shape_tensors
from slimqwen.fit.subject import Subject
from slimqwen.formats import find_format
from slimqwen.models.outline import Outline
from slimqwen.models.shape import Packing

_FOUR_BITS = Packing(bits=4, group_size=32)
_EIGHT_BITS = Packing(bits=8, group_size=32)
_PUBLISHED_FOUR_BITS = Packing(bits=4, group_size=128)
_VOCABULARY, _DRAFT_VOCABULARY = 65_536, 32_768
"""Rows of embedding and output head, and of the draft head, that the recipe of qwen3.5-4b-best keeps."""


PUBLISHED_EXPERTS = "published 4-bit experts"
"""The optimisation of a mixture whose experts no stage packs: others have published such checkpoints."""

_QWENS_OWN = "-GPTQ-Int4"
_PACKED_BY_QWEN = (
    *("Qwen/Qwen3.5-35B-A3B", "Qwen/Qwen3.5-122B-A10B", "Qwen/Qwen3.5-397B-A17B"),
    *("Qwen/Qwen3-30B-A3B", "Qwen/Qwen3-235B-A22B"),
)
"""Mixtures that Qwen publishes with 4-bit experts too, under the name with `_QWENS_OWN` at its end."""


@dataclass(frozen=True)
class Optimised:
    """A checkpoint after one or more optimisations, of which only the shapes of the tensors are known.

    Attributes:
        optimisation: name of the latest optimisation, such as "4-bit MLPs"; "as stored" before any.
        outline: config.json, and names, dtypes and shapes of the tensors.
    """

    optimisation: str
    outline: Outline


def list_optimised(subject: Subject) -> list[Optimised]:
    """List a checkpoint as stored, then after each optimisation of this project, which keeps those before it.

    An optimisation that changes nothing, because the checkpoint has it already, is left out. A format to which no
    linears can be added gets no 4-bit steps. The stage `calibrate` takes no mixture of experts, so 4-bit experts stand
    for a checkpoint that others published.
    """
    stored = Outline(subject.name, Path(), subject.config, shape_tensors(subject.tensors))
    steps = [Optimised("as stored", stored)]

    def add(optimisation: str, change: Callable[[Outline], Outline]) -> None:
        outline = change(steps[-1].outline)
        if outline.tensors != steps[-1].outline.tensors:
            steps.append(Optimised(optimisation, outline))

    if find_format(quantisation(subject.config)).takes_more:
        if subject.family.is_calibrated:
            add("4-bit MLPs", _packed("mlp"))
            add("4-bit attention", _packed("attention", "linear_attention"))
        else:
            add(PUBLISHED_EXPERTS, _packed("experts", form=_PUBLISHED_FOUR_BITS))
        add("4-bit head", _packed("lm_head"))
        if subject.family.is_calibrated:
            add("4-bit MTP", _packed("mtp"))
        add("8-bit embedding", _packed("embed_tokens", form=_EIGHT_BITS))
    rows = int(subject.text["vocab_size"])
    # vLLM builds the MTP head of a mixture of experts by a class of its own, which has no draft vocabulary.
    if subject.has_mtp and not subject.family.has_experts:
        if rows > 2 * _DRAFT_VOCABULARY and draft_head.SIZE_KEY not in subject.text:
            add("32k drafted", lambda outline: outline.with_draft_vocabulary(_DRAFT_VOCABULARY))
        add("4-bit draft head", _with_packed_draft_head)
    if rows > 2 * _VOCABULARY:
        add("64k tokens", lambda outline: outline.with_vocabulary(_VOCABULARY))
    return steps


def _packed(*kinds: str, form: Packing = _FOUR_BITS) -> Callable[[Outline], Outline]:
    """A change of an outline that packs its 16-bit linears of these kinds to 4 bits."""

    def pack(outline: Outline) -> Outline:
        found = [kind for kind in kinds if packing.linears(outline.tensors, kind)]
        if "lm_head" in kinds and not any(name.startswith("lm_head.") for name in outline.tensors):
            found = ["lm_head"]  # a tied head gets tensors of its own
        return outline.with_packing(dict.fromkeys(found, form)) if found else outline

    return pack


def _with_packed_draft_head(outline: Outline) -> Outline:
    """The outline with the draft head packed, if `trim_draft_vocab` can pack it so from the output head."""
    form = find_format(quantisation(outline.config))
    weights = group_parts(outline.tensors, form.settings)
    head = weights[find_output_head(weights)[0]]
    can_be = head.layout == _FOUR_BITS.layout if head.is_quantised else form.takes_more
    return _packed("draft_head")(outline) if can_be else outline


def name_published(repository: str) -> str:
    """Say where a mixture of experts is published with 4-bit experts.

    Args:
        repository: owner/name of the checkpoint in 16 bits, or another name of it.
    """
    if repository in _PACKED_BY_QWEN:
        return f"{repository}{_QWENS_OWN}"
    name = repository.rpartition("/")[2]
    return f"what the hub finds for {name}-AWQ-4bit or {name}{_QWENS_OWN}"
