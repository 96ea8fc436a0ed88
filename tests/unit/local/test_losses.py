"""FedLC and MOON against their formulas written down again, and the slot they need."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import pytest
import torch
from tests.support.errors import raises
from tests.support.toy import Toy, ToyExamples, ToyNetwork, batch_norm_network

from fedgraft import algorithms as zoo
from fedgraft.core.space import select
from fedgraft.local.losses import LossContext, calibrated, contrastive, cross_entropy, margins
from fedgraft.local.optimizers import sgdm
from fedgraft.local.train import LocalTraining, train


def stream(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def test_margins_by_hand() -> None:
    """Counts 16 and 1: 16^(-1/4) = 1/2 and 1, so with tau 2 the margins are 1 and 2, and less the least 0 and 1."""
    assert margins(torch.tensor([16.0, 1.0]), 2.0).tolist() == [0.0, 1.0]
    assert margins(torch.tensor([7.0, 7.0, 7.0]), 3.0).tolist() == [0.0] * 3
    assert margins(torch.tensor([1.0, 0.0]), 1.0)[1] == pytest.approx(99.0)  # (1e-8)^(-1/4) = 100


def test_fedlc_is_the_papers_loss() -> None:
    """-log(exp(f_y - tau n_y^(-1/4)) / sum_c exp(f_c - tau n_c^(-1/4))), by a loop."""
    network, examples = ToyNetwork(), ToyExamples(30)
    rows = torch.tensor([0, 1, 2, 3, 6, 9, 12, 4])
    labels = examples.labels[rows]
    counts = [int((labels == c).sum()) for c in range(3)]
    value = calibrated(0.7).begin(LossContext(network, labels, 3))
    found = value(network, examples.inputs[rows], labels, 0)
    total = 0.0
    for logits, label in zip(network(examples.inputs[rows]).tolist(), labels.tolist(), strict=True):
        moved = [f - 0.7 * n**-0.25 for f, n in zip(logits, counts, strict=True)]
        total -= math.log(math.exp(moved[label]) / sum(map(math.exp, moved)))
    assert float(found.detach()) == pytest.approx(total / len(rows), rel=1e-5)


@pytest.mark.parametrize("make", [ToyNetwork, batch_norm_network])
def test_moon_is_the_papers_loss_and_leaves_the_model_alone(make: type[ToyNetwork]) -> None:
    """The contrast by hand with three separate networks; looking through the others changes no bit of the model."""
    network, examples, rows = make(), ToyExamples(30), torch.arange(12)
    space = select(network, lambda name: True)
    common = space.gather(network)
    before = common + 0.1 * torch.randn(common.shape, generator=stream(3))
    begin = space.slices()
    for part in space.buffers:  # variances stay variances
        before[begin[part.name]] = before[begin[part.name]].abs() + 0.5
    seen: list[torch.Tensor] = []
    loss = contrastive(2.0, 0.5)
    inner = loss.begin

    def spying(context: LossContext) -> Any:
        value = inner(context)

        def watched(net: Any, x: torch.Tensor, y: torch.Tensor, entry: int) -> torch.Tensor:
            state = {n: t.clone() for n, t in net.state_dict().items() if "num_batches" not in n}
            found: torch.Tensor = value(net, x, y, entry)
            if not seen:
                seen.append(found.detach())
                assert all(torch.equal(net.state_dict()[n], t) for n, t in state.items() if "running" not in n)
            return found

        return watched

    rule = LocalTraining(steps=1, batch_size=12, optimizer=sgdm(0.0))
    bound = space.bind(network)
    train(
        network,
        bound,
        examples,
        rows,
        rule,
        lambda s: 0.1,
        stream(),
        stream(),
        replace(loss, begin=spying),
        memory={"previous_model": before},
    )
    nets = [make(), make(), make()]
    for net, vector in zip(nets, (common, common, before), strict=True):
        space.scatter(vector, net)
        net.eval()
    nets[0].train()
    x, y = examples.inputs[rows], examples.labels[rows]
    z, towards, away = (net.features(x) for net in nets)
    cos = torch.nn.functional.cosine_similarity
    pair = torch.stack([cos(z, towards), cos(z, away)], 1) / 0.5
    wanted = torch.nn.functional.cross_entropy(nets[0].head(z), y)
    wanted = wanted + 2.0 * torch.nn.functional.cross_entropy(pair, torch.zeros(12, dtype=torch.int64))
    assert float(seen[0]) == pytest.approx(float(wanted.detach()), rel=1e-5)


def test_moon_matters_from_a_clients_second_round_on() -> None:
    local = LocalTraining(steps=2, batch_size=6)
    for rounds, equal in ((1, True), (2, False)):
        vectors = [Toy(zoo.named(name, local=local), per_round=5).run(rounds).vector for name in ("moon", "fedavg")]
        assert torch.equal(*vectors) == equal


def test_a_loss_beside_the_algorithms_own_is_refused() -> None:
    assert zoo.fedlc(loss=cross_entropy(0.1)).loss.name == "calibrated"
    with raises("E-ALGORITHM-LOSS"):
        zoo.fedlc(loss=contrastive())
    with raises("E-LOCAL-LOSS-MODELS"):
        LossContext(ToyNetwork(), torch.zeros(1), 3).look([], torch.zeros(1), 0)
