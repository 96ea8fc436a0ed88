"""FedSHIBU's self-weight: of the documented grid, the weight with the least loss on images set aside."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch
from tests.support.toy import ToyExamples, ToyNetwork
from torch import Tensor

from fedgraft.local import self_weight


@pytest.mark.parametrize("best", [0.0, 0.1, 0.25, 0.5, 0.75, 0.9, 1.0])
def test_every_weight_of_the_grid_can_be_learned(best: float, monkeypatch: pytest.MonkeyPatch) -> None:
    loaded: list[Tensor] = []

    def loss_of_loaded(*_: object) -> SimpleNamespace:
        return SimpleNamespace(loss=abs(float(loaded[-1][0]) - best))

    monkeypatch.setattr(self_weight, "evaluate", loss_of_loaded)
    own = torch.ones(4)
    weight = self_weight.learn_self_weight(
        ToyNetwork(), loaded.append, own, torch.zeros(4), ToyExamples(6), torch.arange(6)
    )
    assert weight == best
    assert torch.equal(loaded[-1], own)  # the client goes on with its own model
