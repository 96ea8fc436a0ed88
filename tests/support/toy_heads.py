"""What a head of the toy is made from: pooled features of its clients, and a judge on other points."""

from __future__ import annotations

import torch
from tests.support.toy import Toy
from torch import Tensor

from fedgraft import algorithms as zoo
from fedgraft.runs.head_init import LocalScorer, features_of

CLIENTS = range(5)


def setting() -> tuple[Toy, Tensor, Tensor, LocalScorer]:
    """The toy, its clients' pooled features and labels, and a judge on other points."""
    toy = Toy(zoo.fedavg())
    rows = torch.cat([toy.context.rows(k) for k in CLIENTS])
    features = features_of(toy.network, toy.examples, rows)
    judge = LocalScorer(features_of(toy.network, toy.tests, torch.arange(60)), toy.tests.labels)
    return toy, features.double(), toy.examples.labels[rows], judge
