"""Head-only FedAvg on CIFAR-100 with N_c classes per client, in plain PyTorch: a check of Q1 from outside.

Run: `python reproduction/checks/head_only.py --data FOLDER --model FOLDER --seeds 5`. Compare with the cell
`J=8/N_c=10` of q1:head: 100 clients, 10 a round, J=8 steps of 32 images, momentum 0.9, the rate divided by the
momentum's gain, cosine, 200 rounds, from a drawn head (`--zeros 1`: from zeros).
"""

from __future__ import annotations

from argparse import Namespace

import numpy as np
import torch
from common import accuracy, applied, arguments, batches, by_classes, class_tokens, cosine, gain, held_out, read, report
from torch import Tensor
from torch.nn.functional import cross_entropy


def main() -> None:
    """Train with every seed, print accuracy by round, then the test of the best rounds."""
    a = arguments(
        __doc__, size=112, classes=10, rounds=200, steps=8, batch=32, rate=0.09, clients=100, cohort=10, zeros=0
    )
    data = read(a)
    x, x_test = (applied(lambda part: class_tokens(data.net, part), inputs) for inputs in (data.x, data.x_test))
    report([_run(a, seed, (x, data.y), (x_test, data.y_test)) for seed in range(1, a.seeds + 1)])


def _run(a: Namespace, seed: int, train: tuple[Tensor, Tensor], test: tuple[Tensor, Tensor]) -> float:
    (x, y), rng = train, np.random.default_rng(seed)
    rows, held = held_out(y, 0.1, rng)
    clients = by_classes(y, rows, a.clients, a.classes, rng)
    bound = 0.0 if a.zeros else x.shape[1] ** -0.5  # where the head starts is worth half a point
    drawn = rng.uniform(-bound, bound, (int(y.max()) + 1, x.shape[1] + 1))
    head = torch.from_numpy(drawn).float()  # weights, then biases
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
            print(f"seed {seed}, round {round + 1}: validation {now:.2f} %", flush=True)
    return accuracy(_scores(best[2], test[0]), test[1])


def _scores(head: Tensor, x: Tensor) -> Tensor:
    return x @ head[:, :-1].T + head[:, -1]


def _train(head: Tensor, x: Tensor, y: Tensor, rows: object, rate: float) -> Tensor:
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
