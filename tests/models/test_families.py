"""Families: found by the class in config.json, and what their layers are made of."""

from itertools import pairwise

import pytest

from slimqwen.models.families import FAMILIES, FamilyError, find_family, find_kind, unshared_heads


@pytest.mark.parametrize("family", FAMILIES, ids=lambda family: family.name)
def test_every_class_of_a_family_finds_it(family):
    for architecture in family.architectures:
        assert find_family({"architectures": [architecture]}) is family


def test_another_family_is_one_line_with_those_that_are_known():
    with pytest.raises(
        FamilyError, match=r"the architecture GemmaForCausalLM, .*LlamaForCausalLM, Qwen2ForCausalLM"
    ):
        find_family({"architectures": ["GemmaForCausalLM"]})
    with pytest.raises(FamilyError, match="the architecture gpt2"):
        find_family({"model_type": "gpt2"})


@pytest.mark.parametrize(
    ("architecture", "text", "full"),
    [
        ("LlamaForCausalLM", {}, [0, 1, 2, 3, 4, 5, 6, 7]),
        ("Qwen3_5ForCausalLM", {}, [3, 7]),
        ("Qwen3_5ForCausalLM", {"full_attention_interval": 2}, [1, 3, 5, 7]),
        ("Qwen3_5MoeForCausalLM", {"layer_types": ["full_attention"] + ["linear_attention"] * 7}, [0]),
    ],
)
def test_the_attention_of_each_layer_is_listed_or_follows_from_the_interval(architecture, text, full):
    types = find_family({"architectures": [architecture]}).layer_types({"num_hidden_layers": 8, **text})
    assert [number for number, kind in enumerate(types) if kind == "full_attention"] == full
    assert len(types) == 8


def test_sliding_attention_is_one_line() -> None:
    [qwen2] = [family for family in FAMILIES if family.name == "qwen2"]
    with pytest.raises(
        FamilyError, match="layers of the kind sliding_attention, which is not supported; choose"
    ):
        qwen2.layer_types({"layer_types": ["full_attention", "sliding_attention"]})


def test_families_differ_in_gate_experts_and_drafts():
    facts = {
        family.name: (
            family.has_query_gate, family.has_experts, family.is_calibrated, bool(family.acceptance_lengths)
        )
        for family in FAMILIES
    }  # fmt: skip
    assert facts == {
        **dict.fromkeys(("llama", "qwen2", "qwen3"), (False, False, True, False)),
        "qwen3_5": (True, False, True, True),
        "qwen3_5_moe": (True, True, False, True),
    }


@pytest.mark.parametrize("family", FAMILIES, ids=lambda family: family.name)
def test_each_further_draft_is_accepted_less_often(family):
    lengths = [1.0, *(family.acceptance_lengths or {}).values()]
    gains = [1.0, *(after - before for before, after in pairwise(lengths))]
    assert all(0.4 < later < earlier for earlier, later in pairwise(gains))


@pytest.mark.parametrize(
    ("tensor", "kind"),
    [
        ("model.embed_tokens.weight", "embedding"),
        ("lm_head.weight_packed", "output head"),
        ("model.layers.0.mlp.experts.3.up_proj.weight", "experts"),
        ("model.layers.0.mlp.shared_expert.up_proj.weight", "MLP"),
        ("model.language_model.layers.0.mlp.gate_proj.weight", "MLP"),
        ("model.layers.0.self_attn.q_norm.weight", "attention"),
        ("model.layers.0.linear_attn.A_log", "attention"),
        ("model.layers.0.input_layernorm.weight", "norms"),
        ("mtp.layers.0.mlp.up_proj.weight", "MTP head"),
        ("model.visual.blocks.0.mlp.up_proj.weight", "vision tower"),
    ],
)
def test_a_tensor_is_of_the_kind_that_its_name_says(tensor: str, kind: str):
    assert find_kind(tensor) == kind


@pytest.mark.parametrize(
    ("gpus", "unshared"),
    [
        (1, None),
        (2, None),
        (4, None),  # each KV head on two GPUs
        (3, "16 heads (num_attention_heads)"),
        (8, "4 heads (linear_num_key_heads)"),
    ],
)
def test_fewer_kv_heads_than_gpus_are_copied_and_other_heads_are_shared_evenly(
    gpus: int, unshared: str | None
) -> None:
    heads = {
        "num_attention_heads": 16,
        "num_key_value_heads": 2,
        "linear_num_key_heads": 4,
        "linear_num_value_heads": 8,
    }
    assert unshared_heads(heads, gpus) == unshared


def test_kv_heads_that_are_no_divisor_of_the_gpus_cannot_be_copied_evenly() -> None:
    assert (
        unshared_heads({"num_attention_heads": 8, "num_key_value_heads": 3}, 4)
        == "3 heads (num_key_value_heads)"
    )
