"""Mixed precision: after an overflow the loss is scaled less, so that training goes on."""

from __future__ import annotations

import torch
from tests.support.toy import ToyExamples, ToyNetwork
from torch import Tensor

from fedgraft.core.protocols import Network
from fedgraft.core.space import select
from fedgraft.local.losses import Loss, LossContext, Value, cross_entropy
from fedgraft.local.optimizers import sgdm
from fedgraft.local.train import LocalTraining, train


def steep(factor: float) -> Loss:
    """A cross-entropy so steep that its gradient overflows half precision at the first scale."""

    def begin(context: LossContext) -> Value:
        plain = cross_entropy().begin(context)

        def value(network: Network, inputs: Tensor, labels: Tensor, entry: int) -> Tensor:
            return factor * plain(network, inputs, labels, entry)

        return value

    return Loss("steep", begin)


def moved(steps: int) -> float:
    network, examples = ToyNetwork(), ToyExamples(30)
    bound = select(network, lambda name: True).bind(network)
    start = bound.values.clone()
    rule = LocalTraining(steps, batch_size=30, optimizer=sgdm(0.0), amp="float16")
    streams = [torch.Generator().manual_seed(seed) for seed in (0, 1)]
    train(network, bound, examples, torch.arange(30), rule, lambda step: 1e-5, *streams, steep(500.0))
    assert bool(bound.values.isfinite().all())
    return float((bound.values - start).norm())


def test_training_goes_on_after_overflows() -> None:
    assert moved(1) == 0.0  # the first step overflows and moves nothing
    assert moved(20) > 0.0
