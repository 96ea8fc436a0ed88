"""`sampling='federation'` draws a class as rarely as the whole federation has it often."""

from __future__ import annotations

import torch
from tests.support.toy import ToyExamples, ToyNetwork
from torch import Tensor

from fedgraft.core.space import select
from fedgraft.local.train import LocalTraining, train


def share_drawn(sampling: str) -> float:
    """The share of the images drawn that are of class 1, for a client with as many of class 0 as of class 1."""
    network, examples = ToyNetwork(), ToyExamples(120)
    rows = torch.arange(120)[examples.labels < 2]
    assert int((examples.labels[rows] == 0).sum()) == int((examples.labels[rows] == 1).sum())
    drawn: list[int] = []
    read = examples.batch

    def batch(picked: Tensor, generator: torch.Generator | None = None) -> Tensor:
        drawn.extend(examples.labels[picked].tolist())
        return read(picked, generator)

    examples.batch = batch  # type: ignore[method-assign]
    streams = [torch.Generator().manual_seed(seed) for seed in (0, 1)]
    bound = select(network, lambda name: True).bind(network)
    rule = LocalTraining(40, batch_size=50, sampling=sampling)
    counts = torch.tensor([900.0, 100.0, 500.0])
    train(network, bound, examples, rows, rule, lambda step: 1e-3, *streams, counts=counts)
    return sum(label == 1 for label in drawn) / len(drawn)


def test_rare_classes_of_the_federation_are_drawn_more_often() -> None:
    assert abs(share_drawn("federation") - 0.9) < 0.03  # 900 to 100 images in the federation, so 1 to 9 draws
    assert abs(share_drawn("balanced") - 0.5) < 0.05
