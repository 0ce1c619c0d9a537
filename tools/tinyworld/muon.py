"""Muon: an optimiser for weight matrices whose momentum update is made orthogonal.

torch.optim.Muon iterates in bfloat16, which is about twenty times slower on CPUs without bfloat16 units; this one works
in float32 and processes all matrices of one shape in one batch.
"""

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor, nn

_NEWTON_SCHULZ = (
    (4.0848, -6.8946, 2.9270),
    (3.9505, -6.3029, 2.6377),
    (3.7418, -5.5913, 2.3037),
    (2.8769, -3.1427, 1.2046),
    (2.8366, -3.0525, 1.2012),
)
"""Coefficients of each iteration, from the public modded-nanogpt speed runs; five steps bring all singular values
near 1."""

_MOMENTUM = 0.95


def orthogonalise(matrices: Tensor) -> Tensor:
    """The nearest (semi-)orthogonal matrices, roughly: [count, rows, columns] float32 -> the same shape."""
    tall = matrices.shape[1] > matrices.shape[2]
    wide = matrices.mT if tall else matrices
    wide = wide / (wide.norm(dim=(1, 2), keepdim=True) + 1e-7)
    for linear, cubic, quintic in _NEWTON_SCHULZ:
        gram = wide @ wide.mT
        wide = linear * wide + (cubic * gram + quintic * (gram @ gram)) @ wide
    return wide.mT if tall else wide


class Muon:
    """Updates matrices by their orthogonalised Nesterov momentum.

    Args:
        parameters: two-dimensional float32 parameters.
        weight_decay: decoupled, per step, times the rate.
    """

    def __init__(self, parameters: Iterable[nn.Parameter], weight_decay: float) -> None:
        self._weight_decay = weight_decay
        self._groups: dict[tuple[int, ...], list[nn.Parameter]] = {}
        for parameter in parameters:
            self._groups.setdefault(tuple(parameter.shape), []).append(parameter)
        self._running = {shape: torch.zeros(len(group), *shape) for shape, group in self._groups.items()}

    def step(self, rate: float) -> None:
        """One update of every parameter; all must have a gradient."""
        with torch.no_grad():
            for shape, group in self._groups.items():
                gradients = torch.stack([parameter.grad for parameter in group])
                running = self._running[shape].lerp_(gradients, 1 - _MOMENTUM)
                updates = orthogonalise(gradients.lerp(running, _MOMENTUM))
                scale = max(1.0, shape[0] / shape[1]) ** 0.5
                for parameter, update in zip(group, updates, strict=True):
                    parameter.mul_(1 - rate * self._weight_decay).add_(update, alpha=-rate * scale)

    def state_dict(self) -> dict[str, Any]:
        """The momentum of every shape."""
        return {"x".join(map(str, shape)): tensor for shape, tensor in self._running.items()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore a state from `state_dict`."""
        for shape, tensor in self._running.items():
            tensor.copy_(state["x".join(map(str, shape))])
