"""Error of each quantised decoder layer, relative to round-to-nearest (RTN).

Every decoder layer of the variant gets the input of the baseline's layer, and its output is compared with the output of
the baseline's layer. The same is done with the baseline's weights rounded to nearest. AWQ and GPTQ search for less
error than RTN, so a layer with a clearly larger error was made wrongly. The divergence of whole models does not show
that: a layer of little influence can be wrong within the limits.
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

from slimqwen import checkpoint
from slimqwen.checkpoint.packing import packed_bits
from slimqwen.checkpoint.rtn import round_to_nearest
from slimqwen.checkpoint.tensors import list_tensors
from slimqwen.evals import EvalError
from slimqwen.evals.baseline_model import load_in_float32
from slimqwen.evals.fidelity_figures import FidelitySettings, LayerRow, Layers
from slimqwen.evals.token_distributions import read_texts
from slimqwen.progress import Progress, silent
from slimqwen.records.split import Split
from slimqwen.stats.verdict import Verdict

_PACKED = re.compile(r"(?!mtp\.)(?:.*\.)?layers\.(\d+)\.(.+)\.weight_packed")
_WORD_BITS = 32

_TOKENS = 2048
"""Tokens of the first texts that are compared: few suffice, and their hidden states fill memory."""


def compare(
    variant_weights: Path,
    baseline_weights: Path,
    settings: FidelitySettings,
    root: Path,
    progress: Progress = silent,
    split: Split | None = None,
) -> Layers | None:
    """Judge the quantised layers of a checkpoint on the settings' first texts.

    Args:
        baseline_weights: checkpoint that the variant was made from, not quantised.

    Returns:
        None if no linear of the checkpoint is packed by compressed-tensors.

    Raises:
        EvalError: texts are missing, or the layers cannot be compared.
    """
    tokenizer = transformers.AutoTokenizer.from_pretrained(baseline_weights)
    texts: list[list[int]] = []
    remaining = _TOKENS
    for _, text in read_texts(root / settings.texts, split):
        ids = tokenizer(text, add_special_tokens=False, verbose=False)["input_ids"][:remaining]
        remaining -= len(ids)
        texts += [ids] if ids else []
    rows = measure(variant_weights, baseline_weights, texts, progress)
    if not rows:
        return None
    passed = all(row.ratio <= settings.layer_error_ratio for row in rows)
    return Layers(
        limit=settings.layer_error_ratio,
        verdict=Verdict.PASS if passed else Verdict.FAIL,
        tokens=_TOKENS - remaining,
        rows=tuple(rows),
    )


def measure(
    variant_weights: Path,
    baseline_weights: Path,
    texts: Sequence[Sequence[int]],
    progress: Progress = silent,
) -> list[LayerRow]:
    """Measure the error of each quantised decoder layer on the baseline's own input.

    Args:
        variant_weights: checkpoint with the baseline's layers; its vocabulary may differ.
        baseline_weights: checkpoint that the variant was made from, not quantised.
        texts: token ids of the baseline.

    Returns:
        A row for each layer with packed linears, by number.

    Raises:
        EvalError: an error is not finite, or the checkpoints' layers differ in shape.
    """
    matches = map(_PACKED.fullmatch, list_tensors(variant_weights))
    layers = sorted({int(match[1]) for match in matches if match})
    if not layers:
        return []
    progress("comparing layers", 0, 3)
    model = _load(baseline_weights)
    calls = [_run(model, ids) for ids in texts]
    progress("comparing layers", 1, 3)
    _round_linears(model, variant_weights, baseline_weights)
    rounded_errors = _layer_errors(model, calls)
    # One model at a time: a 4B one takes 16 GB in float32.
    del model
    _free_memory()
    progress("comparing layers", 2, 3)
    model = _load(variant_weights)
    errors = _layer_errors(model, calls)
    del model
    _free_memory()
    progress("comparing layers", 3, 3)
    rows = []
    for layer in layers:
        error, rounded_error = errors[layer], rounded_errors[layer]
        if not (math.isfinite(error) and math.isfinite(rounded_error) and rounded_error > 0):
            raise EvalError(
                f"{variant_weights}: layer {layer} has an error of {error}, and {rounded_error} with round-to-nearest; "
                "look for scales that are not finite, and make the checkpoint again"
            )
        ratio = error / rounded_error
        rows.append(LayerRow(layer=layer, error=error, rounded_error=rounded_error, ratio=ratio))
    return rows


@dataclass(frozen=True)
class _Call:
    """Input and output of a layer: float32 [tokens, hidden], in main memory."""

    input: Tensor
    output: Tensor


def _round_linears(model: Any, variant_weights: Path, baseline_weights: Path) -> None:
    """Round the baseline's weights that the variant has packed by compressed-tensors, in the same way."""
    tensors = list_tensors(variant_weights)
    form = checkpoint.quantisation(checkpoint.read_config(variant_weights))
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
            raise EvalError(
                f"{variant_weights}: {baseline_weights} has no {linear} of shape {shape} in layer {layer}; "
                "name the baseline that the variant was made from"
            )
        group_size = shape[1] // tensors[f"{weight_name}_scale"].shape[1]
        symmetric = f"{weight_name}_zero_point" not in tensors
        with torch.no_grad():
            weight.copy_(round_to_nearest(weight, group_size, bits, symmetric=symmetric))


def _load(weights: Path) -> Any:
    """The decoder alone."""
    model = load_in_float32(weights).model
    return getattr(model, "language_model", model)


def _free_memory() -> None:
    gc.collect()
    torch.cuda.empty_cache()


def _layer_errors(model: Any, calls: Sequence[Sequence[_Call]]) -> list[float]:
    """Error of each layer on the inputs of the baseline's calls, by text and layer.

    It is the RMS of the deviation over the RMS of what the baseline's layer adds.
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
