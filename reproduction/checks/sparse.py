"""90 % sparse FedAvg, IID, in plain PyTorch: Fisher scores choose a tenth of the last block; a check of Q3.

Run: `python reproduction/checks/sparse.py --data FOLDER --model FOLDER --rate 3.0 --seeds 3`. Compare with the cell
`IID/least sensitive, one calibration round` of q3:body (`--sparsity 0`: `dense`): a ridge head of all training images
stays fixed; 100 clients, 10 a round, J=8 steps of 32 images, momentum 0.9, cosine, 40 rounds. What enters the last
block is computed once. The scores are squared gradients of single images with their true labels at the start;
fedgraft's default draws labels, so masks differ a little, and what they cost should not.
"""

from __future__ import annotations

from argparse import Namespace

import numpy as np
import torch
from common import (
    Data,
    accuracy,
    applied,
    arguments,
    batches,
    class_tokens,
    cosine,
    evenly,
    held_out,
    last_block,
    read,
    report,
)
from torch import Tensor, nn
from torch.nn.functional import cross_entropy, one_hot


class LastBlock:
    """The last block of a ViT, of whose weights some may move, between kept tokens and a fixed head."""

    def __init__(self, net: nn.Module) -> None:
        self.net = net
        self.weights = {name: p.requires_grad_() for name, p in last_block(net).named_parameters()}
        self.masks = {name: torch.ones_like(p, dtype=torch.bool) for name, p in self.weights.items()}
        self.head: Tensor | None = None

    def features(self, tokens: Tensor) -> Tensor:
        """The class token after the last norm."""
        return class_tokens(self.net, tokens)

    def scores(self, tokens: Tensor) -> Tensor:
        """The classes' scores of a batch."""
        assert self.head is not None
        return self.features(tokens) @ self.head[:, :-1].T + self.head[:, -1]

    def keep(self, fisher: dict[str, Tensor], share: float, most: bool) -> None:
        """Let only this share of the block's weights move: those with the least (or most) sensitivity."""
        flat = torch.cat([fisher[n].flatten() for n in self.weights])
        chosen = torch.zeros_like(flat, dtype=torch.bool)
        chosen[torch.argsort(flat, descending=most)[: round(share * len(flat))]] = True
        for n, part in zip(self.weights, chosen.split([p.numel() for p in self.weights.values()]), strict=True):
            self.masks[n] = part.view_as(self.weights[n])

    @torch.no_grad()
    def load(self, state: dict[str, Tensor]) -> None:
        """Write these weights."""
        for n, p in self.weights.items():
            p.copy_(state[n])


def main() -> None:
    """Train with every seed, print accuracy by round, then the test of the best rounds."""
    a = arguments(
        __doc__,
        size=112,
        rounds=40,
        steps=8,
        batch=32,
        rate=1.0,
        clients=100,
        cohort=10,
        sparsity=0.9,
        samples=1024,
        most=0,
    )
    data = read(a)
    begin = {n: p.detach().clone() for n, p in last_block(data.net).named_parameters()}
    found = []
    for seed in range(1, a.seeds + 1):
        last = LastBlock(data.net)
        last.load(begin)
        found.append(_run(a, seed, data, last))
    report(found)


def _run(a: Namespace, seed: int, data: Data, last: LastBlock) -> float:
    """Make the head, choose the weights, train; the test accuracy of the best round."""
    x, y, rng = data.x, data.y, np.random.default_rng(seed)
    rows, held = held_out(y, 0.05, rng)
    last.head = _ridge(applied(last.features, x[rows]), y[rows], applied(last.features, x[held]), y[held])
    if a.sparsity:
        some = rng.permutation(rows)[: a.samples]
        last.keep(_fisher(last, x[some], y[some]), 1 - a.sparsity, bool(a.most))
    print(f"trained: {sum(int(m.sum()) for m in last.masks.values())} weights", flush=True)
    clients = evenly(rows, a.clients, rng)
    state = {n: p.detach().clone() for n, p in last.weights.items()}
    best = (accuracy(applied(last.scores, x[held]), y[held]), 0, state)
    print(f"seed {seed}, round 0: validation {best[0]:.2f} %", flush=True)
    for round in range(a.rounds):
        chosen, rate = rng.choice(a.clients, a.cohort, replace=False), cosine(a.rate, round, a.rounds)
        total, summed = sum(len(clients[k]) for k in chosen), {n: torch.zeros_like(p) for n, p in state.items()}
        for k in chosen:
            last.load(state)
            _train(last, x, y, list(batches(clients[k], a.batch, a.steps, rng)), rate)
            for n, p in last.weights.items():
                summed[n] += p.detach() * (len(clients[k]) / total)
        state = summed
        if (round + 1) % max(1, a.rounds // 10) == 0:
            last.load(state)
            now = accuracy(applied(last.scores, x[held]), y[held])
            best = max(best, (now, round + 1, state), key=lambda b: b[0])
            print(f"seed {seed}, round {round + 1}: validation {now:.2f} %", flush=True)
    last.load(best[2])
    return accuracy(applied(last.scores, data.x_test), data.y_test)


def _ridge(z: Tensor, y: Tensor, z_held: Tensor, y_held: Tensor) -> Tensor:
    """(classes, D+1): least squares to centred one-hot targets; penalty and scale by held-out accuracy and loss."""
    z, z_held = (torch.cat([part.double(), torch.ones(len(part), 1).double()], 1) for part in (z, z_held))
    classes = int(y.max()) + 1
    targets = one_hot(y, classes).double() - 1 / classes
    gram, cross, best = z.T @ z, z.T @ targets, (-1.0, torch.zeros(0))
    for power in (-4.0, -3.0, -2.0, -1.0):
        penalty = 10**power * gram.diagonal()[:-1].mean() * torch.eye(len(gram)).double()
        penalty[-1, -1] = 0
        head = torch.linalg.solve(gram + penalty, cross).T
        best = max(best, (accuracy(z_held @ head.T, y_held), head), key=lambda b: b[0])
    scales = [10 ** (k / 10) for k in range(26)]
    scale = min(scales, key=lambda s: float(cross_entropy(s * (z_held @ best[1].T), y_held)))
    return (scale * best[1]).float()


def _fisher(last: LastBlock, x: Tensor, y: Tensor) -> dict[str, Tensor]:
    """Squared gradients of single images, summed."""
    total = {n: torch.zeros_like(p) for n, p in last.weights.items()}
    for i in range(len(x)):
        loss = cross_entropy(last.scores(x[i : i + 1]), y[i : i + 1])
        for n, g in zip(last.weights, torch.autograd.grad(loss, list(last.weights.values())), strict=True):
            total[n] += g**2
    return total


def _train(last: LastBlock, x: Tensor, y: Tensor, rows: list[np.ndarray], rate: float) -> None:
    """One client: masked SGD with momentum from rest, in place."""
    velocity = {n: torch.zeros_like(p) for n, p in last.weights.items()}
    for batch in rows:
        loss = cross_entropy(last.scores(x[batch]), y[batch])
        gradients = torch.autograd.grad(loss, list(last.weights.values()))
        with torch.no_grad():
            for (n, p), g in zip(last.weights.items(), gradients, strict=True):
                velocity[n] = 0.9 * velocity[n] + g * last.masks[n]
                p.sub_(rate * velocity[n])


if __name__ == "__main__":
    main()
