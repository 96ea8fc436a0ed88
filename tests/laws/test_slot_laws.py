"""Laws of the slots: the default loss is the cross-entropy, what selects nothing is FedAvg.

Equal means bit for bit, over all a checkpoint holds. Below them each law is shown to notice the bug it is there for.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest
import torch
from tests.support.toy import Toy, batch_norm_network
from torch import Tensor
from torch.nn.functional import cross_entropy as softmax_loss

from fedgraft import algorithms as zoo
from fedgraft.algorithms.algorithm import Algorithm, ClientState, vary
from fedgraft.core.errors import FedgraftError
from fedgraft.core.protocols import Network
from fedgraft.core.registry import LOSSES
from fedgraft.core.state import to_tensors
from fedgraft.edit.trainable import is_head
from fedgraft.local.corrections import Correction, none
from fedgraft.local.losses import Loss, LossContext, cross_entropy
from fedgraft.local.optimizers import adamw, sgdm
from fedgraft.local.schedules import constant_rate
from fedgraft.local.train import LocalTraining

LOCAL = LocalTraining(steps=2, batch_size=6, optimizer=sgdm(0.9, weight_decay=0.01))


def outcome(algorithm: Algorithm, rounds: int = 3, **options: Any) -> dict[str, Tensor]:
    toy = Toy(algorithm, **options)
    toy.run(rounds)
    assert not toy.summary.rejections
    return to_tensors(toy.state, toy.engine.memory)[0]


def same(one: dict[str, Tensor], other: dict[str, Tensor]) -> bool:
    return one.keys() == other.keys() and all(torch.equal(one[name], other[name]) for name in one)


def made(name: str, **slots: Any) -> Algorithm:
    return zoo.named(name, local=LOCAL, **slots)


# ---- the loss --------------------------------------------------------------------------------------------------------


def own_cross_entropy() -> Loss:
    """The cross-entropy written down once more, by somebody else."""
    return Loss("own", lambda setting: lambda net, x, y, entry: softmax_loss(net(x, entry), y))


def doubled() -> Loss:
    """Twice the cross-entropy."""
    return Loss("doubled", lambda setting: lambda net, x, y, entry: 2 * softmax_loss(net(x, entry), y))


def near_the_last(pull: float = 0.5) -> Loss:
    """Cross-entropy and a pull to the head that this client ended its last round with."""

    def begin(setting: LossContext) -> Any:
        before = setting.memory.get("last_head")

        def value(network: Network, inputs: Tensor, labels: Tensor, entry: int) -> Tensor:
            loss = softmax_loss(network(inputs, entry), labels)
            return loss if before is None else loss + pull * (network.head.weight - before).square().sum()

        return value

    return Loss("near_the_last", begin, lambda context: {"last_head": context.network.head.weight.detach().clone()})


@pytest.fixture
def outside() -> Iterator[None]:
    """Losses that nobody of fedgraft knows, under names of their own."""
    mine = {"own": own_cross_entropy, "doubled": doubled, "near_the_last": near_the_last}
    LOSSES.update(mine)
    yield
    for name in mine:
        del LOSSES[name]


@pytest.mark.slow
@pytest.mark.parametrize("name", ["fedavg", "scaffold", "fedper", "ditto"])
def test_the_default_loss_is_the_cross_entropy(name: str, outside: None) -> None:
    plain = outcome(made(name))
    assert same(outcome(made(name, loss=cross_entropy(0.0))), plain)
    assert same(outcome(made(name, loss=LOSSES.build("cross_entropy", {"label_smoothing": 0.0}))), plain)
    assert same(outcome(made(name, loss=LOSSES.build("own", {}))), plain)
    assert not same(outcome(made(name, loss=cross_entropy(0.1))), plain)  # the planted bug: it smooths


def test_a_loss_from_outside_is_what_clients_minimise(outside: None) -> None:
    """Twice the loss at half the rate is the same path, bit for bit: scaling by two is exact."""
    local = replace(LOCAL, optimizer=sgdm(0.9))
    plain = zoo.fedavg(local=local)
    twice = zoo.fedavg(local=local, loss=LOSSES.build("doubled", {}))
    assert same(outcome(twice, schedule=constant_rate(0.025)), outcome(plain, schedule=constant_rate(0.05)))
    assert not same(outcome(twice), outcome(plain))  # the planted bug: the slot is not looked at
    with pytest.raises(FedgraftError, match="no loss 'dubled'; the nearest one is 'doubled'"):
        LOSSES.find("dubled")
    with pytest.raises(FedgraftError, match="no option 'pul'; the nearest is 'pull'"):
        LOSSES.build("near_the_last", {"pul": 1.0})


def test_a_loss_remembers_by_client(outside: None) -> None:
    """What it keeps is in the checkpoint and comes back; a loss that is shown nothing is another one."""
    loss = LOSSES.build("near_the_last", {"pull": 0.5})
    toy = Toy(made("fedavg", loss=loss), per_round=5)
    toy.run(1)
    first = to_tensors(toy.state, toy.engine.memory)[0]
    assert {f"memory/{k}/last_head" for k in range(5)} <= first.keys()
    forgetful = replace(loss, finish=lambda context: {})
    for rounds, equal in ((1, True), (2, False)):
        vectors = [outcome(made("fedavg", loss=one), rounds, per_round=5)["vector"] for one in (loss, forgetful)]
        assert torch.equal(*vectors) == equal


# ---- a rate of the head's own, and a selection of nothing ------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.parametrize("name", ["fedavg", "fedprox", "feddyn", "fedper", "fedbabu", "ditto"])
@pytest.mark.parametrize("optimizer", [sgdm(0.9, 0.01), adamw()], ids=["sgdm", "adamw"])
def test_a_head_rate_of_one_is_none(name: str, optimizer: Any) -> None:
    for network in (None, batch_norm_network):
        options: dict[str, Any] = {} if network is None else {"network": network}
        plain = vary(made(name), optimizer=optimizer)
        assert same(outcome(vary(plain, head_lr=1.0), **options), outcome(plain, **options))


def test_a_head_rate_moves_the_head_so_much_farther() -> None:
    """One plain step: the head twice as far, the body exactly as before; where no head trains it is no matter."""
    plain = zoo.fedavg(local=LocalTraining(steps=1, batch_size=6, optimizer=sgdm(0.0)))
    toys = [Toy(vary(plain, head_lr=rate), clients=1, per_round=1) for rate in (1.0, 2.0)]
    start = toys[0].state.vector.clone()
    one, two = (toy.run(1).vector - start for toy in toys)
    at = toys[0].space.slices()["head.weight"].start
    assert torch.equal(one[:at], two[:at])
    torch.testing.assert_close(two[at:], 2 * one[at:], rtol=1e-4, atol=1e-6)
    assert same(outcome(vary(made("fedbabu"), head_lr=2.0)), outcome(made("fedbabu")))
    assert not same(outcome(vary(made("fedavg"), head_lr=2.0)), outcome(made("fedavg")))  # the planted bug: ignored


def test_a_private_selection_of_nothing_is_fedavg() -> None:
    nothing = ClientState(private=lambda network, name: False)
    for state in (nothing, replace(nothing, alternate=True), ClientState()):
        assert same(outcome(vary(made("fedavg"), client_state=state)), outcome(made("fedavg")))
    assert not same(outcome(vary(made("fedavg"), client_state=ClientState(is_head))), outcome(made("fedavg")))
    with pytest.raises(FedgraftError, match="nothing be shared"):
        Toy(vary(made("fedavg"), client_state=ClientState(private=lambda network, name: True)))


def test_what_is_private_never_travels() -> None:
    """The selection's coordinates are in no order and no reply; the planted bug selects too little."""

    def travelled(private: Any) -> set[str]:
        return {part.name for part in Toy(vary(made("fedavg"), client_state=ClientState(private))).space.parts}

    assert not any(name.startswith("head") for name in travelled(is_head))
    assert "head.bias" in travelled(lambda network, name: name == "head.weight")


def test_corrections_are_compared_by_what_they_do() -> None:
    """The comparison itself: a correction that does a little is not one that does nothing."""

    def adjust(gradient: Tensor, values: Tensor, context: Any) -> None:
        gradient.add_(1e-4)

    little: Correction = replace(none(), adjust=adjust)
    assert not same(outcome(vary(made("fedavg"), correction=little)), outcome(made("fedavg")))
