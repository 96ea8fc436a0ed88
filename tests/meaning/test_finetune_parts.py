"""Fine-tuning before evaluation: `head` and `body` divide the network, the final norm belongs to the body."""

from __future__ import annotations

import pytest
import torch
from tests.support.toy import Toy
from torch import Tensor

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


@pytest.mark.parametrize(("epochs", "batch", "steps"), [(1, 20, 1), (3, 8, 9), (2, 50, 2)])
def test_it_takes_as_many_passes_as_requested(epochs: int, batch: int, steps: int) -> None:
    toy = Toy(zoo.fedavg())
    seen: list[int] = []
    read = toy.examples.batch

    def watched(rows: Tensor, generator: torch.Generator | None = None) -> Tensor:
        seen.append(len(rows))
        return read(rows, generator)

    toy.examples.batch = watched  # type: ignore[method-assign]
    settings = {"finetune_epochs": epochs, "finetune_batch": batch}
    request = Request("toy", 1, 0, "evaluate", toy.space.digest, toy.state.vector, {}, settings)
    evaluate_finetuned(request, toy.algorithm, toy.context, torch.arange(10))
    assert len(seen) == steps and sum(seen) == 20 * epochs
