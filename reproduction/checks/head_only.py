"""Head-only FedAvg on CIFAR-100 with N_c classes per client, in plain PyTorch: a check of Q1 from outside.

Run: `python reproduction/checks/head_only.py --data FOLDER --model FOLDER`. Compare with the cell `J=8/N_c=10` of
q1:head: 100 clients, 10 a round, J=8 steps of 32 images, momentum 0.9, the rate divided by the momentum's gain, cosine,
200 rounds.
"""

from __future__ import annotations

import numpy as np
import torch
from common import accuracy, arguments, batches, by_classes, cosine, features, gain, held_out, images, vit
from torch.nn.functional import cross_entropy


def main() -> None:
    """Train and print accuracy by round, then the test of the best round."""
    a = arguments(__doc__, size=112, classes=10, rounds=200, steps=8, batch=32, rate=1.0, clients=100, cohort=10)
    rng, net = np.random.default_rng(a.seed), vit(a.model)
    (train, y), (test, y_test) = (images(a.data / f"cifar100-{part}.parquet", a.limit) for part in ("train", "test"))
    x, x_test = features(net, train, a.size), features(net, test, a.size)
    rows, held = held_out(y, 0.1, rng)
    clients = by_classes(y, rows, a.clients, a.classes, rng)
    head = torch.zeros(int(y.max()) + 1, x.shape[1] + 1)  # weights, then biases; a linear head's start hardly matters
    best = (accuracy(_scores(head, x[held]), y[held]), 0, head)
    for round in range(a.rounds):
        rate = cosine(a.rate, round, a.rounds) / gain(a.steps, 0.9)
        chosen = rng.choice(a.clients, a.cohort, replace=False)
        trained = [_train(head, x, y, batches(clients[k], a.batch, a.steps, rng), rate) for k in chosen]
        sizes = torch.tensor([len(clients[k]) for k in chosen], dtype=torch.float32)
        head = torch.einsum("k,kcd->cd", sizes / sizes.sum(), torch.stack(trained))
        if (round + 1) % max(1, a.rounds // 20) == 0:
            now = accuracy(_scores(head, x[held]), y[held])
            best = max(best, (now, round + 1, head), key=lambda b: b[0])
            print(f"round {round + 1}: validation {now:.2f} %", flush=True)
    print(f"best round {best[1]}: validation {best[0]:.2f} %, test {accuracy(_scores(best[2], x_test), y_test):.2f} %")


def _scores(head: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
    return x @ head[:, :-1].T + head[:, -1]


def _train(head: torch.Tensor, x: torch.Tensor, y: torch.Tensor, rows: object, rate: float) -> torch.Tensor:
    """One client: SGD with momentum from rest."""
    head, velocity = head.clone().requires_grad_(), torch.zeros_like(head)
    for batch in rows:  # type: ignore[attr-defined]
        loss = cross_entropy(_scores(head, x[batch]), y[batch])
        (gradient,) = torch.autograd.grad(loss, head)
        velocity = 0.9 * velocity + gradient
        head = (head - rate * velocity).detach().requires_grad_()
    return head.detach()


if __name__ == "__main__":
    main()
