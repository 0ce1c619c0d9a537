"""Error of each quantised decoder layer, relative to round-to-nearest (RTN).

Every decoder layer of the quantised checkpoint gets the input of the layer that it was made from, and its output is
compared with that layer's output. The same is done with the original weights rounded to nearest. AWQ and GPTQ search
for less error than RTN, so a layer with a clearly larger error was made wrongly. The divergence of whole models does
not show that: a layer of little influence can be wrong within the limits.
"""

import gc
import math
import re
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from slimqwen import checkpoint
from slimqwen.checkpoint.packing import packed_bits
from slimqwen.checkpoint.rtn import round_to_nearest
from slimqwen.checkpoint.tensors import list_tensors
from slimqwen.errors import SlimqwenError
from slimqwen.models.language_model import load_in_float32

_PACKED = re.compile(r"(?!mtp\.)(?:.*\.)?layers\.(\d+)\.(.+)\.weight_packed")
_WORD_BITS = 32


class LayerErrorError(SlimqwenError):
    """The layers of two checkpoints cannot be compared."""


@dataclass(frozen=True)
class LayerError:
    """A quantised layer on the original layer's own input.

    Attributes:
        error: root mean square error of its output, as a share of what the original layer adds to its input.
        rounded_error: the same of RTN.
    """

    layer: int
    error: float
    rounded_error: float

    @property
    def ratio(self) -> float:
        """Error over that of RTN."""
        return self.error / self.rounded_error


def measure_layer_errors(quantised: Path, original: Path, texts: Sequence[Sequence[int]]) -> list[LayerError]:
    """Measure the error of each decoder layer with packed linears.

    Args:
        quantised: checkpoint with the layers of `original`; its vocabulary may differ.
        original: checkpoint that is not quantised.
        texts: token ids of `original`.

    Raises:
        LayerErrorError: an error is not finite, or the checkpoints' layers differ in shape.
    """
    matches = map(_PACKED.fullmatch, list_tensors(quantised))
    layers = sorted({int(match[1]) for match in matches if match})
    if not layers:
        return []
    model = _load_decoder(original)
    calls = [_run(model, ids) for ids in texts]
    _round_linears(model, quantised, original)
    rounded_errors = _layer_errors(model, calls)
    # One model at a time: a 4B one takes 16 GB in float32.
    del model
    _free_memory()
    model = _load_decoder(quantised)
    errors = _layer_errors(model, calls)
    del model
    _free_memory()
    rows = [LayerError(layer, errors[layer], rounded_errors[layer]) for layer in layers]
    for row in rows:
        if not (math.isfinite(row.error) and math.isfinite(row.rounded_error) and row.rounded_error > 0):
            raise LayerErrorError(
                f"{quantised}: layer {row.layer} has an error of {row.error}, and {row.rounded_error} with "
                "round-to-nearest; look for scales that are not finite, and make the checkpoint again"
            )
    return rows


@dataclass(frozen=True)
class _Call:
    """Input and output of a layer: float32 [tokens, hidden], in main memory."""

    input: Tensor
    output: Tensor


def _round_linears(model: Any, quantised: Path, original: Path) -> None:
    """Round the original weights that the quantised checkpoint has packed, in the same way."""
    tensors = list_tensors(quantised)
    form = checkpoint.quantisation(checkpoint.read_config(quantised))
    for name, packed in tensors.items():
        match = _PACKED.fullmatch(name)
        if match is None:
            continue
        layer, linear, weight_name = int(match[1]), match[2], name.removesuffix("_packed")
        bits = packed_bits(weight_name.removesuffix(".weight"), form)
        shape = (packed.shape[0], packed.shape[1] * (_WORD_BITS // bits))
        try:
            weight = model.layers[layer].get_submodule(linear).weight
        except (AttributeError, IndexError):
            weight = None
        if weight is None or weight.shape != shape:
            raise LayerErrorError(
                f"{quantised}: {original} has no {linear} of shape {shape} in layer {layer}; "
                "name the checkpoint that it was made from"
            )
        group_size = shape[1] // tensors[f"{weight_name}_scale"].shape[1]
        symmetric = f"{weight_name}_zero_point" not in tensors
        with torch.no_grad():
            weight.copy_(round_to_nearest(weight, group_size, bits, symmetric=symmetric))


def _load_decoder(weights: Path) -> Any:
    """The decoder alone."""
    return load_in_float32(weights).model


def _free_memory() -> None:
    gc.collect()
    torch.cuda.empty_cache()


def _layer_errors(model: Any, calls: Sequence[Sequence[_Call]]) -> list[float]:
    """Error of each layer on the inputs of the original's calls, by text and layer.

    It is the RMS of the deviation over the RMS of what the original layer adds.
    """
    deviation = [0.0] * len(model.layers)
    addition = [0.0] * len(model.layers)
    for expected in calls:
        # The tokens do not matter: the first layer's input is replaced too.
        actual = _run(model, [0] * len(expected[0].input), [call.input for call in expected])
        for number, (ours, theirs) in enumerate(zip(actual, expected, strict=True)):
            deviation[number] += float((ours.output - theirs.output).double().square().sum())
            addition[number] += float((theirs.output - theirs.input).double().square().sum())
    return [float((a / b) ** 0.5) for a, b in zip(deviation, addition, strict=True)]


def _run(model: Any, ids: Sequence[int], inputs: Sequence[Tensor] | None = None) -> list[_Call]:
    """The calls of all layers for one text; `inputs` replace what the layers would get from one another."""
    calls: list[_Call] = []

    def replace_input(_layer: nn.Module, arguments: tuple[Tensor, ...]) -> tuple[Tensor, ...] | None:
        if inputs is None:
            return None
        return (inputs[len(calls)][None].to(arguments[0].device), *arguments[1:])

    def record(_layer: nn.Module, arguments: tuple[Tensor, ...], output: Tensor) -> None:
        calls.append(_Call(arguments[0][0].cpu(), output[0].cpu()))

    with ExitStack() as hooks, torch.inference_mode():
        for layer in model.layers:
            hooks.callback(layer.register_forward_pre_hook(replace_input).remove)
            hooks.callback(layer.register_forward_hook(record).remove)
        model(torch.tensor([list(ids)], device=model.device), use_cache=False)
    return calls
