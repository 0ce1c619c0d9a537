"""Estimates what rounding linears to each width costs in divergence, without a forward pass for each width.

To second order the divergence that a change of weights causes is half the mean square of the change's product with the
gradient of log p(y), over tokens y that the model itself draws (the metric of the Fisher information). One forward
pass keeps the input of each layer; then gradients go from the last layer to the first, one layer in memory at a time.
The costs of all linears are added up (HIGGS, Malinovskii et al., arXiv 2411.17525: holds for medium widths).
"""

from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from slimqwen.checkpoint.rtn import round_to_nearest
from slimqwen.formats.compressed_tensors import PackedIntegers
from slimqwen.models.language_model import (
    compute_device,
    load_layer,
    load_without_layers,
    read_embeddings,
    read_text_config,
    run_layer,
)
from slimqwen.progress import Progress, silent

_Passed = tuple[Tensor, Tensor]
"""Inputs of a linear [texts, tokens, inputs]; gradients by its outputs [drawings, texts, tokens, outputs]."""


def measure_costs(
    source: Path,
    units: Mapping[Any, Sequence[str]],
    forms: Mapping[Any, Sequence[PackedIntegers]],
    texts: Sequence[Sequence[int]],
    draws: int,
    progress: Progress = silent,
) -> dict[Any, list[float]]:
    """Estimate the divergence, nats a token, if one unit alone is rounded to nearest, for each of its layouts.

    Args:
        source: checkpoint that is not quantised.
        units: unit -> names (as in the text-only class) of its linears, which are rounded together.
        forms: unit -> layouts to try.
        texts: token ids of texts of equal length.
        draws: number of samples of all next tokens; more samples give a smaller error.

    Returns:
        Unit -> estimated divergence of each of its layouts, in the order of `forms`.
    """
    states = list(_states(source, texts, progress))
    gradients = _head_gradients(source, states.pop(), draws)
    count = len(states)
    costs: dict[Any, list[float]] = {}
    for number in reversed(range(count)):
        progress("measuring what rounding costs", count - 1 - number, count)
        layer = load_layer(source, number, final_norm=number == count - 1).requires_grad_(False)
        modules = dict(layer.to(compute_device()).named_modules())
        inside = {unit: linears for unit, linears in units.items() if linears[0] in modules}
        linears = {name: modules[name] for names in inside.values() for name in names}
        gradients, passed = _pull_back(layer, linears, states.pop(), gradients)
        for unit, names in inside.items():
            known = [(modules[name].weight, *passed[name]) for name in names]
            costs[unit] = [_cost(known, form) for form in forms[unit]]
    return costs


def measure_divergence(original: Path, changed: Path, texts: Sequence[Sequence[int]]) -> float:
    """Measure the mean divergence of a checkpoint's next-token distributions from those of another, nats a token.

    Args:
        original: folder of the checkpoint to compare with.
        changed: folder of the checkpoint; it must have the same vocabulary.
        texts: token ids of each text.
    """
    outputs = [deque(_states(folder, texts), 1)[0] for folder in (original, changed)]
    heads = [load_without_layers(folder).lm_head for folder in (original, changed)]
    total = 0.0
    with torch.no_grad():
        for states in zip(*outputs, strict=True):
            expected, found = (head(state).log_softmax(-1) for head, state in zip(heads, states, strict=True))
            total += float((expected.exp() * (expected - found)).sum(-1).double().mean())
    return total / len(texts)


def _states(folder: Path, texts: Sequence[Sequence[int]], progress: Progress = silent) -> Iterator[Tensor]:
    """The input of each layer in turn, then the output of the last with the final norm."""
    states = read_embeddings(folder, torch.tensor(texts))
    count = read_text_config(folder).num_hidden_layers
    for number in range(count):
        yield states
        progress("keeping inputs of layers", number, count)
        layer = load_layer(folder, number, final_norm=number == count - 1)
        states = torch.cat([run_layer(layer, state) for state in states.split(1)])
    yield states


def _cost(linears: Sequence[tuple[Tensor, Tensor, Tensor]], form: PackedIntegers) -> float:
    """Half the mean square over drawings, texts and tokens; of weights with what passed through them.

    Products between tokens are left out: their mean is small, and their noise would take many more drawings.
    """
    moved: Any = 0
    for weight, inputs, gradients in linears:
        change = round_to_nearest(weight, form) - weight
        moved = moved + torch.einsum("dnto,nto->dnt", gradients, inputs @ change.T)
    return float(moved.double().square().mean() / 2)


def _head_gradients(source: Path, states: Tensor, draws: int) -> Tensor:
    """Gradients of log p(y) of drawn tokens by the output of the last layer: [drawings, texts, tokens, hidden]."""
    head = load_without_layers(source).lm_head.requires_grad_(False).to(compute_device())
    generator = torch.Generator().manual_seed(0)
    gradients = torch.empty(draws, *states.shape)
    for number, state in enumerate(states):
        leaf = state.to(compute_device(), copy=True).requires_grad_()
        logs = head(leaf).log_softmax(-1)
        drawn = torch.multinomial(logs.detach().exp().cpu(), draws, replacement=True, generator=generator)
        for draw, tokens in enumerate(drawn.T.to(logs.device)):
            total = logs.gather(1, tokens[:, None]).sum()
            [gradients[draw, number]] = torch.autograd.grad(total, leaf, retain_graph=True)
    return gradients


def _pull_back(
    layer: Any, linears: Mapping[str, Any], states: Tensor, gradients: Tensor
) -> tuple[Tensor, dict[str, _Passed]]:
    """Gradients by the inputs of a layer, from those by its outputs; and what passed through its linears."""
    pulled = torch.empty_like(gradients)
    rows: dict[str, list[_Passed]] = {name: [] for name in linears}
    kept: dict[str, _Passed] = {}

    def keep(name: str) -> Any:
        return lambda _, given, output: kept.update({name: (given[0].detach(), output)})

    hooks = [module.register_forward_hook(keep(name)) for name, module in linears.items()]
    for number, state in enumerate(states):
        leaf = state[None].to(compute_device(), copy=True).requires_grad_()
        result = layer.model(inputs_embeds=leaf, use_cache=False)[0]
        wanted = [leaf, *(output for _, output in kept.values())]
        given_back = gradients[:, number, None].to(leaf.device)
        found = [torch.autograd.grad(result, wanted, each, retain_graph=True) for each in given_back]
        by_input, *by_outputs = map(torch.stack, zip(*found, strict=True))
        pulled[:, number] = by_input[:, 0]
        for (name, (given, _)), gradient in zip(kept.items(), by_outputs, strict=True):
            rows[name].append((given, gradient))
    for hook in hooks:
        hook.remove()
    passed = {
        name: (torch.cat([given for given, _ in row]), torch.cat([gradient for _, gradient in row], 1))
        for name, row in rows.items()
    }
    return pulled, passed
