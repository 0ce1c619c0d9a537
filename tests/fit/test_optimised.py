"""A checkpoint after each optimisation: what it packs, and what is left out."""

import math
import re
from pathlib import Path

import pytest

from slimqwen import variant
from slimqwen.checkpoint.tensors import tensor_bytes
from slimqwen.fit.optimised import Optimised, list_optimised
from slimqwen.fit.subject import find_subject
from slimqwen.models.shape import Tensors
from slimqwen.plan import shapes
from tests.zoo.published_forms import PUBLISHED_FORMS

ROOT = variant.repository_root()
ALL = [
    *("as stored", "4-bit MLPs", "4-bit attention", "4-bit head", "4-bit MTP", "8-bit embedding"),
    *("32k drafted", "4-bit draft head", "64k tokens"),
]


def sizes(step: Optimised) -> Tensors:
    return {name: (info.dtype, info.shape) for name, info in step.outline.tensors.items()}


@pytest.mark.parametrize(
    ("model", "steps"),
    [
        ("qwen3.5-4b", ALL),
        ("qwen3-8b", [*ALL[:4], "8-bit embedding", "64k tokens"]),
        (
            "qwen3.5-35b-a3b",
            ["as stored", "published 4-bit experts", "4-bit head", "8-bit embedding", "64k tokens"],
        ),
        ("cyankiwi", ["as stored", *ALL[2:]]),
        ("tiny", ALL[:6]),
        ("qwen3.5-4b-best", ["as stored", "4-bit head", "8-bit embedding"]),
        ("qwen3.8-27b-best", ["as stored", "64k tokens"]),
    ],
)
def test_each_step_is_one_that_the_checkpoint_lacks(model: str, steps: list[str]):
    assert [step.optimisation for step in list_optimised(find_subject(model, ROOT))] == steps


def test_the_recipe_of_the_4b_ends_with_the_tensors_of_its_steps():
    """In another order and with embedding and output head in 16 bits, as that recipe keeps them tied."""
    by_name = {step.optimisation: step for step in list_optimised(find_subject("qwen3.5-4b", ROOT))}
    made = shapes.variant_shape(variant.load("qwen3.5-4b-best", ROOT)).tensors
    last = sizes(by_name["64k tokens"])
    tables = re.compile(r"lm_head|embed_tokens")
    layers = {name: each for name, each in last.items() if not tables.search(name)}
    assert layers == {name: each for name, each in made.items() if not tables.search(name)}
    assert last["model.language_model.embed_tokens.weight_packed"] == ("I32", (65536, 2560 // 4))
    assert last["lm_head.weight_packed"] == ("I32", (65536, 2560 // 8))


def test_a_tied_head_is_packed_beside_its_embedding_and_unties_it():
    before, after = (
        step
        for step in list_optimised(find_subject("qwen3-4b", ROOT))
        if step.optimisation in ("4-bit attention", "4-bit head")
    )
    added = after.outline.tensors.keys() - before.outline.tensors.keys()
    assert added == {"lm_head.weight_packed", "lm_head.weight_scale", "lm_head.weight_shape"}
    assert [each.outline.config["tie_word_embeddings"] for each in (before, after)] == [True, False]


def test_experts_are_packed_and_router_and_shared_expert_are_not():
    stored = sizes(list_optimised(find_subject("qwen3.5-35b-a3b", ROOT))[1])
    name = "model.language_model.layers.0.mlp"
    assert stored[f"{name}.experts.0.gate_proj.weight_packed"] == ("I32", (256, 512, 256))
    assert stored[f"{name}.gate.weight"] == ("BF16", (256, 2048))
    assert stored[f"{name}.shared_expert.up_proj.weight"] == ("BF16", (512, 2048))
    numbers = 40 * 256 * 3 * 512 * 2048
    size = sum(
        tensor_bytes(*each) for tensor, each in stored.items() if tensor.startswith(f"{name}.experts.")
    )
    # A scale of 16 bits for 128 weights.
    assert 40 * size == pytest.approx(numbers * (1 / 2 + 1 / 64), rel=1e-3)


@pytest.mark.parametrize("published", ["gptq", "fp8-blocks", "awq"])
def test_nothing_more_is_packed_beside_a_foreign_format(published: str, tmp_path: Path):
    subject = find_subject(str(PUBLISHED_FORMS[published].build(tmp_path / "x")), ROOT)
    assert [step.optimisation for step in list_optimised(subject)] == ["as stored"]


def test_a_pruned_vocabulary_keeps_its_rows_everywhere():
    last = list_optimised(find_subject("qwen3.5-9b", ROOT))[-1]
    assert last.outline.config["text_config"]["vocab_size"] == 65536
    assert sizes(last)["model.language_model.embed_tokens.weight_scale"] == ("BF16", (65536, 128))
    assert sizes(last)["lm_head.weight_scale"] == ("BF16", (65536, 128))
    assert sizes(last)["mtp.draft_head.token_ids"] == ("I64", (32768,))
    assert math.prod(sizes(last)["lm_head.weight_shape"][1]) == 2
