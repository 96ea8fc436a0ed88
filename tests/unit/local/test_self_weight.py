"""The self-weight that a client learns: what it sets aside, what it chooses, and the rows of the mixture by hand."""

from __future__ import annotations

import torch
from tests.support.toy import ToyExamples, ToyNetwork
from torch import Tensor

from fedgraft.aggregate.mixing import mixing_matrix
from fedgraft.core.space import select
from fedgraft.local.self_weight import GRID, learn_self_weight, self_weight_similarity, split_aside


def test_what_is_set_aside_is_never_trained_on() -> None:
    rows = torch.arange(100, 150)
    train, aside = split_aside(rows, 0.2, 7, 3)
    assert len(aside) == 10 and torch.equal(torch.cat([train, aside]).sort().values, rows)
    assert torch.equal(split_aside(rows, 0.2, 7, 3)[1], aside) and not torch.equal(
        split_aside(rows, 0.2, 7, 4)[1], aside
    )
    assert split_aside(rows, 0.0, 7, 3)[0] is rows
    alone, nothing = split_aside(rows[:1], 0.5, 7, 0)
    assert len(alone) == 1 and not len(nothing)


def test_the_weight_with_the_least_loss_is_chosen() -> None:
    """Labels that the head of one of two models gives: that model is right, whichever of the two it is."""
    network, examples, rows = ToyNetwork(), ToyExamples(60), torch.arange(60)
    space = select(network, lambda name: name.startswith("head"))
    right = 20 * space.gather(network)

    def show(vector: Tensor) -> None:
        space.scatter(vector, network)

    show(right)
    examples.labels = network(examples.inputs).argmax(1)
    wrong = -right
    assert learn_self_weight(network, show, right, wrong, examples, rows) == 1.0
    assert torch.equal(space.gather(network), right)  # the client's own model is put back
    assert learn_self_weight(network, show, wrong, right, examples, rows) == 0.0
    assert learn_self_weight(network, show, right, right, examples, rows) == 0.0  # of equals the one that shares
    assert learn_self_weight(network, show, right, wrong, examples, rows[:0]) == 0.0


def test_rows_of_the_mixture_by_hand() -> None:
    """10, 30 and 60 images: w_i goes to oneself, the rest by images to all. GRID spans alone to shared."""
    counts, weights = torch.tensor([10.0, 30.0, 60.0]).double(), torch.tensor([0.0, 0.5, 1.0])
    wanted = [[0.1, 0.3, 0.6], [0.05, 0.65, 0.3], [0.0, 0.0, 1.0]]
    torch.testing.assert_close(
        mixing_matrix(self_weight_similarity(weights, counts), counts), torch.tensor(wanted).double()
    )
    assert GRID[0] == 0 and GRID[-1] == 1
