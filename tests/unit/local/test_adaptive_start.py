"""FedALA's start, against the paper's update written as a loop over whole networks."""

from __future__ import annotations

import torch
from tests.support.toy import Toy, ToyNetwork
from torch.nn.functional import cross_entropy

from fedgraft import algorithms as zoo
from fedgraft.core.space import select
from fedgraft.local.adaptive_start import AdaptiveStart
from fedgraft.local.train import LocalTraining


def test_the_weights_are_the_papers() -> None:
    """W <- clip(W - rate * grad * (common - last)), start = last + (common - last) * W, W first all ones."""
    toy = Toy(zoo.fedavg())
    network, rows = toy.network, toy.context.rows(0)
    space = select(network, lambda name: True)
    common = space.gather(network)
    last = common + 0.2 * torch.randn(common.shape, generator=torch.Generator().manual_seed(1))
    bound = space.bind(network)
    rule = AdaptiveStart(rate=1.5, share=1.0, first_passes=2)
    everywhere = torch.ones(len(common), dtype=torch.bool)
    stream = torch.Generator().manual_seed(0)
    keep = rule.learn(network, bound, everywhere, toy.examples, rows, {"previous_model": last}, stream)
    assert torch.equal(bound.values, common)
    weights, other = torch.ones_like(common), ToyNetwork()
    for _ in range(2):
        space.scatter(last + (common - last) * weights, other)
        cross_entropy(other(toy.examples.inputs[rows]), toy.examples.labels[rows]).backward()
        gradient = torch.cat([p.grad.view(-1) for p in other.parameters()])  # type: ignore[union-attr]
        other.zero_grad()
        weights = (weights - 1.5 * gradient * (common - last)).clamp(0, 1)
    torch.testing.assert_close(1 - keep, weights, rtol=1e-4, atol=1e-6)
    assert 0 < float((keep > 0).float().mean()) < 1
    start = rule.blend(common, {"previous_model": last, "keep": keep})
    torch.testing.assert_close(start, last + (common - last) * weights, rtol=1e-5, atol=1e-6)


def test_only_the_last_blocks_are_blended_and_evaluation_uses_the_blend() -> None:
    toy = Toy(zoo.fedala(local=LocalTraining(steps=2, batch_size=6)), per_round=5)
    toy.run(1)
    assert "keep" not in toy.engine.memory[0] and "previous_model" in toy.engine.memory[0]
    toy.run(2)
    memory, at = toy.engine.memory[0], toy.space.slices()
    for name, where in at.items():
        late = toy.network.block_of(name) >= 1
        assert late or not bool(memory["keep"][where].any()), name
    assert bool(memory["keep"].any())
    own = toy.algorithm.client_state.own_model(toy.state.vector, memory)
    assert not torch.equal(own, toy.state.vector)
