"""Muon for the matrices of a small transformer, in float32.

The update is the momentum made orthogonal, so every direction of a matrix learns at the same speed.  In
short runs it needs clearly fewer steps than AdamW.  PyTorch's own version computes in bfloat16, which
most CPUs emulate slowly; this one stays in float32 and treats equal shapes as one stack.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable

import torch
from torch import Tensor


def orthogonal(stack: Tensor, rounds: int = 5) -> Tensor:
    """Push the singular values of every matrix in a (count, rows, columns) stack towards one.

    A quintic Newton-Schulz iteration: only products, no decomposition.  The values end between about 0.7
    and 1.2, which is close enough for an update direction.
    """
    tall = stack.shape[1] > stack.shape[2]
    x = stack.mT if tall else stack
    x = x / x.flatten(1).norm(dim=1).clamp_min(1e-7)[:, None, None]
    for _ in range(rounds):
        gram = x @ x.mT
        x = 3.4445 * x + (torch.baddbmm(gram, gram, gram, beta=-4.7750, alpha=2.0315)) @ x
    return x.mT if tall else x


class Muon(torch.optim.Optimizer):
    """Nesterov momentum, made orthogonal, scaled so that AdamW's learning rate and decay fit as they are."""

    def __init__(self, params: Iterable[Tensor], lr: float, weight_decay: float = 0.0, momentum: float = 0.95) -> None:
        super().__init__(params, {"lr": lr, "weight_decay": weight_decay, "momentum": momentum})

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # type: ignore[override]
        """One update of all matrices that have a gradient."""
        for group in self.param_groups:
            shapes: dict[tuple[int, ...], list[Tensor]] = defaultdict(list)
            for weight in group["params"]:
                if weight.grad is not None:
                    shapes[tuple(weight.shape)].append(weight)
            for shape, weights in shapes.items():
                directions = []
                for weight in weights:
                    state = self.state[weight]
                    if "average" not in state:
                        state["average"] = torch.zeros_like(weight)
                    state["average"].lerp_(weight.grad, 1 - group["momentum"])
                    directions.append(weight.grad.lerp(state["average"], group["momentum"]))
                scale = 0.2 * max(shape) ** 0.5
                for weight, update in zip(weights, orthogonal(torch.stack(directions)), strict=True):
                    weight.mul_(1 - group["lr"] * group["weight_decay"]).add_(update, alpha=-group["lr"] * scale)
