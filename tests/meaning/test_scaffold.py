"""SCAFFOLD: the control variate of a client that joins late starts at zero."""

from __future__ import annotations

import torch
from tests.support.toy import Toy, ToyNetwork, client_rows
from torch.nn.functional import cross_entropy

from fedgraft import algorithms as zoo
from fedgraft.core.messages import Request
from fedgraft.core.space import select
from fedgraft.local.optimizers import sgdm
from fedgraft.local.train import LocalTraining


def test_a_newcomer_adds_the_whole_common_control_to_its_gradient() -> None:
    local = LocalTraining(1, batch_size=20, optimizer=sgdm(0.0))
    toy = Toy(zoo.scaffold(local=local))
    start = toy.state.vector
    common = 0.01 * torch.randn(len(start), generator=torch.Generator().manual_seed(3))
    request = Request("toy", 4, 0, "train", toy.space.digest, start, {"control": common}, {"lr": 0.1})
    (response,) = toy.engine.exchange([request])
    assert not isinstance(response, tuple) and response.update is not None

    network = ToyNetwork()
    rows = client_rows(0)
    cross_entropy(network(toy.examples.inputs[rows]), toy.examples.labels[rows]).backward()
    space = select(network, lambda name: True)
    named = dict(network.named_parameters())
    gradient = torch.cat([named[part.name].grad.reshape(-1) for part in space.parts])
    torch.testing.assert_close(response.update.arrays["values"], -0.1 * (gradient + common), rtol=1e-4, atol=1e-6)
    # Option II of the paper from a control of zero: 0 - c + (x - y) / (steps lr), which is the gradient.
    torch.testing.assert_close(toy.engine.memory[0]["control"], gradient, rtol=1e-3, atol=1e-5)
