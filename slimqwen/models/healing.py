"""Healing: trains a rounded decoder layer, alone and in its quantised format, to give the 16-bit layer's outputs.

The integers, their scales and the norms of one layer are trained together, on the inputs that the rounded model gives
it. Each integer is a real number (its place), rounded. Signed gradients move a place by half a step of the grid, as in
AutoRound (Cheng et al., arXiv 2309.05516), or by a whole step after GPTQ; gradients ignore the rounding.

Why not llmcompressor's AutoRound: it does not train norms, it returns scales without their zero points, and it keeps
state from one layer for the next, which is lost where each layer is a model of its own.
"""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from slimqwen.models.language_model import compute_device


class _Grid:
    """A rounded linear: the integers nearest to `places`, times scales.

    Args:
        linear: a linear with llmcompressor's scales; its weight need not be rounded yet.
        dtype: dtype in which scales are stored.
    """

    rate = 1e-3
    """Largest change of a scale's factor by a step, before it decays."""

    def __init__(self, linear: Any, dtype: torch.dtype) -> None:
        form, shape = linear.quantization_scheme.weights, (*linear.weight_scale.shape, -1)
        self._linear, self._dtype = linear, dtype
        self._first = linear.weight_scale.detach().to(dtype).float()[..., None]
        zeros = getattr(linear, "weight_zero_point", None)
        zeros = torch.zeros_like(self._first) if zeros is None else zeros.detach().float()[..., None]
        half = 2 ** (form.num_bits - 1)
        self._lowest, self._highest = -half - zeros, half - 1 - zeros
        self._places = linear.weight.detach().float().reshape(shape) / self._first
        # After GPTQ every place is an integer already, as far from the next ones as can be.
        is_rounded = float((self._places - self._places.round()).abs().max()) < 1e-2
        self._reach = 1.0 if is_rounded else 0.5
        self.parameter = torch.nn.Parameter(torch.ones_like(self._first))
        self.stored = [linear.weight.data, linear.weight_scale.data]

    def _integers(self) -> Tensor:
        return self._places.round().clamp(self._lowest, self._highest)

    def write(self) -> None:
        """Give the linear the scales and the weight that the format stores."""
        scales = (self._first * self.parameter.detach()).to(self._dtype).float()
        weight, stored = self.stored
        weight.copy_((self._integers() * scales).reshape(weight.shape))
        stored.copy_(scales[..., 0])
        self._linear.weight.requires_grad_(True)

    def learn(self, step: float) -> None:
        """Move the places against the signs of their gradients; set the gradients of the scales.

        Args:
            step: share of the way that a place may go; over all steps the sum is one.
        """
        gradient = self._linear.weight.grad.reshape(self._places.shape)
        self.parameter.grad = (gradient * self._integers()).sum(-1, keepdim=True) * self._first
        self._places -= self._reach * step * gradient.sign()
        self._linear.weight.grad = None


class _Norm:
    """The weight of a norm, which is rounded to the dtype in which it is stored."""

    rate = 1e-3
    """Largest change of a weight by a step, before it decays."""

    def __init__(self, norm: Any, dtype: torch.dtype) -> None:
        self._weight, self._dtype = norm.weight, dtype
        self.parameter = torch.nn.Parameter(norm.weight.detach().clone())
        self.stored = [norm.weight.data]

    def write(self) -> None:
        self._weight.data.copy_(self.parameter.detach().to(self._dtype))
        self._weight.requires_grad_(True)

    def learn(self, _: float) -> None:
        self.parameter.grad, self._weight.grad = self._weight.grad, None


_Part = _Grid | _Norm


def heal_layer(
    layer: Any, inputs: Tensor, wanted: Tensor, steps: int, batch: int, dtype: torch.dtype
) -> tuple[float, float]:
    """Train a rounded layer in place; if its error does not fall, the layer stays as it was.

    Args:
        layer: a layer from `load_layer` in which llmcompressor has given linears their scales.
        inputs: float32 [sequences, tokens, hidden], what the rounded layer gets.
        wanted: outputs of the 16-bit layer, of the same shape.
        steps: training steps.
        batch: sequences of a step.
        dtype: dtype in which scales and norms are stored.

    Returns:
        Error of the output before and after training, equal if the layer stays as it was: the root of the mean over
        tokens of the squared deviation, as a share of the output's own square.
    """
    from compressed_tensors.quantization import disable_quantization

    layer.to(compute_device()).requires_grad_(False).apply(disable_quantization)
    modules = list(layer.model.layers.modules())
    parts: list[_Part] = [_Grid(module, dtype) for module in modules if hasattr(module, "weight_scale")]
    parts += [_Norm(module, dtype) for module in modules if "RMSNorm" in type(module).__name__]
    for part in parts:
        part.write()
    tensors = [tensor for part in parts for tensor in part.stored]
    kept = [tensor.clone() for tensor in tensors]
    before = _error(layer, inputs, wanted, batch)
    with torch.enable_grad():
        _train(layer, parts, inputs, wanted, _batches(len(inputs), batch, steps))
    after = _error(layer, inputs, wanted, batch)
    layer.requires_grad_(False)
    if after < before:
        return before, after
    for tensor, value in zip(tensors, kept, strict=True):
        tensor.copy_(value)
    return before, before


def _train(
    layer: Any, parts: Sequence[_Part], inputs: Tensor, wanted: Tensor, batches: Sequence[Tensor]
) -> None:
    optimiser = torch.optim.Adam([{"params": [part.parameter]} for part in parts], betas=(0.9, 0.95))
    for step, chosen in enumerate(batches):
        left = 1 - step / len(batches)
        _shares(layer, inputs[chosen], wanted[chosen]).mean().backward()
        for part, group in zip(parts, optimiser.param_groups, strict=True):
            group["lr"] = left * part.rate
            part.learn(2 * left / len(batches))
        optimiser.step()
        for part in parts:
            part.write()


def _batches(count: int, batch: int, steps: int) -> list[Tensor]:
    """Numbers of the sequences of each step: all of them in a seeded random order, then in another."""
    generator = torch.Generator().manual_seed(0)
    rounds = 1 + steps * batch // count
    order = torch.cat([torch.randperm(count, generator=generator) for _ in range(rounds)])
    return [order[step * batch : (step + 1) * batch] for step in range(steps)]


def _shares(layer: Any, inputs: Tensor, wanted: Tensor) -> Tensor:
    """The squared deviation of each token's output as a share of its own square: [sequences, tokens].

    Not the deviation itself: the next layer norms each token, and a few tokens can be far larger than all others (Sun
    et al., arXiv 2402.17762).
    """
    device = compute_device()
    expected = wanted.to(device)
    output = layer.model(inputs_embeds=inputs.to(device), use_cache=False)[0]
    return (output - expected).square().mean(-1) / expected.square().mean(-1)


def _error(layer: Any, inputs: Tensor, wanted: Tensor, batch: int) -> float:
    with torch.no_grad():
        pairs = zip(inputs.split(batch), wanted.split(batch), strict=True)
        shares = torch.cat([_shares(layer, *pair) for pair in pairs])
    return float(shares.double().mean().sqrt())
