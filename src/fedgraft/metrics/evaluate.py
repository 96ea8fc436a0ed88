"""Measuring a network: loss, accuracies, the sums that metrics are made of. Draws nothing, changes nothing."""

from __future__ import annotations

from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn.functional import cross_entropy

from fedgraft.core.progress import phase
from fedgraft.core.protocols import Examples, Network
from fedgraft.local.transfer import onto
from fedgraft.metrics.scores import ahead, count, merge


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
    """Loss and accuracies on these rows in evaluation mode, with the evaluation transform.

    Batches may be worked on by several threads; their sums are added in the order of the rows, so the bits are the
    same. Examples must then have everything ready that they compute only once.
    """
    return counted(network, examples, rows, batch_size, threads, False)[0]


def counted(
    network: Network, examples: Examples, rows: Tensor, batch_size: int = 512, threads: int = 1, scores: bool = True
) -> tuple[Evaluation, dict[str, Tensor]]:
    """The same, and the sums of `local.scores` unless they are not wanted."""
    network.eval()
    parts = rows.split(batch_size)
    with phase("evaluation", len(rows), "images") as told:

        def measure(picked: Tensor) -> tuple[tuple[float, int, int], dict[str, Tensor]]:
            found = _measure(network, examples, picked, scores)
            told.advance(len(picked))
            return found

        if min(threads, len(parts)) > 1:
            with ThreadPoolExecutor(threads) as team:
                found = list(team.map(measure, parts))
        else:
            found = [measure(picked) for picked in parts]
    n = max(1, len(rows))
    loss, right, near = (sum(numbers) / n for numbers in zip(*(numbers for numbers, _ in found), strict=True))
    sums = merge([part for _, part in found], network.classes) if scores else {}
    return Evaluation(loss, right, near, len(rows)), sums


def evaluation_of(sums: Mapping[str, Tensor]) -> Evaluation:
    """Loss and accuracies from the sums alone; without images they are zero."""
    images = int(sums["confusion"].sum())
    n, right = max(1, images), float(sums["confusion"].diagonal().sum())
    return Evaluation(float(sums["loss"][0]) / n, right / n, float(sums["top5"][0]) / n, images)


@torch.inference_mode()
def _measure(
    network: Network, examples: Examples, picked: Tensor, scores: bool
) -> tuple[tuple[float, int, int], dict[str, Tensor]]:
    """The sum of the losses of these rows, how many are right at the first and within five guesses; the sums."""
    labels = examples.labels[picked]
    inputs = onto(examples.batch(picked), next(network.parameters()).device)
    logits = network(inputs, examples.entry).float().cpu()
    place = ahead(logits, labels)
    right = int((place == 0).sum())
    near = int((place < 5).sum())
    numbers = float(cross_entropy(logits, labels, reduction="sum")), right, near
    return numbers, count(logits, labels, network.classes) if scores else {}
