"""The estimated cost of rounding a unit alone, against the divergence of the model with it rounded."""

import json
import math

import pytest
import torch
import transformers

from slimqwen import variant
from slimqwen.checkpoint.rtn import round_to_nearest
from slimqwen.formats.compressed_tensors import PackedIntegers
from slimqwen.models.language_model import load_language_model
from slimqwen.models.sensitivity import measure_costs

ROOT = variant.repository_root()
TINY = ROOT / "weights" / "tiny"
FORMS = [PackedIntegers(bits, 32) for bits in (2, 3, 4, 6)]
UNITS = {
    "first": ["model.layers.0.mlp.gate_proj", "model.layers.0.mlp.up_proj"],
    "down": ["model.layers.1.mlp.down_proj"],
    "delta net": ["model.layers.2.linear_attn.in_proj_qkv", "model.layers.2.linear_attn.in_proj_z"],
    "attention": [f"model.layers.3.self_attn.{name}_proj" for name in "qkv"],
    "last": ["model.layers.3.mlp.down_proj"],
}


@pytest.fixture(scope="module")
def texts() -> list[list[int]]:
    tokenizer = transformers.AutoTokenizer.from_pretrained(TINY)
    lines = (ROOT / "eval/tasks/tinyworld/prose.jsonl").read_text().splitlines()
    ids = [token for line in lines for token in tokenizer(json.loads(line)["text"])["input_ids"]]
    return [ids[start : start + 64] for start in range(0, 24 * 64, 64)]


def test_costs_are_those_of_units_rounded_alone(texts: list[list[int]]) -> None:
    costs = measure_costs(TINY, UNITS, dict.fromkeys(UNITS, FORMS), texts, draws=8)
    model = load_language_model(TINY)
    modules = dict(model.named_modules())
    ratios = {}
    with torch.no_grad():
        exact = model(torch.tensor(texts)).logits.log_softmax(-1)
        for unit, linears in UNITS.items():
            for form, cost in zip(FORMS, costs[unit], strict=True):
                kept = {name: modules[name].weight.clone() for name in linears}
                for name, weight in kept.items():
                    modules[name].weight.copy_(round_to_nearest(weight, form))
                found = model(torch.tensor(texts)).logits.log_softmax(-1)
                for name, weight in kept.items():
                    modules[name].weight.copy_(weight)
                ratios[unit, form.bits] = cost / float(
                    (exact.exp() * (exact - found)).sum(-1).double().mean()
                )
    assert all(0.5 < ratio < 2 for (_, bits), ratio in ratios.items() if bits > 2), ratios
    mean = sum(map(math.log, ratios.values())) / len(ratios)
    assert math.exp(mean) == pytest.approx(1, abs=0.3)


def test_the_same_draws_give_the_same_costs(texts: list[list[int]]) -> None:
    unit = {"last": UNITS["last"]}
    first, second = (measure_costs(TINY, unit, {"last": FORMS}, texts[:2], draws=2) for _ in range(2))
    assert first == second
