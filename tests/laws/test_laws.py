"""The three laws where the table of the zoo does not reach: long runs, idempotence, separate randomness."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.support.toy import Toy, ToyNetwork, random_mask, snapshot
from torch import Tensor

from fedgraft import algorithms as zoo
from fedgraft.aggregate.mean import weighted_mean
from fedgraft.aggregate.server_rules import SERVER_RULES, RoundInfo
from fedgraft.algorithms.algorithm import vary
from fedgraft.core.messages import Request
from fedgraft.core.space import masked, select
from fedgraft.edit import dense
from fedgraft.engines.in_process import InProcess
from fedgraft.local.optimizers import adamw, sgdm
from fedgraft.local.train import LocalTraining

LOCAL = LocalTraining(steps=2, batch_size=6, optimizer=sgdm(0.9, weight_decay=0.05))


def head(name: str) -> bool:
    return name.startswith("head")


def test_fifty_rounds_on_the_head_leave_every_other_coordinate_bit_identical() -> None:
    toy = Toy(zoo.fedavg(local=LOCAL, trainable=dense.head()))
    before = snapshot(toy.network)
    toy.run(50)
    toy.loss()
    for name, tensor in toy.network.state_dict().items():
        assert torch.equal(tensor, before[name]) != head(name)


@pytest.mark.parametrize("amp", [None, "bfloat16", "float16"])
@pytest.mark.parametrize("optimizer", [sgdm(0.9, 0.1), adamw(weight_decay=0.1)], ids=["sgdm", "adamw"])
def test_masked_rounds_move_the_mask_and_nothing_else(amp: str | None, optimizer: Any) -> None:
    """With decay, momentum and mixed precision; at least 99 % of what may move does."""
    mask = random_mask(ToyNetwork())
    toy = Toy(zoo.fedavg(local=replace(LOCAL, optimizer=optimizer, amp=amp)), masked(ToyNetwork(), mask), per_round=5)
    before, start = snapshot(toy.network), toy.state.vector.clone()
    toy.run(2)
    for name, tensor in toy.network.state_dict().items():
        assert torch.equal(tensor[~mask[name]], before[name][~mask[name]])
    assert (toy.state.vector != start).double().mean() >= 0.99


def test_a_mask_does_not_prune() -> None:
    """Binding a mask leaves the function as it was; the planted bug multiplies the weights by it."""
    network, mask, x = ToyNetwork(), random_mask(ToyNetwork()), torch.randn(4, 5)
    wanted = network(x).detach()
    masked(network, mask).bind(network)
    assert torch.equal(network(x), wanted)
    with torch.no_grad():
        for name, p in network.named_parameters():
            p.mul_(mask[name])
    assert not torch.allclose(network(x), wanted)


def test_a_space_without_the_head_keeps_it_at_its_start() -> None:
    """The initialised head is outside the mask's space, so it is the same after training."""
    mask = {n: m for n, m in random_mask(ToyNetwork()).items() if not head(n)}
    toy = Toy(zoo.fedavg(local=LOCAL), masked(ToyNetwork(), mask))
    before = toy.network.head.weight.detach().clone()
    toy.run(3)
    assert torch.equal(toy.network.head.weight, before)


@settings(max_examples=25, deadline=None)
@given(st.integers(1, 12), st.integers(0, 10_000))
def test_adding_mean_updates_is_idempotent_and_averaging_weights_is_not(clients: int, seed: int) -> None:
    """Nobody moved, so nothing moves - over many rounds. Ten models averaged with 0.1 each do move."""
    g = torch.Generator().manual_seed(seed)
    vector = torch.randn(200, generator=g)
    weights = torch.rand(clients, generator=g, dtype=torch.float64) + 0.1
    model = vector.clone()
    for _ in range(20):
        model = model + weighted_mean([torch.zeros(200)] * clients, weights)
    assert torch.equal(model, vector)
    averaged = sum((torch.tensor(0.1) * vector for _ in range(10)), torch.zeros(200))
    assert not torch.equal(averaged, vector)  # the planted bug


