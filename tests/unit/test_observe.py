"""What clients report besides an update: sums that add up to the pooled ones, on the rows they should be about."""

from __future__ import annotations

from dataclasses import replace

import torch
from tests.support.toy import CLASSES, Toy, ToyExamples, snapshot
from torch import Tensor
from torch.nn.functional import cross_entropy

from fedgraft import algorithms as zoo
from fedgraft.aggregate.slots import Observe
from fedgraft.client.handle import handle
from fedgraft.client.observe import OBSERVATIONS
from fedgraft.core.messages import Request
from fedgraft.core.space import select
from fedgraft.edit.fisher import Scores
from fedgraft.local.features import feature_batches

CLIENTS = range(3)


def fisher_order(toy: Toy, client: int, vector: Tensor) -> Request:
    names = "\n".join(name for name, _ in toy.network.named_parameters())
    settings = {"estimator": "per_sample", "labels": "true", "draw": 1, "share": 1.0, "batch": 4, "names": names}
    return Request("toy", -1, client, "fisher_scores", "", vector, {}, settings)


def test_fisher_scores_of_clients_add_up_to_the_mean_over_all_samples() -> None:
    """Clients of 20, 18 and 16 samples: a sample counts the same wherever it lies. Against one autograd pass each."""
    toy = Toy(zoo.fedavg())
    whole = select(toy.network, lambda name: True, buffers=False).gather(toy.network)
    responses = [handle(fisher_order(toy, k, whole), toy.algorithm, toy.context, {})[0] for k in CLIENTS]
    shapes = {name: p.shape for name, p in toy.network.named_parameters()}
    found = Scores.from_vector(sum(r.sums["scores"] for r in responses), shapes).mean()  # type: ignore[arg-type]
    rows = torch.cat([toy.context.rows(k) for k in CLIENTS])
    wanted = {name: torch.zeros(shape) for name, shape in shapes.items()}
    for row in rows:
        toy.network.zero_grad()
        toy.network.requires_grad_(True)
        cross_entropy(toy.network(toy.examples.inputs[row][None]), toy.examples.labels[row][None]).backward()
        for name, p in toy.network.named_parameters():
            wanted[name] += p.grad.square() / len(rows)  # type: ignore[union-attr]
    for name, value in wanted.items():
        torch.testing.assert_close(found[name], value, rtol=1e-4, atol=1e-7)


def test_scoring_leaves_the_clients_network_as_it_was() -> None:
    toy = Toy(zoo.fedavg())
    whole = select(toy.network, lambda name: True, buffers=False).gather(toy.network)
    before = snapshot(toy.network)
    handle(fisher_order(toy, 0, 0.5 * whole), toy.algorithm, toy.context, {})
    after = snapshot(toy.network)
    assert all(torch.equal(before[name], after[name]) for name in before)


def test_statistics_are_summed_over_all_batches() -> None:
    """More rows than one batch of the feature loop holds."""
    toy = Toy(zoo.fedavg())
    many = ToyExamples(1200)
    context = replace(toy.context, examples=many, rows=lambda k: torch.arange(1200))
    response, _ = handle(Request("toy", -1, 0, "statistics"), toy.algorithm, context, {})
    z = torch.cat([z for _, z in feature_batches(toy.network, many, torch.arange(1200))]).double()
    z = torch.cat([z, torch.ones(1200, 1, dtype=torch.float64)], 1)
    torch.testing.assert_close(response.sums["gram"], z.T @ z, rtol=1e-9, atol=1e-9)
    one_hot = torch.nn.functional.one_hot(many.labels, CLASSES).double()
    torch.testing.assert_close(response.sums["cross"], z.T @ one_hot, rtol=1e-9, atol=1e-9)


def test_a_client_counts_on_what_it_holds_out_and_never_on_what_it_trains_on() -> None:
    toy = Toy(zoo.fedavg())
    held = torch.tensor([3, 50, 77, 119])
    context = replace(toy.context, held=lambda k: held)
    vector = toy.space.gather(toy.network)
    response, _ = handle(Request("toy", 0, 1, "count", toy.space.digest, vector), toy.algorithm, context, {})
    logits = toy.network(toy.examples.inputs[held]).detach()
    right = (logits.argmax(1) == toy.examples.labels[held]).sum()
    loss = cross_entropy(logits, toy.examples.labels[held], reduction="sum")
    wanted = torch.tensor([float(right), 4.0, float(loss), 4.0], dtype=torch.float64)
    torch.testing.assert_close(response.sums["counts"][0], wanted, rtol=1e-5, atol=1e-5)


def test_a_representation_shows_rows_of_the_client_drawn_anew_each_round() -> None:
    toy = Toy(zoo.fedavg())
    wanted = Observe("representation", options={"samples": 6})

    def shown(round: int, client: int) -> Tensor:
        return OBSERVATIONS["representation"](wanted, Request("toy", round, client, "train"), toy.context)[1][
            "representation"
        ]

    own = torch.cat([z for _, z in feature_batches(toy.network, toy.examples, toy.context.rows(2))])
    first = shown(0, 2)
    assert all(any(torch.allclose(row, z, atol=1e-6) for z in own) for row in first)
    assert torch.equal(first, shown(0, 2)) and not torch.allclose(first, shown(1, 2))
