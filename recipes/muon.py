"""AdamW, and Muon for the matrices of the blocks: https://kellerjordan.github.io/posts/muon.

Muon replaces a matrix's averaged gradient by the nearest matrix with equal singular values, found by a few
Newton-Schulz steps.  Its authors report fewer steps than AdamW needs; the two were not compared for nano.
Updates are scaled to the usual size of AdamW's (Liu et al. 2025, arXiv:2502.16982), so both share one rate.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn


def orthogonal(gradients: Tensor, steps: int = 5) -> Tensor:
    """Bring the singular values of every matrix of a stack (N, rows, columns) near one."""
    x = gradients.mT if gradients.shape[1] > gradients.shape[2] else gradients
    x = x / x.norm(dim=(1, 2), keepdim=True).clamp_min(1e-7)
    for _ in range(steps):
        square = x @ x.mT
        x = 3.4445 * x + (-4.7750 * square + 2.0315 * square @ square) @ x
    return x.mT if gradients.shape[1] > gradients.shape[2] else x


class Muon(torch.optim.Optimizer):
    """Muon with Nesterov momentum and decoupled decay; equal shapes are worked on as one stack."""

    def __init__(self, weights: list[nn.Parameter], lr: float, decay: float, momentum: float = 0.95) -> None:
        shapes = sorted({tuple(w.shape) for w in weights})
        groups = [{"params": [w for w in weights if tuple(w.shape) == shape]} for shape in shapes]
        super().__init__(groups, {"lr": lr, "weight_decay": decay, "momentum": momentum})

    @torch.no_grad()
    def step(self, closure: None = None) -> None:
        """Take one step with the gradients that are there."""
        for group in self.param_groups:
            weights, momentum = group["params"], group["momentum"]
            for w in weights:
                self.state[w].setdefault("average", torch.zeros_like(w)).lerp_(w.grad, 1 - momentum)
            ahead = torch.stack([w.grad.lerp(self.state[w]["average"], momentum) for w in weights])
            scale = 0.2 * max(weights[0].shape) ** 0.5
            for w, change in zip(weights, orthogonal(ahead), strict=True):
                w.mul_(1 - group["lr"] * group["weight_decay"]).sub_(change, alpha=group["lr"] * scale)


def optimisers(network: nn.Module, lr: float, decay: float, muon: bool = True) -> list[torch.optim.Optimizer]:
    """Muon for the blocks' matrices, AdamW for the rest; vectors, the class token and positions do not decay."""
    named = list(network.named_parameters())
    blocks = [w for n, w in named if muon and w.ndim == 2 and ".layers." in n]
    plain = [w for n, w in named if w.ndim < 2 or n.endswith(("_token", "position_embeddings"))]
    taken = {id(w) for w in blocks + plain}
    rest = [w for _, w in named if id(w) not in taken]
    groups = [{"params": rest, "weight_decay": decay}, {"params": plain, "weight_decay": 0.0}]
    adam = torch.optim.AdamW(groups, lr=lr, betas=(0.9, 0.98), fused=True)
    return [Muon(blocks, lr, decay), adam] if blocks else [adam]