@pytest.mark.parametrize("name", SERVER_RULES)
def test_server_rules_leave_a_coordinate_that_never_changed(name: str) -> None:
    """Zero update for ever is zero step for ever, also with moments and controls of other coordinates."""
    rule = SERVER_RULES[name](0.1) if name == "feddyn" else SERVER_RULES[name]()
    g = torch.Generator().manual_seed(0)
    vector = start = torch.randn(50, generator=g)
    state = rule.init(50)
    for _ in range(30):
        update = torch.randn(50, generator=g)
        update[::2] = 0
        info = RoundInfo(10, 5, 0.1, {"control": update, "agreement": update.sign().abs()}, {"tau": 1.0})
        vector, state = rule.step(vector, update, state, info)
    assert torch.equal(vector[::2], start[::2]) and (vector[1::2] != start[1::2]).all()


def test_snapshots_are_copies() -> None:
    """The model before a round can be compared with the one after it; a bare state_dict compares with itself."""
    toy = Toy(zoo.fedavg(local=LOCAL))
    alias, copy, first = dict(toy.network.state_dict()), snapshot(toy.network), toy.state.vector
    kept = first.clone()
    toy.run(1)
    toy.loss()
    name = "head.weight"
    assert torch.equal(first, kept), "a state must not change when the next one is made"
    assert not torch.equal(copy[name], toy.network.state_dict()[name])
    rebound = dict(toy.network.state_dict())
    toy.run(1)
    toy.loss()
    assert torch.equal(rebound[name], toy.network.state_dict()[name])  # the planted bug: always equal to itself
    assert set(alias) == set(copy)


def test_states_and_orders_are_not_written_to() -> None:
    """A reply is computed on the client's own copy: the order's vector keeps its bits."""
    toy = Toy(zoo.scaffold(local=LOCAL))
    vector, control = toy.state.vector.clone(), torch.ones(toy.space.trained)
    request = Request("toy", 0, 1, "train", toy.space.digest, vector, {"control": control}, {"lr": 0.05})
    kept = vector.clone()
    list(toy.engine.exchange([request]))
    assert torch.equal(vector, kept) and torch.equal(control, torch.ones(toy.space.trained))


def statistics_between_rounds(toy: Toy, rounds: int) -> Tensor:
    for _ in range(rounds):
        toy.run(1)
        list(toy.engine.exchange([Request("toy", -1, k, "statistics") for k in range(5)]))
        toy.loss()
        torch.rand(11)
    return toy.state.vector


def test_measuring_between_rounds_does_not_shift_training() -> None:
    """Every purpose draws from a stream of its own."""
    make = lambda: Toy(vary(zoo.fedshibu(local=LOCAL, samples=12)))  # noqa: E731
    plain = make()
    plain.run(3)
    assert torch.equal(statistics_between_rounds(make(), 3), plain.state.vector)


def test_one_stream_for_everything_would_be_noticed() -> None:
    """The planted bug: one generator shared by training and measuring."""
    shared = torch.Generator().manual_seed(0)

    def rounds(measure: bool) -> list[Tensor]:
        shared.manual_seed(0)
        drawn = []
        for _ in range(3):
            drawn.append(torch.randperm(9, generator=shared))
            if measure:
                torch.rand(1, generator=shared)
        return drawn

    assert any(not torch.equal(a, b) for a, b in zip(rounds(True), rounds(False), strict=True))


def test_the_order_of_parameters_does_not_change_the_result() -> None:
    """A space listed backwards trains to the same network."""

    def trained(flip: bool) -> dict[str, Tensor]:
        space = select(ToyNetwork(), lambda n: True)
        space = replace(space, parts=space.parts[::-1]) if flip else space
        toy = Toy(zoo.fedavg(local=LOCAL), space)
        toy.run(2)
        space.scatter(toy.state.vector, toy.network)
        return snapshot(toy.network)

    forwards, backwards = trained(False), trained(True)
    assert all(torch.equal(forwards[name], backwards[name]) for name in forwards)


def test_a_client_gives_the_same_bytes_wherever_it_runs() -> None:
    """Its reply depends on the order, its data and its memory - not on who worked in this process before."""
    for algorithm in (zoo.fedavg(local=LOCAL), zoo.fedper(local=LOCAL), zoo.ditto(local=LOCAL)):
        busy, fresh = Toy(algorithm), Toy(algorithm)
        busy.run(2)
        request = Request("toy", 5, 4, "train", busy.space.digest, fresh.state.vector, {}, {"lr": 0.05})
        busy.engine.memory.pop(4, None)
        a, b = (next(iter(InProcess.exchange(t.engine, [request]))) for t in (busy, fresh))
        assert a.update is not None and b.update is not None
        assert torch.equal(a.update.arrays["values"], b.update.arrays["values"])
