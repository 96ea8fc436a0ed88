"""Laws of the slots: a chain of one is its link, the default loss is the cross-entropy, what selects nothing is FedAvg.

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
from fedgraft.aggregate import server_rules
from fedgraft.aggregate.server_rules import RoundInfo, ServerRule
from fedgraft.algorithms.algorithm import Algorithm, ClientState, vary
from fedgraft.core.errors import FedgraftError
from fedgraft.core.protocols import Network
from fedgraft.core.registry import LOSSES
from fedgraft.core.state import to_tensors
from fedgraft.edit.trainable import is_head
from fedgraft.local import corrections
from fedgraft.local.corrections import Correction, control_variates, dynamic, none, proximal
from fedgraft.local.losses import Loss, LossContext, cross_entropy
from fedgraft.local.optimizers import adamw, sgdm
from fedgraft.local.schedules import constant
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


# ---- chains of corrections -------------------------------------------------------------------------------------------

CORRECTED = {"fedavg": none(), "fedprox": proximal(0.5), "scaffold": control_variates(), "feddyn": dynamic(0.1)}


@pytest.mark.parametrize("name", CORRECTED)
def test_a_chain_of_one_correction_is_the_correction(name: str) -> None:
    plain = vary(made(name), correction=CORRECTED[name])
    link, chained = CORRECTED[name], corrections.chain(CORRECTED[name])
    assert same(outcome(vary(plain, correction=chained)), outcome(plain))
    flags = ("name", "sends", "receives", "remembers", "needs_effective_steps", "nothing")
    assert [getattr(chained, flag) for flag in flags] == [getattr(link, flag) for flag in flags]


@pytest.mark.slow
@pytest.mark.parametrize("name", CORRECTED)
def test_a_pull_of_zero_in_a_chain_is_nothing(name: str) -> None:
    plain = vary(made(name), correction=CORRECTED[name])
    for links in ((proximal(0.0), CORRECTED[name]), (CORRECTED[name], proximal(0.0))):
        assert same(outcome(vary(plain, correction=corrections.chain(*links))), outcome(plain))
    assert not same(outcome(vary(plain, correction=corrections.chain(CORRECTED[name], proximal(0.5)))), outcome(plain))
    assert corrections.chain(proximal(0.0), none()).nothing and not corrections.chain(proximal(0.5), none()).nothing


def test_pulls_in_a_chain_add_up() -> None:
    """Two halves are one whole: each link sees the gradient the other left."""
    halves = corrections.chain(proximal(0.25), proximal(0.25))
    gradient, values, start = torch.randn(3, 50, generator=torch.Generator().manual_seed(0)).unbind()
    alone, together = gradient.clone(), gradient.clone()
    proximal(0.5).adjust(alone, values, {"start": start})
    halves.adjust(together, values, halves.prepare(start, {}, {}))
    torch.testing.assert_close(together, alone)


def test_a_chain_that_forgets_a_link_is_noticed() -> None:
    """The planted bugs: only the first link adjusts; what the link remembers is lost; its context is another's."""
    link = control_variates()
    plain, chained = made("scaffold"), corrections.chain(link, proximal(0.0))

    def broken(**parts: Any) -> dict[str, Tensor]:
        return outcome(vary(plain, correction=replace(chained, **parts)))

    assert same(broken(), outcome(plain))
    assert not same(broken(adjust=lambda gradient, values, context: None), outcome(plain))
    assert not same(broken(finish=lambda v, c, r: replace(chained.finish(v, c, r), memory={})), outcome(plain))
    with pytest.raises(KeyError):
        broken(prepare=link.prepare)  # contexts of a chain are kept apart by position


# ---- chains of server rules ------------------------------------------------------------------------------------------

SERVED = ["fedavg", "fedavgm", "fedadam", "fednova", "fedgma", "scaffold", "feddyn"]


@pytest.mark.parametrize("name", SERVED)
def test_a_chain_of_one_server_rule_is_the_rule(name: str) -> None:
    plain = made(name)
    chained = server_rules.chain(plain.server)
    assert same(outcome(vary(plain, server=chained)), outcome(plain))
    assert (chained.name, chained.needs, chained.memoryless) == (
        plain.server.name,
        plain.server.needs,
        plain.server.memoryless,
    )
    assert (chained.inspect is None) == (plain.server.inspect is None)


def stepped(rule: ServerRule) -> Tensor:
    """Five steps from updates that differ; every rule is told all it could need."""
    x, *updates = torch.randn(6, 40, generator=torch.Generator().manual_seed(1)).unbind()
    state = rule.init(40)
    for update in updates:
        info = RoundInfo(5, 3, 0.1, {"control": update, "agreement": update.abs().clamp(max=1)}, {"tau": 1.5})
        x, state = rule.step(x, update, state, info)
    return x


MEMORYLESS = [server_rules.plain(), server_rules.fedgma(0.0), server_rules.chain(server_rules.plain())]


@pytest.mark.parametrize("rule", [server_rules.momentum(), server_rules.adam(), server_rules.scaffold()])
@pytest.mark.parametrize("nothing", MEMORYLESS, ids=["plain", "fedgma", "chain"])
def test_a_plain_step_in_a_chain_changes_nothing(rule: ServerRule, nothing: ServerRule) -> None:
    """Before or after a rule that remembers: its memory goes on. Equal up to the rounding of x + u - x."""
    wanted = stepped(rule)
    for links in ((nothing, rule), (rule, nothing)):
        torch.testing.assert_close(stepped(server_rules.chain(*links)), wanted, rtol=1e-5, atol=1e-6)


def test_a_chain_that_loses_a_memory_is_noticed() -> None:
    """The planted bug: every link is shown the old state, so a link that hands it back overwrites the new one."""
    links = (server_rules.momentum(), server_rules.plain())

    def step(x: Tensor, update: Tensor, state: dict[str, Tensor], info: RoundInfo) -> tuple[Tensor, dict[str, Tensor]]:
        new, moved = dict(state), x
        for rule in links:
            moved, after = rule.step(x, update, state, info)
            new, update = {**new, **after}, moved - x
        return moved, new

    careless = replace(server_rules.chain(*links), step=step)
    assert not torch.allclose(stepped(careless), stepped(server_rules.momentum()), rtol=1e-3)


def test_two_memories_of_one_name_are_refused() -> None:
    with pytest.raises(FedgraftError, match="same name"):
        server_rules.chain(server_rules.momentum(), server_rules.momentum()).init(4)


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
    assert same(outcome(twice, schedule=constant(0.025)), outcome(plain, schedule=constant(0.05)))
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
