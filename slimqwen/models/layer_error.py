"""Error of each quantised decoder layer, relative to round-to-nearest (RTN).

Each quantised decoder layer gets the input of the original layer, and its output is compared with the original output.
The same is done with the original weights rounded to nearest. AWQ and GPTQ search for less error than RTN, so a layer
with a clearly larger error was made wrongly. The divergence of whole models would not show that: a wrong layer of
little influence can stay within the limits.
"""

import math
import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import torch
from torch import Tensor

from slimqwen.checkpoint import packing
from slimqwen.checkpoint.rtn import round_to_nearest
from slimqwen.checkpoint.weights import Weight, read_weights, text_name
from slimqwen.errors import SlimqwenError
from slimqwen.formats.compressed_tensors import PackedIntegers
from slimqwen.models.language_model import (
    load_layer,
    load_without_layers,
    read_embeddings,
    read_text_config,
    run_layer,
)

Name = TypeVar("Name")


class LayerErrorError(SlimqwenError):
    """The layers of two checkpoints cannot be compared."""


@dataclass(frozen=True)
class LayerError:
    """Error of a quantised layer on the input of the original layer.

    Attributes:
        layer: index of the layer, from 0.
        error: root mean square (RMS) error of the output, over the RMS of what the original layer adds to its input.
        rounded_error: the same error if the original weights are rounded to nearest (RTN).
    """

    layer: int
    error: float
    rounded_error: float

    @property
    def ratio(self) -> float:
        """Error divided by the error of round-to-nearest (RTN)."""
        return self.error / self.rounded_error


def measure_layer_errors(quantised: Path, original: Path, texts: Sequence[Sequence[int]]) -> list[LayerError]:
    """Measure the error of each decoder layer with packed linears; empty if there is none.

    Args:
        quantised: checkpoint with the layers of `original`; its vocabulary may differ.
        original: checkpoint that is not quantised.
        texts: token ids of each text, of the vocabulary of `original`.

    Raises:
        LayerErrorError: an error is not finite, or the layers of the two checkpoints differ in shape.
    """
    packed: dict[int, list[Weight]] = {}
    for name, weight in read_weights(quantised).items():
        if isinstance(weight.layout, PackedIntegers) and (match := packing.IN_LAYER.fullmatch(name)):
            packed.setdefault(int(match[1]), []).append(weight)
    if not packed:
        return []
    states = [read_embeddings(original, torch.tensor([list(ids)])) for ids in texts]
    rows = []
    for number in range(max(packed) + 1):
        layer = load_layer(original, number)
        inputs, states = states, [run_layer(layer, state) for state in states]
        if number in packed:
            _round_linears(layer, packed[number], quantised, original)
            rounded_error = _relative_error(layer, inputs, states)
        del layer  # frees its memory before the next is loaded
        if number in packed:
            error = _relative_error(load_layer(quantised, number), inputs, states)
            rows.append(LayerError(number, error, rounded_error))
    for row in rows:
        if not (math.isfinite(row.error) and math.isfinite(row.rounded_error) and row.rounded_error > 0):
            raise LayerErrorError(
                f"{quantised}: layer {row.layer} has an error of {row.error}, and of {row.rounded_error} with "
                "round-to-nearest, which cannot be; look for scales that are not finite and make the checkpoint again"
            )
    return rows


def measure_kind_divergences(
    original: Path, forms: Mapping[Name, tuple[str, PackedIntegers]], ids: Sequence[int]
) -> dict[Name, float]:
    """Measure how next-token distributions change if one kind of linears alone is rounded to nearest.

    The error of a layer does not show this: Gated DeltaNet of the embedded model has the largest error of a layer, but
    cost a fiftieth of the divergence. The output head has no layer at all.

    Args:
        original: checkpoint that is not quantised.
        forms: name of a result -> kind of linears (`packing.LINEARS`, not the MTP head) and layout to round it to.
        ids: token ids of a text.

    Returns:
        Name of a result -> mean Kullback-Leibler divergence from the original, nats a token.
    """
    text = torch.tensor([list(ids)])
    exact = read_embeddings(original, text)
    states = dict.fromkeys(forms, exact)
    count = read_text_config(original).num_hidden_layers
    for number in range(count):
        layer = load_layer(original, number, final_norm=number == count - 1)
        exact = run_layer(layer, exact)
        for name, (kind, form) in forms.items():
            with _rounded(layer, kind, form):
                states[name] = run_layer(layer, states[name])
    around = load_without_layers(original)
    with torch.no_grad():
        expected = around.lm_head(exact).log_softmax(-1)
        divergences = {}
        for name, (kind, form) in forms.items():
            with _rounded(around, kind, form):
                found = around.lm_head(states.pop(name)).log_softmax(-1)
            divergences[name] = float((expected.exp() * (expected - found)).sum(-1).double().mean())
    return divergences


@contextmanager
def _rounded(model: Any, kind: str, form: PackedIntegers) -> Iterator[None]:
    """The linears of a kind rounded to nearest for the length of a `with` block."""
    pattern = re.compile(packing.LINEARS[kind].removeprefix("re:"))
    found = [module for name, module in model.named_modules() if pattern.fullmatch(name)]
    kept = [module.weight for module in found]
    for module, weight in zip(found, kept, strict=True):
        rounded = round_to_nearest(weight.detach().cpu(), form)
        module.weight = torch.nn.Parameter(rounded.to(weight.device), requires_grad=False)
    yield
    for module, weight in zip(found, kept, strict=True):
        module.weight = weight


def _round_linears(layer: Any, packed: Sequence[Weight], quantised: Path, original: Path) -> None:
    """Round to nearest, in place, the weights of an original layer that the quantised checkpoint has packed.

    Args:
        packed: the packed weights; their bits and groups are used.
    """
    modules = {f"{name}.weight": module for name, module in layer.named_modules()}
    for each in packed:
        form = each.layout
        assert isinstance(form, PackedIntegers)
        weight = getattr(modules.get(text_name(each.name)), "weight", None)
        if weight is None or weight.shape != each.shape:
            raise LayerErrorError(
                f"{quantised} has {each.name} of shape {each.shape}, but {original} does not; name the checkpoint from "
                "which the quantised one was made"
            )
        with torch.no_grad():
            weight.copy_(round_to_nearest(weight, form))


def _relative_error(layer: Any, inputs: Sequence[Tensor], outputs: Sequence[Tensor]) -> float:
    """RMS of a layer's deviation from the original `outputs`, over the RMS of `outputs` minus `inputs`."""
    deviation = addition = 0.0
    for given, expected in zip(inputs, outputs, strict=True):
        deviation += float((run_layer(layer, given) - expected).double().square().sum())
        addition += float((expected - given).double().square().sum())
    return float((deviation / addition) ** 0.5)
