"""IFCA: a client trains the common model that fits its own images best."""

from __future__ import annotations

import torch
from tests.support.toy import Toy, client_rows
from torch.nn.functional import cross_entropy

from fedgraft import algorithms as zoo
from fedgraft.aggregate.server_rules import plain_rule
from fedgraft.client.train import choose_cluster_model
from fedgraft.core.messages import Request


def test_each_client_takes_the_model_with_the_least_loss_on_its_images() -> None:
    toy = Toy(zoo.ifca(clusters=3), per_round=5)
    state = toy.run(1)
    generator = torch.Generator().manual_seed(0)
    offsets = 0.5 * torch.randn(3, len(state.vector), generator=generator)
    for client in range(5):
        rows = client_rows(client)
        losses = []
        for offset in offsets:
            toy.space.scatter(state.vector + offset, toy.network)
            toy.network.eval()
            with torch.no_grad():
                logits = toy.network(toy.examples.inputs[rows])
            losses.append(float(cross_entropy(logits, toy.examples.labels[rows])))
        request = Request(
            "toy", 1, client, "train", toy.space.digest, state.vector, {"clusters": offsets}, {"lr": 0.05}
        )
        taken, told = choose_cluster_model(request, toy.algorithm, toy.context)
        best = losses.index(min(losses))
        assert told == {"cluster": float(best)} and max(losses) > min(losses)
        assert taken.vector is not None and torch.equal(taken.vector, state.vector + offsets[best])


def test_the_server_rate_scales_the_step_of_each_cluster() -> None:
    """From the same start and the same choices, half the rate is half the way of every cluster's model."""
    ways = []
    for rate in (1.0, 0.5):
        toy = Toy(zoo.ifca(clusters=2, server=plain_rule(rate)), per_round=5)
        start = toy.state.vector.clone()
        state = toy.run(1)
        ways.append(state.vector + state.rule["clusters"] - start)
    assert float(ways[0].norm()) > 0
    torch.testing.assert_close(ways[1], ways[0] / 2, rtol=1e-4, atol=1e-6)
