"""A client's clipping bounds what it steps by: the gradient with its correction, not the gradient alone."""

from __future__ import annotations

import pytest
import torch
from tests.support.toy import ToyExamples, ToyNetwork
from torch import Tensor

from fedgraft.core.space import select
from fedgraft.local.corrections import Closing, Correction
from fedgraft.local.optimizers import sgdm
from fedgraft.local.train import LocalTraining, train


def strong_shift() -> Correction:
    """Add a long vector to every gradient, as a control variate may."""

    def adjust(gradient: Tensor, values: Tensor, context: object) -> None:
        gradient.add_(7.0)

    return Correction("shift", lambda s, a, m: {}, adjust, lambda v, c, r: Closing())


def test_no_step_is_longer_than_the_clip_times_the_rate() -> None:
    network, examples = ToyNetwork(), ToyExamples(30)
    bound = select(network, lambda name: True).bind(network)
    start = bound.values.clone()
    rule = LocalTraining(1, batch_size=30, clip=0.25, correction=strong_shift(), optimizer=sgdm(0.0))
    streams = [torch.Generator().manual_seed(seed) for seed in (0, 1)]
    train(network, bound, examples, torch.arange(30), rule, lambda step: 0.1, *streams)
    assert float((bound.values - start).norm()) == pytest.approx(0.025, rel=1e-3)
