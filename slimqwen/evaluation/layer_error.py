"""Whether a layer of a quantised checkpoint came out wrong, however little the texts of an evaluation show of it.

Every decoder layer of the variant is given what the baseline's layer is given, and its output is compared with the
baseline layer's. Beside it stands the same layer with the baseline's weights plainly rounded to nearest: AWQ and GPTQ
search for less error than that, so a layer with clearly more was not made as it should have been. The divergence of
whole models cannot tell: a layer that matters little may be wrong within its limits.
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
import transformers
from torch import Tensor, nn
from transformers import CompressedTensorsConfig

from slimqwen import checkpoint
from slimqwen.errors import SlimqwenError
from slimqwen.evaluation.rounding import rounded
from slimqwen.progress import Progress, silent

_PACKED = re.compile(r"(?!mtp\.)(?:.*\.)?layers\.(\d+)\.(.+)\.weight_packed")
_WORD_BITS = 32


class LayerError(SlimqwenError):
    """The two checkpoints' layers cannot be compared, or one of them gives no numbers."""


@dataclass(frozen=True)
class QuantisedLayer:
    """Of one decoder layer that has quantised linears.

    Attributes:
        layer: its number, from 0.
        error: root mean square of how far its output is from the baseline layer's, as a share of the root mean square
            of what that layer adds to its input.
        rounded_error: the same of the baseline's layer with the same linears rounded to nearest in groups as large.
    """

    layer: int
    error: float
    rounded_error: float

    @property
    def ratio(self) -> float:
        """Of the two errors: 1 or less where the search for scales was worth its time."""
        return self.error / self.rounded_error


def measure(
    variant: Path, baseline: Path, texts: Sequence[Sequence[int]], progress: Progress = silent
) -> list[QuantisedLayer]:
    """Compare the decoder layers of a quantised checkpoint with its baseline's, each on the baseline's own input.

    Args:
        variant: a checkpoint with W4A16 linears or without; its layers are the baseline's, its vocabulary need not be.
        baseline: the checkpoint that it was made from, not quantised.
        texts: the baseline's token ids.
        progress: hears the models done.

    Returns:
        one a layer that has packed linears, by number; empty where none has.

    Raises:
        LayerError: a layer gives no numbers, or the checkpoints' layers differ in shape.
    """
    packed = _packed(variant)
    if not packed:
        return []
    progress("comparing layers", 0, 3)
    model = _load(baseline)
    calls = _record(model, texts)
    progress("comparing layers", 1, 3)
    with torch.no_grad():
        for (layer, name), grid in packed.items():
            try:
                weight = model.layers[layer].get_submodule(name).weight
            except (AttributeError, IndexError):
                weight = None
            if weight is None or weight.shape != grid.shape:
                raise LayerError(
                    f"{variant}: {baseline} has no {name} of shape {grid.shape} in layer {layer}; name the baseline "
                    "that it was made from"
                )
            weight.copy_(rounded(weight, grid.group, grid.bits, symmetric=grid.symmetric))
    plain = _errors(model, calls)
    # One model at a time: a 4B one takes 16 GB in 32 bit.
    del model
    _free()
    progress("comparing layers", 2, 3)
    model = _load(variant)
    own = _errors(model, calls)
    del model
    _free()
    progress("comparing layers", 3, 3)
    found = [
        QuantisedLayer(layer, own[layer], plain[layer]) for layer in sorted({layer for layer, _ in packed})
    ]
    for one in found:
        if not (math.isfinite(one.error) and math.isfinite(one.rounded_error) and one.rounded_error > 0):
            raise LayerError(
                f"{variant}: layer {one.layer} gives an error of {one.error}, plainly rounded {one.rounded_error}; "
                "look for scales that are not finite, and make the checkpoint anew"
            )
    return found


@dataclass(frozen=True)
class _Call:
    """What a layer of the baseline was given and what it made of that, [tokens, hidden] of float32 in main memory."""

    given: Tensor
    made: Tensor


