"""What a round goes on with: who counts as caught, and how far one client can move a hidden private sum."""

from __future__ import annotations

import itertools

import torch
from tests.support.toy import Toy

from fedgraft import algorithms as zoo
from fedgraft.aggregate.slots import Answers
from fedgraft.core.messages import Request
from fedgraft.privacy.protection import bounded_sum
from fedgraft.server import sample as server
from fedgraft.server.collect import Collected, collect, spread_update
from fedgraft.server.secure_sum import HiddenSum


def hidden(updates: list[torch.Tensor]) -> Collected:
    """A hidden round of these clients, as secure aggregation opens it: the mean, or nothing for one alone."""
    told = torch.stack(updates).mean(0) if len(updates) > 1 else None
    nobody = Answers((), torch.zeros(0, dtype=torch.float64), ())
    return Collected(nobody, hidden=HiddenSum(told, survivors=tuple(range(len(updates))), asked=True))


def test_one_client_more_moves_a_hidden_sum_by_at_most_its_own_bound() -> None:
    """Also from a cohort of one, which gives nothing, to one of two."""
    updates = [torch.tensor([1.0, 0.0])] * 5
    sums = [bounded_sum(hidden(updates[:count]), 1.0, 2)[0] for count in range(1, 6)]
    assert all(float((one - other).norm()) <= 1 + 1e-6 for one, other in itertools.pairwise(sums))
    assert float(sums[-1].norm()) == 4.0


def test_who_is_silent_is_no_attacker_and_who_is_refused_is_one() -> None:
    toy = Toy(zoo.fedavg(), clients=5, per_round=5)
    requests = server.instruct(toy.algorithm, toy.federation, toy.state, list(range(5)), toy.space.digest)

    class Faulty:
        def exchange(self, asked: list[Request]) -> list[object]:
            good = list(toy.engine.exchange(asked[2:]))
            return [(0, "did not answer in time"), (1, b"nonsense"), *good]

    found = collect(toy.algorithm, toy.federation, toy.state, requests, Faulty(), toy.server_context)  # type: ignore[arg-type]
    assert found.answers.clients == (2, 3, 4) and found.answers.dropped == 1
    assert {rejection.client for rejection in found.rejections} == {0, 1}


def test_an_update_of_some_coordinates_lands_where_they_are() -> None:
    active = torch.tensor([False, True, False, True])
    assert spread_update(torch.tensor([3.0, 5.0]), active).tolist() == [0.0, 3.0, 0.0, 5.0]
