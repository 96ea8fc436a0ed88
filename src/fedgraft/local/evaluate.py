"""Measuring a network: loss, top-1 and top-5 accuracy. Draws nothing at random, changes nothing."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn.functional import cross_entropy

from fedgraft.local.transfer import onto
from fedgraft.progress import phase
from fedgraft.protocols import Examples, Network


@dataclass(frozen=True)
class Evaluation:
    """Mean loss and accuracies (fractions) over `count` examples. Law: `a + b` is the evaluation of both sets."""

    loss: float
    accuracy: float
    top5: float
    count: int

    def __add__(self, other: Evaluation) -> Evaluation:
        n = self.count + other.count
        a, b = self.count / max(1, n), other.count / max(1, n)
        return Evaluation(
            a * self.loss + b * other.loss,
            a * self.accuracy + b * other.accuracy,
            a * self.top5 + b * other.top5,
            n,
        )


def evaluate(network: Network, examples: Examples, rows: Tensor, batch_size: int = 512, threads: int = 1) -> Evaluation:
    """Evaluate on these rows in evaluation mode, with the evaluation transform.

    Batches may be worked on by several threads; their sums are added in the order of the rows, so the bits are the
    same. Examples must then have everything ready that they compute only once.
    """
    network.eval()
    parts = rows.split(batch_size)
    with phase("evaluation", len(rows), "images") as told:

        def measure(picked: Tensor) -> tuple[float, int, int]:
            found = _measure(network, examples, picked)
            told.advance(len(picked))
            return found

        if min(threads, len(parts)) > 1:
            with ThreadPoolExecutor(threads) as team:
                found = list(team.map(measure, parts))
        else:
            found = [measure(picked) for picked in parts]
    n = max(1, len(rows))
    loss, right, near = (sum(numbers) / n for numbers in zip(*found, strict=True))
    return Evaluation(loss, right, near, len(rows))


@torch.inference_mode()
def _measure(network: Network, examples: Examples, picked: Tensor) -> tuple[float, int, int]:
    """The sum of the losses of these rows, and how many are right at the first and within five guesses."""
    labels = examples.labels[picked]
    inputs = onto(examples.batch(picked), next(network.parameters()).device)
    logits = network(inputs, examples.entry).float().cpu()
    best = logits.topk(min(5, logits.shape[1]), dim=1).indices
    right, near = best[:, 0] == labels, (best == labels[:, None]).any(dim=1)
    return float(cross_entropy(logits, labels, reduction="sum")), int(right.sum()), int(near.sum())
