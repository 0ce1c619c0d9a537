"""A checkpoint after each optimisation: what it packs, and what is left out."""

import math
from pathlib import Path

import pytest

from slimqwen import variant
from slimqwen.checkpoint.tensors import tensor_bytes
from slimqwen.fit.optimised import list_optimised
from slimqwen.fit.subject import find_subject
from slimqwen.plan import shapes
from tests.zoo.animals import ANIMALS

ROOT = variant.repository_root()
ALL = ["as stored", "4-bit MLPs", "4-bit attention", "4-bit head", "4-bit MTP", "32k drafted", "64k tokens"]


@pytest.mark.parametrize(
    ("model", "steps"),
    [
        ("qwen3.5-4b", ALL),
        ("qwen3-8b", [*ALL[:4], "64k tokens"]),
        ("qwen3.5-35b-a3b", ["as stored", "4-bit experts", *ALL[2:5], "64k tokens"]),
        ("cyankiwi", ["as stored", *ALL[2:]]),
        ("tiny", ALL[:5]),
        ("qwen3.5-4b-best", ["as stored", "4-bit head"]),
    ],
)
def test_each_step_is_one_that_the_checkpoint_lacks(model: str, steps: list[str]):
    assert [step.optimisation for step in list_optimised(find_subject(model, ROOT))] == steps


def test_the_recipe_of_the_4b_ends_with_the_tensors_of_its_steps():
    """In another order and with all rows of the output head in 16 bits, as that recipe has no packed head."""
    by_name = {step.optimisation: step for step in list_optimised(find_subject("qwen3.5-4b", ROOT))}
    made = shapes.variant_shape(variant.load("qwen3.5-4b-best", ROOT)).tensors
    last = by_name["64k tokens"].tensors
    assert {name: each for name, each in last.items() if not name.startswith("lm_head.")} == made
    assert last["lm_head.weight_packed"] == ("I32", (65536, 2560 // 8))


def test_a_tied_head_is_packed_beside_its_embedding_and_unties_it():
    before, after = (
        step
        for step in list_optimised(find_subject("qwen3-4b", ROOT))
        if step.optimisation in ("4-bit attention", "4-bit head")
    )
    added = after.tensors.keys() - before.tensors.keys()
    assert added == {"lm_head.weight_packed", "lm_head.weight_scale", "lm_head.weight_shape"}
    assert (before.config["tie_word_embeddings"], after.config["tie_word_embeddings"]) == (True, False)


def test_experts_are_packed_and_router_and_shared_expert_are_not():
    step = list_optimised(find_subject("qwen3.5-35b-a3b", ROOT))[1]
    name = "model.language_model.layers.0.mlp"
    assert step.tensors[f"{name}.experts.0.gate_proj.weight_packed"] == ("I32", (256, 512, 256))
    assert step.tensors[f"{name}.gate.weight"] == ("BF16", (256, 2048))
    assert step.tensors[f"{name}.shared_expert.up_proj.weight"] == ("BF16", (512, 2048))
    numbers = 40 * 256 * 3 * 512 * 2048
    size = sum(
        tensor_bytes(*each) for tensor, each in step.tensors.items() if tensor.startswith(f"{name}.experts.")
    )
    assert 40 * size == pytest.approx(numbers * (1 / 2 + 1 / 16), rel=1e-3)


@pytest.mark.parametrize("animal", ["gptq", "fp8-blocks", "awq"])
def test_nothing_more_is_packed_beside_a_foreign_format(animal: str, tmp_path: Path):
    subject = find_subject(str(ANIMALS[animal].build(tmp_path / "x")), ROOT)
    assert [step.optimisation for step in list_optimised(subject)] == ["as stored"]


def test_a_pruned_vocabulary_keeps_its_rows_everywhere():
    last = list_optimised(find_subject("qwen3.5-9b", ROOT))[-1]
    assert last.config["text_config"]["vocab_size"] == 65536
    assert last.tensors["model.language_model.embed_tokens.weight"] == ("BF16", (65536, 4096))
    assert last.tensors["lm_head.weight_scale"] == ("BF16", (65536, 128))
    assert last.tensors["mtp.draft_head.token_ids"] == ("I64", (32768,))
    assert math.prod(last.tensors["lm_head.weight_shape"][1]) == 2
