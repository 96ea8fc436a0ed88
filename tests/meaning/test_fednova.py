"""FedNova: the server's learning rate scales its step."""

from __future__ import annotations

import torch
from tests.support.toy import Toy

from fedgraft import algorithms as zoo


def test_half_the_server_rate_is_half_the_step() -> None:
    steps = []
    for rate in (1.0, 0.5, 0.25):
        toy = Toy(zoo.fednova(server_lr=rate))
        start = toy.state.vector.clone()
        steps.append(toy.run(1).vector - start)
    assert float(steps[0].norm()) > 0
    torch.testing.assert_close(steps[1], steps[0] / 2, rtol=1e-4, atol=1e-6)
    torch.testing.assert_close(steps[2], steps[0] / 4, rtol=1e-4, atol=1e-6)
