"""90 % sparse FedAvg, IID, in plain PyTorch: Fisher scores choose a tenth of the last four blocks; a check of Q3.

Run: `python reproduction/checks/sparse.py --data FOLDER --model FOLDER --rate 1.0`. Compare with the cell
`IID/least sensitive` of q3:body: the head is fitted first (logistic) and stays fixed unless `--head 1`; 100 clients, 10
a round, J=8 steps of 32 images, momentum 0.9, cosine, 16 rounds. The scores are squared gradients of single images with
their true labels at the start, in one go: fedgraft's default draws labels and calibrates in rounds, so masks differ a
little; what they cost should not.
"""

from __future__ import annotations

import numpy as np
import torch
from common import accuracy, arguments, batches, class_token, cosine, evenly, features, held_out, images, pixels, vit
from torch import Tensor, nn
from torch.nn.functional import cross_entropy


class Trained:
    """The weights that may change, as views by name, with a mask each; everything else stays as it was."""

    def __init__(self, net: nn.Module, head: nn.Linear, with_head: bool) -> None:
        self.net, self.head = net, head
        blocks = [f"layers.{i}." for i in range(8, 12)] + [f"layer.{i}." for i in range(8, 12)]
        self.body = {n: p for n, p in net.named_parameters() if any(block in n for block in blocks)}
        self.dense = dict(head.named_parameters()) if with_head else {}
        for p in (*net.parameters(), *head.parameters()):
            p.requires_grad_(False)
        for p in (*self.body.values(), *self.dense.values()):
            p.requires_grad_(True)
        self.masks = {n: torch.ones_like(p, dtype=torch.bool) for n, p in (self.body | self.dense).items()}

    @property
    def all(self) -> dict[str, nn.Parameter]:
        """Every weight that may change, by name."""
        return self.body | self.dense

    def scores(self, batch: Tensor) -> Tensor:
        """The classes' scores of a batch."""
        return self.head(class_token(self.net, batch))

    def keep(self, fisher: dict[str, Tensor], share: float, most: bool) -> None:
        """Let only this share of the blocks' weights move: those with the least (or most) sensitivity."""
        flat = torch.cat([fisher[n].flatten() for n in self.body])
        order = torch.argsort(flat, descending=most)
        chosen = torch.zeros_like(flat, dtype=torch.bool)
        chosen[order[: round(share * len(flat))]] = True
        for n, part in zip(self.body, chosen.split([p.numel() for p in self.body.values()]), strict=True):
            self.masks[n] = part.view_as(self.body[n])


def main() -> None:
    """Fit the head, choose the weights, train, and print accuracy by round."""
    a = arguments(__doc__, size=80, rounds=16, steps=8, batch=32, rate=1.0, clients=100, cohort=10, sparsity=0.9,
                  samples=1024, most=0, head=0)  # fmt: skip
    rng, net = np.random.default_rng(a.seed), vit(a.model)
    (train, y), (test, y_test) = (images(a.data / f"cifar100-{part}.parquet", a.limit) for part in ("train", "test"))
    rows, held = held_out(y, 0.05, rng)
    space = Trained(net, _fitted(features(net, [train[i] for i in rows], a.size), y[rows]), bool(a.head))
    if a.sparsity:
        some = rng.permutation(rows)[: a.samples]
        space.keep(_fisher(space, [train[i] for i in some], y[some], a.size), 1 - a.sparsity, bool(a.most))
    print(f"trained: {sum(int(m.sum()) for m in space.masks.values())} weights", flush=True)
    clients = evenly(rows, a.clients, rng)
    state = {n: p.detach().clone() for n, p in space.all.items()}
    best = (_measure(space, state, [train[i] for i in held], y[held], a.size), 0, state)
    print(f"round 0: validation {best[0]:.2f} %", flush=True)
    for round in range(a.rounds):
        chosen, rate = rng.choice(a.clients, a.cohort, replace=False), cosine(a.rate, round, a.rounds)
        total, summed = sum(len(clients[k]) for k in chosen), {n: torch.zeros_like(p) for n, p in state.items()}
        for k in chosen:
            _load(space, state)
            for n, p in _train(space, train, y, list(batches(clients[k], a.batch, a.steps, rng)), rate, a.size).items():
                summed[n] += p * (len(clients[k]) / total)
        state = summed
        if (round + 1) % max(1, a.rounds // 8) == 0:
            now = _measure(space, state, [train[i] for i in held], y[held], a.size)
            best = max(best, (now, round + 1, state), key=lambda b: b[0])
            print(f"round {round + 1}: validation {now:.2f} %", flush=True)
    tested = _measure(space, best[2], test, y_test, a.size)
    print(f"best round {best[1]}: validation {best[0]:.2f} %, test {tested:.2f} %")


def _fitted(x: Tensor, y: Tensor) -> nn.Linear:
    """A logistic head by 50 steps of L-BFGS on all rows."""
    head = nn.Linear(x.shape[1], int(y.max()) + 1)
    nn.init.zeros_(head.weight)
    nn.init.zeros_(head.bias)
    optimizer = torch.optim.LBFGS(head.parameters(), max_iter=50, line_search_fn="strong_wolfe")

    def closure() -> Tensor:
        optimizer.zero_grad()
        loss = cross_entropy(head(x), y)
        loss.backward()
        return loss

    optimizer.step(closure)
    return head


def _fisher(space: Trained, encoded: list[bytes], y: Tensor, size: int) -> dict[str, Tensor]:
    """Squared gradients of single images, summed."""
    total = {n: torch.zeros_like(p) for n, p in space.body.items()}
    for i, one in enumerate(encoded):
        loss = cross_entropy(space.scores(pixels([one], size)), y[i : i + 1])
        for n, g in zip(space.body, torch.autograd.grad(loss, list(space.body.values())), strict=True):
            total[n] += g**2
    return total


def _train(
    space: Trained, train: list[bytes], y: Tensor, rows: list[np.ndarray], rate: float, size: int
) -> dict[str, Tensor]:
    """One client: masked SGD with momentum from rest, in place; what it ends at."""
    velocity = {n: torch.zeros_like(p) for n, p in space.all.items()}
    for batch in rows:
        loss = cross_entropy(space.scores(pixels([train[i] for i in batch], size)), y[batch])
        gradients = torch.autograd.grad(loss, list(space.all.values()))
        with torch.no_grad():
            for (n, p), g in zip(space.all.items(), gradients, strict=True):
                velocity[n] = 0.9 * velocity[n] + g * space.masks[n]
                p.sub_(rate * velocity[n])
    return {n: p.detach().clone() for n, p in space.all.items()}


@torch.no_grad()
def _load(space: Trained, state: dict[str, Tensor]) -> None:
    for n, p in space.all.items():
        p.copy_(state[n])


@torch.no_grad()
def _measure(space: Trained, state: dict[str, Tensor], encoded: list[bytes], y: Tensor, size: int) -> float:
    _load(space, state)
    scores = [space.scores(pixels(encoded[i : i + 64], size)) for i in range(0, len(encoded), 64)]
    return accuracy(torch.cat(scores), y)


if __name__ == "__main__":
    main()
