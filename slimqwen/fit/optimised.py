"""A checkpoint after each optimisation that the project offers, as tensors without content."""

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from slimqwen.checkpoint import draft_head, packing
from slimqwen.checkpoint.config import quantisation, quantised, text_config, untied
from slimqwen.fit.subject import Subject
from slimqwen.models.shape import Packing, Tensors, packed_linear, with_first_experts

_FOUR_BITS = Packing(bits=4, group_size=32)
_SIXTEEN_BITS = ("BF16", "F16", "F32")
_VOCABULARY, _DRAFT_VOCABULARY = 65_536, 32_768
"""Rows that the recipe of qwen3.5-4b-best keeps."""


@dataclass(frozen=True)
class Optimised:
    """A checkpoint with one more optimisation than the one before.

    Attributes:
        optimisation: the one that was added.
        config: config.json.
    """

    optimisation: str
    tensors: Tensors
    config: Mapping[str, Any]


def list_optimised(subject: Subject) -> list[Optimised]:
    """The checkpoint as stored, then with one optimisation after the other; those that it has already are left out.

    In a format other than compressed-tensors no further linears can be packed.
    """
    steps = [Optimised("as stored", subject.tensors, subject.config)]
    form = quantisation(subject.config)

    def add(optimisation: str, tensors: Tensors, config: Mapping[str, Any]) -> None:
        if tensors != steps[-1].tensors:
            steps.append(Optimised(optimisation, tensors, config))

    if not form or form.get("quant_method") == "compressed-tensors":
        kinds = {
            "4-bit experts" if subject.family.has_experts else "4-bit MLPs": ("mlp", "experts"),
            "4-bit attention": ("attention", "linear_attention"),
            "4-bit head": ("lm_head",),
            "4-bit MTP": ("mtp",),
        }
        for optimisation, packed_kinds in kinds.items():
            add(optimisation, *_pack(steps[-1], packed_kinds))
    rows = int(subject.text["vocab_size"])
    # vLLM builds the MTP head of a mixture by a class of its own, which has no draft vocabulary.
    if subject.has_mtp and not subject.family.has_experts and rows > 2 * _DRAFT_VOCABULARY:
        add("32k drafted", *_with_draft_vocabulary(steps[-1], _DRAFT_VOCABULARY))
    if rows > 2 * _VOCABULARY:
        add("64k tokens", *_with_vocabulary(steps[-1], rows, _VOCABULARY))
    return steps


def _pack(step: Optimised, kinds: tuple[str, ...]) -> tuple[Tensors, Mapping[str, Any]]:
    """Linears of these kinds packed where they are in 16 bits; a tied output head gets tensors of its own."""
    tensors, config = step.tensors, step.config
    if "experts" in kinds:
        tensors = with_first_experts(tensors)
    if "lm_head" in kinds and not any(name.startswith("lm_head.") for name in tensors):
        embedding = next(name for name in tensors if name.endswith("embed_tokens.weight"))
        tensors, config = {**tensors, "lm_head.weight": tensors[embedding]}, untied(config)
    for kind in kinds:
        linears = [
            name for name in tensors if packing.is_linear(name, kind) and tensors[name][0] in _SIXTEEN_BITS
        ]
        if not linears:
            continue
        group = packing.config_group(kind, _FOUR_BITS.bits, _FOUR_BITS.group_size)
        modules = [name.removesuffix(".weight") for name in linears]
        config = quantised(config, packing.with_group(config, kind, group, modules))
        tensors = {
            part: each
            for name, stored in tensors.items()
            for part, each in (
                packed_linear(name, stored[1], _FOUR_BITS) if name in linears else {name: stored}
            ).items()
        }
    return tensors, config


def _with_vocabulary(step: Optimised, rows: int, kept: int) -> tuple[Tensors, Mapping[str, Any]]:
    resized = {
        name: (dtype, (kept, *shape[1:]))
        if shape[0] == rows and re.search(r"embed_tokens\.weight$|^lm_head\.", name)
        else (dtype, shape)
        for name, (dtype, shape) in step.tensors.items()
    }
    return resized, _with_text(step.config, vocab_size=kept)


def _with_draft_vocabulary(step: Optimised, kept: int) -> tuple[Tensors, Mapping[str, Any]]:
    hidden = int(text_config(step.config)["hidden_size"])
    head: Tensors = {draft_head.WEIGHT: ("BF16", (kept, hidden)), draft_head.TOKEN_IDS: ("I64", (kept,))}
    return {**step.tensors, **head}, draft_head.announced(step.config, kept)


def _with_text(config: Mapping[str, Any], **changes: Any) -> Mapping[str, Any]:
    """A config with fields of its language model changed."""
    if "text_config" in config:
        return {**config, "text_config": {**config["text_config"], **changes}}
    return {**config, **changes}
