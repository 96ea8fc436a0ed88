"""FedLC keeps the label smoothing that was asked for."""

from __future__ import annotations

import torch
from tests.support.toy import ToyExamples, ToyNetwork

from fedgraft import algorithms as zoo
from fedgraft.local.losses import LossContext, cross_entropy, margins


def test_label_smoothing_reaches_the_calibrated_loss() -> None:
    network, examples = ToyNetwork(), ToyExamples(30)
    rows = torch.tensor([0, 3, 6, 9, 1, 2, 4])
    labels = examples.labels[rows]
    algorithm = zoo.fedlc(tau=0.7, loss=cross_entropy(0.3))
    value = algorithm.loss.begin(LossContext(network, labels, 3))
    found = float(value(network, examples.inputs[rows], labels, 0).detach())
    counts = torch.bincount(labels, minlength=3).float()
    log_p = (network(examples.inputs[rows]) - margins(counts, 0.7)).log_softmax(1).detach()
    total = 0.0
    for row, label in zip(log_p, labels, strict=True):
        total -= 0.7 * float(row[label]) + 0.3 * float(row.mean())
    assert abs(found - total / len(rows)) < 1e-5
