"""Measuring a network: loss, top-1 and top-5 accuracy. Draws nothing at random, changes nothing."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn.functional import cross_entropy

from fedgraft.contracts import Examples, Network


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


@torch.inference_mode()
def evaluate(network: Network, examples: Examples, rows: Tensor, batch_size: int = 512) -> Evaluation:
    """Evaluate on these rows in evaluation mode, with the evaluation transform."""
    network.eval()
    device = next(network.parameters()).device
    loss, right, near = 0.0, 0, 0
    for picked in rows.split(batch_size):
        labels = examples.labels[picked]
        logits = network(examples.batch(picked).to(device), examples.entry).float().cpu()
        loss += float(cross_entropy(logits, labels, reduction="sum"))
        best = logits.topk(min(5, logits.shape[1]), dim=1).indices
        right += int((best[:, 0] == labels).sum())
        near += int((best == labels[:, None]).any(dim=1).sum())
    n = max(1, len(rows))
    return Evaluation(loss / n, right / n, near / n, len(rows))
