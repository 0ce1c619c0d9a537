"""Planted damages of SmolLM2-135M that the gate names; three minutes on two quiet cores.

The weights are those of the checkout: `slimqwen download smollm2-135m --package`.
"""

import json
import os
import shutil
from pathlib import Path

import pytest
import torch

from slimqwen import variant
from slimqwen.evals.fidelity_figures import FidelitySettings, judge_figures, summarise_texts
from slimqwen.evals.roundings import round_in_memory
from slimqwen.evals.token_distributions import ReferenceTexts, compare_model
from slimqwen.formats.compressed_tensors import PackedIntegers
from slimqwen.models.language_model import load_in_float32
from slimqwen.recipe import variant_recipe
from slimqwen.variant import Variant
from tests.tracked_copy import CHECKOUT

pytestmark = pytest.mark.real

ROOT = Path(__file__).parents[2]
WEIGHTS = Path(os.environ.get(CHECKOUT, ROOT)) / "weights/smollm2-135m"
EIGHT_BITS = dict.fromkeys(("mlp", "attention"), PackedIntegers(8, None))


@pytest.fixture
def best(tmp_path: Path) -> Variant:
    """smollm2-135m-best with the text files of its baseline, beside the baseline's weights."""
    if not WEIGHTS.is_dir():
        pytest.skip("weights/smollm2-135m is missing: `slimqwen download smollm2-135m --package` makes it")
    for name in ("smollm2-135m", "smollm2-135m-best"):
        shutil.copytree(ROOT / "experiments" / name, tmp_path / "experiments" / name)
    (tmp_path / "weights").mkdir()
    (tmp_path / "eval").symlink_to(ROOT / "eval")
    (tmp_path / "weights/smollm2-135m").symlink_to(WEIGHTS)
    shutil.copytree(WEIGHTS, tmp_path / "weights/smollm2-135m-best")
    return variant.load("smollm2-135m-best", tmp_path)


def test_a_template_without_its_system_turn_and_a_tokenizer_without_its_merges_are_named(
    best: Variant,
) -> None:
    assert variant_recipe.unexplained_files(best) == []
    template = best.weights / "chat_template.jinja"
    assert "system" in template.read_text()
    template.write_text(template.read_text().replace("system", "user"))
    assert variant_recipe.unexplained_files(best) == ["chat_template.jinja"]
    tokenizer = best.weights / "tokenizer.json"
    content = json.loads(tokenizer.read_text())
    content["model"]["merges"] = []
    tokenizer.write_text(json.dumps(content))
    assert variant_recipe.unexplained_files(best) == ["chat_template.jinja", "tokenizer.json"]


def test_zeros_in_a_twentieth_of_a_layer_s_channels_fail_where_8_bits_pass(best: Variant) -> None:
    settings = FidelitySettings.load("general", ROOT).model_copy(update={"most_texts": 12})
    reference = ReferenceTexts.load(WEIGHTS, WEIGHTS, settings, best.root, max_model_len=1024)
    model = load_in_float32(WEIGHTS)
    round_in_memory(model, EIGHT_BITS)

    def verdicts() -> dict[str, str]:
        (figures,) = summarise_texts(compare_model(reference, model, "float32")).values()
        return {name: str(verdict) for name, verdict in judge_figures(figures, settings.limits).items()}

    assert set(verdicts().values()) == {"pass"}
    layer = model.model.layers[1]
    with torch.no_grad():
        for linear in (layer.self_attn.o_proj, layer.mlp.down_proj):
            linear.weight[::20] = 0
    assert verdicts()["kl_nats"] == "fail"
