"""Fine-tuning before evaluation: `head` and `body` divide the network, the final norm belongs to the body."""

from __future__ import annotations

import pytest
import torch
from tests.support.toy import Toy

from fedgraft import algorithms as zoo
from fedgraft.client.context import ClientContext
from fedgraft.client.train import evaluate_finetuned
from fedgraft.core.messages import Request
from fedgraft.core.space import Bound, EditSpace


@pytest.mark.parametrize("part", ["head", "body", "both"])
def test_each_part_trains_its_tensors(part: str, monkeypatch: pytest.MonkeyPatch) -> None:
    toy = Toy(zoo.fedavg())
    trained: set[str] = set()
    bind = ClientContext.bind

    def watched(context: ClientContext, space: EditSpace) -> Bound:
        trained.update(piece.name for piece in space.parts)
        return bind(context, space)

    monkeypatch.setattr(ClientContext, "bind", watched)
    settings = {"finetune_part": part, "finetune_epochs": 1}
    request = Request("toy", 1, 0, "evaluate", toy.space.digest, toy.state.vector, {}, settings)
    evaluate_finetuned(request, toy.algorithm, toy.context, torch.arange(10))
    every = {name for name, _ in toy.network.named_parameters()}
    head = {"head.weight", "head.bias"}
    assert trained == {"head": head, "body": every - head, "both": every}[part]
