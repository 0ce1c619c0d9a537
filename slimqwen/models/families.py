"""Model families as data: the linears of their layers, the modules that AWQ scales with these, acceptance lengths.

A new family needs an entry of `FAMILIES` here, entries of `packing.LINEARS` for linears with other names, and a row of
tests/zoo/published_forms.py.
"""

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from slimqwen.checkpoint.config import text_config
from slimqwen.errors import SlimqwenError

FULL_ATTENTION, LINEAR_ATTENTION = "full_attention", "linear_attention"

SCALED_WITH: Mapping[str, tuple[str, ...]] = {
    "mlp": ("post_attention_layernorm",),
    "attention": ("input_layernorm",),
    "linear_attention": ("input_layernorm", "linear_attn.in_proj_a", "linear_attn.in_proj_b"),
}
"""Kind of linears -> unquantised modules that AWQ scales together with the inputs of these linears."""

NORMS = r"(?<!mtp\.)layers\.\d+\.(\w+\.)?\w*norm\.weight$"
"""Norms of the layers, those of heads and of Gated DeltaNet included."""

_KINDS = {
    r"^mtp\.": "MTP head",
    r"(^|\.)visual\.": "vision tower",
    r"embed_tokens\.": "embedding",
    r"^lm_head\.": "output head",
    r"\.mlp\.experts\.": "experts",
    r"\.mlp\.": "MLP",
    r"\.(self_attn|linear_attn)\.": "attention",
}


class FamilyError(SlimqwenError):
    """The family or the dimensions of a checkpoint are not known."""


@dataclass(frozen=True)
class Family:
    """A model family: models that differ only in dimensions.

    Attributes:
        name: model_type of the language models, without `_text`.
        architectures: classes that config.json names in text-only and in multimodal checkpoints.
        linears: kinds of linears (`packing.LINEARS`) that the layers have.
        is_calibrated: whether `calibrate` supports it: llmcompressor finds the linears and knows AWQ mappings for them.
        has_query_gate: whether q_proj has a second half, the output gate of full attention.
        has_head_norms: whether queries and keys are normalised in each head.
        biased: linears of attention that have a bias; a config.json with attention_bias adds one to all of them.
        acceptance_lengths: K -> published acceptance length of the MTP head; empty for models without MTP head.
    """

    name: str
    architectures: tuple[str, ...]
    linears: tuple[str, ...]
    is_calibrated: bool
    has_query_gate: bool = False
    has_head_norms: bool = False
    biased: tuple[str, ...] = ()
    acceptance_lengths: Mapping[int, float] = field(default_factory=dict)

    @property
    def has_experts(self) -> bool:
        """Whether the MLPs are mixtures of experts with a shared expert."""
        return "experts" in self.linears

    def layer_types(self, text: Mapping[str, Any]) -> tuple[str, ...]:
        """The type of attention of each layer, as config.json lists it, or else from its interval of full attention.

        Args:
            text: the language model's part of config.json.

        Raises:
            FamilyError: a layer has an unknown type.
        """
        if listed := text.get("layer_types"):
            if others := set(listed) - {FULL_ATTENTION, LINEAR_ATTENTION}:
                raise FamilyError(
                    f"config.json has layers of the kind {min(others)}, which is not supported; choose a model "
                    "without them"
                )
            return tuple(listed)
        interval = text.get("full_attention_interval", 4) if LINEAR_ATTENTION in self.linears else 1
        return tuple(
            FULL_ATTENTION if number % interval == 0 else LINEAR_ATTENTION
            for number in range(1, text["num_hidden_layers"] + 1)
        )


# Reported for the Qwen3.5 family on prompts of several domains.
_ACCEPTANCE_LENGTHS = {1: 1.93, 2: 2.73, 3: 3.39, 4: 3.97, 5: 4.41}

FAMILIES = (
    Family(
        name="llama",
        architectures=("LlamaForCausalLM",),
        linears=("mlp", "attention"),
        is_calibrated=True,
    ),
    Family(
        name="qwen2",
        architectures=("Qwen2ForCausalLM",),
        linears=("mlp", "attention"),
        is_calibrated=True,
        biased=("q_proj", "k_proj", "v_proj"),
    ),
    Family(
        name="qwen3",
        architectures=("Qwen3ForCausalLM",),
        linears=("mlp", "attention"),
        is_calibrated=True,
        has_head_norms=True,
    ),
    Family(
        name="qwen3_5",
        architectures=("Qwen3_5ForCausalLM", "Qwen3_5ForConditionalGeneration"),
        linears=("mlp", "attention", "linear_attention"),
        is_calibrated=True,
        has_query_gate=True,
        has_head_norms=True,
        acceptance_lengths=_ACCEPTANCE_LENGTHS,
    ),
    Family(
        name="qwen3_5_moe",
        architectures=("Qwen3_5MoeForCausalLM", "Qwen3_5MoeForConditionalGeneration"),
        linears=("experts", "attention", "linear_attention"),
        # transformers has all experts of a layer in one parameter, which llmcompressor's modifiers do not find.
        is_calibrated=False,
        has_query_gate=True,
        has_head_norms=True,
        acceptance_lengths=_ACCEPTANCE_LENGTHS,
    ),
)


def find_family(config: Mapping[str, Any]) -> Family:
    """The family of a config.json; raises a FamilyError with the known architectures if there is none."""
    architectures = config.get("architectures") or [str(text_config(config).get("model_type"))]
    for family in FAMILIES:
        if architectures[0] in family.architectures:
            return family
    known = ", ".join(name for family in FAMILIES for name in family.architectures)
    raise FamilyError(
        f"config.json names the architecture {architectures[0]}, which is not supported; take one of {known}"
    )


def unshared_heads(text: Mapping[str, Any], gpus: int) -> str | None:
    """The number of heads that `gpus` GPUs cannot divide, in words with its key in the config; None if they can."""
    for key in (
        "num_attention_heads",
        "num_key_value_heads",
        "linear_num_key_heads",
        "linear_num_value_heads",
    ):
        heads = int(text.get(key, 0))
        # If there are fewer KV heads than GPUs, each is copied to the same number of GPUs.
        if heads % gpus and not (key == "num_key_value_heads" and gpus % heads == 0):
            return f"{heads} heads ({key})"
    return None


def find_kind(tensor: str) -> str:
    """The kind of a tensor by its name, for tables of weights: MLP, attention, …; norms if no other fits."""
    return next((kind for pattern, kind in _KINDS.items() if re.search(pattern, tensor)), "norms")
