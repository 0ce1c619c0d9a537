"""A healed layer is nearer to the 16-bit one on inputs that it was not trained on, and stays in its format."""

from typing import Any

import pytest
import torch
import transformers
from compressed_tensors.quantization import QuantizationArgs, QuantizationScheme
from compressed_tensors.quantization.utils import calculate_qparams
from torch import Tensor

from slimqwen.checkpoint import packing
from slimqwen.models.healing import heal_layer
from slimqwen.models.language_model import load_layer, read_embeddings, run_layer
from slimqwen.recipe.calibration_text import CalibrationText, calibration_sequences
from tests.checkpoints import TINY

KINDS = ("mlp", "attention", "linear_attention")
GATED_DELTA_NET, ATTENTION = 0, 3
"""Layers of the embedded model."""


@pytest.fixture(scope="module")
def states() -> Tensor:
    """Inputs of the first layer; also for another one, for what goes in need not be likely."""
    tokenizer = transformers.AutoTokenizer.from_pretrained(TINY)
    texts = calibration_sequences(CalibrationText(path="tinyworld", sequences=24, length=16), TINY, tokenizer)
    return read_embeddings(TINY, torch.tensor(texts))


def rounded_layer(number: int, bits: int, symmetric: bool) -> Any:
    """A layer with scales and zero points of round-to-nearest, as llmcompressor leaves it."""
    layer = load_layer(TINY, number)
    form = QuantizationArgs(num_bits=bits, symmetric=symmetric, strategy="group", group_size=32)
    for name, module in layer.named_modules():
        if any(packing.is_linear(f"{name}.weight", kind) for kind in KINDS):
            groups = module.weight.detach().reshape(len(module.weight), -1, 32)
            scales, zeros = calculate_qparams(groups.amin(-1), groups.amax(-1), form)
            module.quantization_scheme = QuantizationScheme(targets=["Linear"], weights=form)
            module.weight_scale = torch.nn.Parameter(scales, requires_grad=False)
            module.weight_zero_point = torch.nn.Parameter(zeros, requires_grad=False)
    return layer


def healed_layer(number: int, bits: int, symmetric: bool, states: Tensor, steps: int) -> Any:
    layer = rounded_layer(number, bits, symmetric)
    wanted = run_layer(load_layer(TINY, number), states)
    heal_layer(layer, states, wanted, steps, 4, torch.bfloat16)
    return layer


@pytest.mark.parametrize(
    ("number", "bits", "symmetric"), [(GATED_DELTA_NET, 3, True), (ATTENTION, 3, True), (ATTENTION, 2, False)]
)
def test_a_healed_layer_is_nearer_to_the_16_bit_one_on_other_inputs(
    states: Tensor, number: int, bits: int, symmetric: bool
) -> None:
    seen, unseen = states[:16], states[16:]
    exact = run_layer(load_layer(TINY, number), unseen)
    # Without a step, the layer is only rounded.
    errors = [
        float((run_layer(healed_layer(number, bits, symmetric, seen, steps), unseen) - exact).square().mean())
        for steps in (0, 40)
    ]
    assert errors[1] < 0.9 * errors[0]


def test_a_healed_weight_is_integers_of_its_width_times_scales_in_bfloat16(states: Tensor) -> None:
    layer = healed_layer(ATTENTION, 3, False, states, 10)
    before = dict(rounded_layer(ATTENTION, 3, False).named_modules())
    linears = {
        name: module for name, module in layer.named_modules() if hasattr(module, "quantization_scheme")
    }
    assert len(linears) == 7
    for name, module in linears.items():
        scales, zeros = module.weight_scale, module.weight_zero_point
        assert torch.equal(scales, scales.bfloat16().float())
        assert torch.equal(zeros, before[name].weight_zero_point)
        integers = (module.weight.reshape(*scales.shape, -1) / scales[..., None]).round()
        stored = integers + zeros[..., None]
        assert (stored.min(), stored.max()) == (-4, 3)
        assert torch.equal((integers * scales[..., None]).reshape(module.weight.shape), module.weight)


def test_healing_gives_the_same_numbers_again(states: Tensor) -> None:
    first, second = (healed_layer(GATED_DELTA_NET, 3, True, states, 5).state_dict() for _ in range(2))
    assert first.keys() == second.keys()
    assert all(torch.equal(tensor, second[name]) for name, tensor in first.items())


def test_a_layer_that_no_step_improves_stays_as_it_was_rounded(states: Tensor) -> None:
    layer = rounded_layer(ATTENTION, 4, True)
    as_rounded = healed_layer(ATTENTION, 4, True, states, 0)
    wanted = run_layer(as_rounded, states)
    before, after = heal_layer(layer, states, wanted, 3, 4, torch.bfloat16)
    assert before == after < 1e-5
    expected = as_rounded.state_dict()
    assert all(torch.equal(tensor, expected[name]) for name, tensor in layer.state_dict().items())
