"""Ditto: without a pull the common model has no say in a client's own model, with one it has."""

from __future__ import annotations

import pytest
import torch
from tests.support.toy import Toy

from fedgraft import algorithms as zoo
from fedgraft.core.messages import Request


@pytest.mark.parametrize("pull", [0.0, 1.0])
def test_the_common_model_reaches_the_own_one_by_the_pull_alone(pull: float) -> None:
    own = []
    for shift in (0.0, 0.3):
        toy = Toy(zoo.ditto(pull))
        toy.engine.memory[0] = {"personal": toy.state.vector.clone()}
        request = Request("toy", 4, 0, "train", toy.space.digest, toy.state.vector + shift, {}, {"lr": 0.1})
        list(toy.engine.exchange([request]))
        own.append(toy.engine.memory[0]["personal"])
        assert not torch.equal(own[-1], toy.state.vector)
    assert torch.equal(*own) == (pull == 0.0)