@dataclass(frozen=True)
class _Grid:
    """What a linear was rounded to: so many bits, symmetric or with zero points, so many weights of a row a scale."""

    shape: tuple[int, int]
    bits: int
    symmetric: bool
    group: int


def _packed(folder: Path) -> dict[tuple[int, str], _Grid]:
    """Of each packed linear, by its layer and its name there."""
    stored = checkpoint.tensors(folder)
    given = checkpoint.read_config(folder).get("quantization_config", {})
    widths = {group["weights"]["num_bits"] for group in given.get("config_groups", {}).values()}
    found = {}
    for name, packed in stored.items():
        if match := _PACKED.fullmatch(name):
            linear = name.removesuffix("_packed")
            if len(widths) != 1:
                raise LayerError(
                    f"{folder}: its config gives linears {sorted(widths)} bits; one width is understood"
                )
            (bits,) = widths
            columns = packed.shape[1] * (_WORD_BITS // bits)
            group = columns // stored[f"{linear}_scale"].shape[1]
            symmetric = f"{linear}_zero_point" not in stored
            found[int(match[1]), match[2]] = _Grid((packed.shape[0], columns), bits, symmetric, group)
    return found


def _load(folder: Path) -> Any:
    """The decoder, 32 bit; packed weights as the numbers that an engine computes with."""
    config = checkpoint.read_config(folder)
    quantised = "quantization_config" in config
    unpacked = {"quantization_config": CompressedTensorsConfig(run_compressed=False)} if quantised else {}
    transformers.utils.logging.set_verbosity_error()
    # A multimodal checkpoint's own class: the text model's would not see that it is quantised.
    architecture = getattr(transformers, config["architectures"][0])
    model = architecture.from_pretrained(folder, dtype=torch.float32, **unpacked).model
    return getattr(model, "language_model", model).eval().to("cuda" if torch.cuda.is_available() else "cpu")


def _free() -> None:
    gc.collect()
    torch.cuda.empty_cache()


def _record(model: Any, texts: Sequence[Sequence[int]]) -> list[list[_Call]]:
    """Of each text, each layer's call."""
    calls: list[list[_Call]] = []

    def keep(_layer: nn.Module, given: tuple[Tensor, ...], made: Tensor) -> None:
        calls[-1].append(_Call(given[0][0].cpu(), made[0].cpu()))

    with ExitStack() as hooks:
        for layer in model.layers:
            hooks.callback(layer.register_forward_hook(keep).remove)
        for text in texts:
            calls.append([])
            _run(model, text)
    return calls


def _errors(model: Any, calls: Sequence[Sequence[_Call]]) -> list[float]:
    """Of each layer, given what the baseline's was given."""
    wrong = [0.0] * len(model.layers)
    added = [0.0] * len(model.layers)
    now: list[Sequence[_Call]] = [()]

    def hook(number: int, layer: nn.Module, hooks: ExitStack) -> None:
        def give(_layer: nn.Module, given: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
            return (now[0][number].given[None].to(given[0].device), *given[1:])

        def compare(_layer: nn.Module, _given: tuple[Tensor, ...], made: Tensor) -> None:
            call = now[0][number]
            wrong[number] += float((made[0].cpu() - call.made).double().square().sum())
            added[number] += float((call.made - call.given).double().square().sum())

        hooks.callback(layer.register_forward_pre_hook(give).remove)
        hooks.callback(layer.register_forward_hook(compare).remove)

    with ExitStack() as hooks:
        for number, layer in enumerate(model.layers):
            hook(number, layer, hooks)
        for of_text in calls:
            now[0] = of_text
            # Which tokens does not matter: the first layer's input is replaced too.
            _run(model, [0] * len(of_text[0].given))
    return [float((a / b) ** 0.5) for a, b in zip(wrong, added, strict=True)]


def _run(model: Any, text: Sequence[int]) -> None:
    with torch.inference_mode():
        model(torch.tensor([list(text)], device=model.device), use_cache=False)
