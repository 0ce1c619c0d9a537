"""What rounding some linears costs in divergence, estimated for every width without a forward pass for each.

To second order the divergence that a change of weights causes is half the mean square of the change's product with the
gradient of log p(y), over tokens y that the model itself draws (the metric of the Fisher information). One forward
pass keeps the input of each layer; then gradients go from the last layer to the first, one layer in memory at a time.
The costs of all linears are added up (HIGGS, Malinovskii et al., arXiv 2411.17525: holds for medium widths).
"""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

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


class _Linear(NamedTuple):
    """What passed through a linear."""

    inputs: Tensor  # [texts, tokens, inputs]
    gradients: Tensor  # of log p(y) by its outputs: [drawings, texts, tokens, outputs]


def measure_costs(
    source: Path,
    units: Mapping[str, Sequence[str]],
    forms: Mapping[str, Sequence[PackedIntegers]],
    texts: Sequence[Sequence[int]],
    draws: int,
    progress: Progress = silent,
) -> dict[str, list[float]]:
    """Estimate the divergence where a unit alone is rounded to nearest, nats a token, for each of its forms.

    Args:
        source: checkpoint that is not quantised.
        units: name -> linears of one layer that are rounded together, named as in the text-only class.
        forms: name of a unit -> the forms to try.
        texts: token ids of texts of equal length.
        draws: number of drawings of all next tokens; a text with a drawing is a sample of the square.
    """
    count = read_text_config(source).num_hidden_layers
    states = [read_embeddings(source, torch.tensor(texts))]
    for number in range(count):
        progress("keeping inputs of layers", number, count)
        layer = load_layer(source, number, final_norm=number == count - 1)
        states.append(torch.cat([run_layer(layer, state) for state in states[-1].split(1)]))
    gradients = _head_gradients(source, states.pop(), draws)
    costs: dict[str, list[float]] = {}
    for number in reversed(range(count)):
        progress("measuring what rounding costs", count - 1 - number, count)
        layer = load_layer(source, number, final_norm=number == count - 1).requires_grad_(False)
        modules = dict(layer.to(compute_device()).named_modules())
        inside = {unit: linears for unit, linears in units.items() if linears[0] in modules}
        names = [name for linears in inside.values() for name in linears]
        gradients, passed = _pull_back(
            layer, {name: modules[name] for name in names}, states.pop(), gradients
        )
        for unit, linears in inside.items():
            known = [(modules[name].weight, passed[name]) for name in linears]
            costs[unit] = [_cost(known, form) for form in forms[unit]]
    return costs


def measure_divergence(original: Path, changed: Path, texts: Sequence[Sequence[int]]) -> float:
    """Mean divergence of a checkpoint's next-token distributions from those of the original, nats a token."""
    logs = []
    for folder in (original, changed):
        count = read_text_config(folder).num_hidden_layers
        states = read_embeddings(folder, torch.tensor(texts))
        for number in range(count):
            layer = load_layer(folder, number, final_norm=number == count - 1)
            states = torch.cat([run_layer(layer, state) for state in states.split(1)])
        head = load_without_layers(folder).lm_head
        logs.append((head, states))
    total = 0.0
    with torch.no_grad():
        for given in zip(*(states for _, states in logs), strict=True):
            expected, found = (
                head(state).log_softmax(-1) for (head, _), state in zip(logs, given, strict=True)
            )
            total += float((expected.exp() * (expected - found)).sum(-1).double().mean())
    return total / len(texts)


def _cost(linears: Sequence[tuple[Tensor, _Linear]], form: PackedIntegers) -> float:
    """Half the mean square over texts and drawings, for each token."""
    moved: Any = 0
    for weight, passed in linears:
        group = form.group_size or weight.shape[1]
        change = round_to_nearest(weight, group, form.bits, symmetric=form.symmetric) - weight
        moved = moved + torch.einsum("dnto,nto->dn", passed.gradients, passed.inputs @ change.T)
    return float(moved.double().square().mean() / 2 / linears[0][1].inputs.shape[1])


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
    layer: Any, modules: Mapping[str, Any], states: Tensor, gradients: Tensor
) -> tuple[Tensor, dict[str, _Linear]]:
    """Gradients by the inputs of a layer, from those by its outputs; and what passed through its linears."""
    pulled = torch.empty_like(gradients)
    rows: dict[str, list[_Linear]] = {name: [] for name in modules}
    outputs: dict[str, tuple[Tensor, Tensor]] = {}

    def keep(name: str) -> Any:
        return lambda _, given, output: outputs.update({name: (given[0].detach(), output)})

    hooks = [module.register_forward_hook(keep(name)) for name, module in modules.items()]
    for number, state in enumerate(states):
        leaf = state[None].to(compute_device(), copy=True).requires_grad_()
        result = layer.model(inputs_embeds=leaf, use_cache=False)[0]
        wanted = [leaf, *(output for _, output in outputs.values())]
        given_back = gradients[:, number, None].to(leaf.device)
        found = [torch.autograd.grad(result, wanted, each, retain_graph=True) for each in given_back]
        for draw, (by_input, *_) in enumerate(found):
            pulled[draw, number] = by_input[0]
        for place, (name, (given, _)) in enumerate(outputs.items(), start=1):
            rows[name].append(_Linear(given, torch.stack([each[place] for each in found])))
    for hook in hooks:
        hook.remove()
    passed = {
        name: _Linear(
            torch.cat([each.inputs for each in row]), torch.cat([each.gradients for each in row], 1)
        )
        for name, row in rows.items()
    }
    return pulled, passed
