"""MOON: the anchor is the round's common model, and a client remembers the model it ended with."""

from __future__ import annotations

import copy

import torch
from tests.support.toy import Toy, ToyExamples, ToyNetwork
from torch.nn.functional import cosine_similarity, cross_entropy

from fedgraft import algorithms as zoo
from fedgraft.core.space import select
from fedgraft.local.losses import contrastive
from fedgraft.local.optimizers import sgdm
from fedgraft.local.train import LocalTraining, train


def stream() -> torch.Generator:
    return torch.Generator().manual_seed(0)


def test_a_client_remembers_the_model_that_it_trained() -> None:
    toy = Toy(zoo.moon(), per_round=5)
    trained: dict[int, torch.Tensor] = {}
    exchange = toy.engine.exchange

    def watched(requests: object) -> object:
        responses = list(exchange(requests))  # type: ignore[arg-type]
        for request, response in zip(requests, responses, strict=True):  # type: ignore[call-overload]
            trained[request.client] = request.vector + response.update.arrays["values"]
        return responses

    toy.engine.exchange = watched  # type: ignore[assignment, method-assign]
    toy.run(2)
    for client, model in trained.items():
        torch.testing.assert_close(toy.engine.memory[client]["previous_model"], model, rtol=0, atol=1e-6)


def test_several_steps_are_drawn_to_the_model_that_the_round_began_with() -> None:
    """Against the same steps by plain autograd, with the anchor and the previous model held fixed."""
    rows, lr, steps = torch.arange(24), 0.2, 4
    examples, network = ToyExamples(24), ToyNetwork()
    bound = select(network, lambda name: True).bind(network)
    previous = ToyNetwork(seed=5)
    memory = {"previous_model": select(previous, lambda name: True).gather(previous)}
    anchor, model = ToyNetwork(), ToyNetwork()
    rule = LocalTraining(steps, batch_size=24, optimizer=sgdm(0.0))
    loss = contrastive(weight=3.0, temperature=0.5)
    train(network, bound, examples, rows, rule, lambda step: lr, stream(), stream(), loss, memory=memory)

    for fixed in (anchor, previous):
        fixed.requires_grad_(False)
    begin = copy.deepcopy(model.state_dict())
    for _ in range(steps):
        z = model.features(examples.inputs)
        towards = torch.exp(cosine_similarity(z, anchor.features(examples.inputs)) / 0.5)
        away = torch.exp(cosine_similarity(z, previous.features(examples.inputs)) / 0.5)
        contrast = -torch.log(towards / (towards + away)).mean()
        total = cross_entropy(model.head(z), examples.labels) + 3.0 * contrast
        model.zero_grad()
        total.backward()
        with torch.no_grad():
            for parameter in model.parameters():
                parameter -= lr * parameter.grad
    assert any(not torch.equal(begin[name], tensor) for name, tensor in model.state_dict().items())
    expected = select(model, lambda name: True).gather(model)
    torch.testing.assert_close(bound.values, expected, rtol=1e-4, atol=1e-5)
