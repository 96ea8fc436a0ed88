"""A server that makes models up, so that a sum is one client's update; and the history that stands in its way."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import pytest
import torch
from tests.support.hostile import CLIENTS, VICTIM, World
from torch import Tensor

from fedgraft import algorithms as zoo
from fedgraft.aggregate import server_rules
from fedgraft.algorithms.algorithm import vary
from fedgraft.client import history as histories
from fedgraft.client.history import ModelHistory, RunRates, model_digest
from fedgraft.client.train import train_locally
from fedgraft.core.errors import Refused
from fedgraft.core.space import select
from fedgraft.edit.sparse import Sparse
from fedgraft.local.schedules import constant_rate, cosine
from fedgraft.privacy.protection import Secure
from fedgraft.server.sample import instruct

pytest.importorskip("cryptography")


def nothing(*parts: Any, **more: Any) -> None:
    return None


def node(world: World) -> ModelHistory:
    return ModelHistory(
        world.toy.state.vector.clone(), RunRates(constant_rate(0.05), 10, 0.05, False, None, False), 30.0, nothing
    )


def secure_world() -> World:
    """Five clients that compare models; the victim alone has images of class 2."""
    world = World("secure")
    world.context.policies = tuple(replace(p, rounds_per_day=None) for p in world.context.policies)
    labels = world.context.examples.labels

    def rows(client: int) -> Tensor:
        own = torch.arange(client, len(labels), len(CLIENTS))
        return own if client == VICTIM else own[labels[own] != 2]

    world.context.rows = rows
    world.histories = {client: node(world) for client in CLIENTS}
    return world


def train(
    world: World, vector: Tensor | None = None, number: int = 0, **settings: float
) -> Mapping[str, Tensor] | None:
    """One hidden round under this model and these settings, told to all clients alike."""
    honest = instruct(world.algorithm, world.toy.federation, world.toy.state, [0], world.toy.space.digest)[0]
    model = honest.vector if vector is None else vector
    state = replace(world.toy.state, vector=model)
    before, world.toy.state = world.toy.state, state
    try:
        return world.sum(number=number, **settings)
    finally:
        world.toy.state = before


def crafted(world: World) -> Tensor:
    """A model whose head sends something back for class 2 only, and next to nothing for images of other classes."""
    network = world.context.network
    world.context.load_model(world.toy.state.vector)
    with torch.no_grad():
        network.head.weight[:2] = 0
        network.head.bias[:2] = 0
        network.head.weight[2] = 0.05 * torch.ones(network.width)
        network.head.bias[2] = -25.0
    vector = world.context.space.gather(network)
    world.context.load_model(world.toy.state.vector)
    return vector


def body_of(world: World, update: Tensor) -> Tensor:
    parts, begin = [], 0
    for part in world.context.space.parts:
        if not part.name.startswith("head"):
            parts.append(update[begin : begin + part.size])
        begin += part.size
    return torch.cat(parts)


def leaked(world: World) -> float | None:
    """Relative error of the victim's body update that a made-up model gives away; None: it was refused."""
    model = crafted(world)
    sums = train(world, model, head_lr=1e-30)
    return None if sums is None else error_of(world, sums, model, 0, head_lr=1e-30)


def error_of(world: World, sums: Mapping[str, Tensor], model: Tensor, number: int, **settings: float) -> float:
    """Relative error of an opened sum as a guess of the victim's body update."""
    request = world.request(vector=model, settings={"largest": 20, **settings}, round=number)
    own = train_locally(request, world.algorithm, replace(world.context), {})
    weight = min(20.0, float(len(world.context.rows(VICTIM)))) / 20
    mine = body_of(world, own.update) * weight
    return float((body_of(world, sums["update"].float()) - mine).norm() / mine.norm())


def test_a_made_up_head_gives_one_clients_update_away_and_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    world = secure_world()
    assert leaked(world) is None
    assert "rule 'rates'" in world.refused()
    world = secure_world()
    assert train(world, crafted(world)) is None
    assert "another model than the one that all were told" in world.refused()
    monkeypatch.setattr(ModelHistory, "check", nothing)
    error = leaked(secure_world())
    assert error is not None and error < 1e-3  # what the ring rounds


def test_a_made_up_head_that_all_were_told_is_refused_by_those_for_whom_it_is_dead() -> None:
    """The server installs it before the first round: the first model is the agreed one, and is dead for the others."""
    world = secure_world()
    model = crafted(world)
    for history in world.histories.values():
        history.origin = model
    assert train(world, model) is None
    others = [answer for _, client, answer in world.said if client != VICTIM and isinstance(answer, str)]
    assert others and all("rule 'head'" in answer for answer in others)


def test_a_saturated_head_is_refused() -> None:
    """All images are right for certain: nothing is sent back for them, whoever has them."""
    world = secure_world()
    network = world.context.network
    world.context.load_model(world.toy.state.vector)
    rows = world.context.rows(0)
    labels = world.context.examples.labels[rows]
    one_class = rows[labels == 0]
    world.context.rows = lambda client: one_class if client == 0 else rows
    with torch.no_grad():
        network.head.bias[0] = 1e4
    model = world.context.space.gather(network)
    for history in world.histories.values():
        history.origin = model
    train(world, model)
    refusals = [answer for _, client, answer in world.said if client == 0 and isinstance(answer, str)]
    assert refusals and "rule 'head'" in refusals[0]


def test_a_jump_after_honest_rounds_is_refused_and_honest_rounds_are_not() -> None:
    world = secure_world()
    state = world.toy.state.vector
    for number in range(4):
        sums = train(world, state, number)
        assert sums is not None, world.refused()
        state = state + (sums["update"] / float(sums["weight"])).float()
    assert train(world, crafted(world), 4) is None
    assert "rule 'history'" in world.refused()


def edge_of_the_bound(world: World) -> Tensor:
    """The model on the way to the made-up one whose head sends just enough back for everybody's images."""
    start, end = world.toy.state.vector, crafted(world)
    least, most = 0.0, 1.0
    for _ in range(40):
        middle = (least + most) / 2
        world.context.load_model(start + (end - start) * middle)
        signals = [histories.head_signal(world.context, client, trains_body=True) or 0.0 for client in CLIENTS]
        if min(signals) >= 1.01 * histories.LEAST_LATER_SIGNAL:
            least = middle
        else:
            most = middle
    return start + (end - start) * least


def drift(world: World, **settings: float) -> list[float]:
    """Errors of the rounds in which a server moves the model as far as it may towards the edge of the bound."""
    goal = edge_of_the_bound(world)
    state = world.toy.state.vector
    errors = []
    for number in range(5):
        sums = train(world, state, number, **settings)
        assert sums is not None, world.refused()
        errors.append(error_of(world, sums, state, number, **settings))
        reaches = []
        for history in world.histories.values():
            latest = history.memory[histories._LATEST]
            reaches.append(history.reach(world.algorithm, history._last_norm, latest, number))
        left = goal - state
        state = state + left * min(1.0, 0.99 * min(reaches) / max(1e-9, float(left.norm())))
    return errors


def test_a_drift_within_the_bound_gives_nobody_away_at_the_rates_of_the_config() -> None:
    """Every step is within reach and no head is dead, so nothing is refused; but others' heads recover in the round.

    At the edge the sum is three times the victim's own update away from it. With a rate of the server's choice the
    heads stay as they are, and the sum is the victim's update to half a percent.
    """
    assert min(drift(secure_world())) > 2.5
    world = secure_world()
    for history in world.histories.values():
        history.rates = None
        history.norm_factor = 1e6  # heads that stay make steps short, and the way long
    assert min(drift(world, head_lr=1e-30)) < 0.02


def test_a_model_before_another_round_is_not_exchanged_afterwards() -> None:
    world = secure_world()
    assert train(world) is not None
    history = world.histories[VICTIM]
    request = world.request(vector=world.toy.state.vector + 1e-3, round=0)
    with pytest.raises(Exception, match="had another model before"):
        history.check(request, world.algorithm, world.context)


@pytest.mark.parametrize("settings", [{"lr": 0.04}, {"lr": 1e-30}, {"head_lr": 1e-30}])
def test_rates_come_from_the_config(settings: dict[str, float]) -> None:
    world = secure_world()
    assert train(world, **settings) is None
    assert "rule 'rates'" in world.refused()


def test_rates_that_the_config_leaves_open_stay_in_range_and_follow_the_schedule() -> None:
    world = secure_world()
    rates = RunRates(cosine(0.01), 10, 0.01, True, 0.5, True)
    history = ModelHistory(None, rates, 0.0, nothing)

    def check(round: int, lr: float, head_lr: float) -> bool:
        request = world.request(round=round, settings={"lr": lr, "head_lr": head_lr})
        try:
            history.check(request, world.algorithm, world.context)
        except Exception as error:
            assert "rule" not in str(error) and error.rule in ("rates", "head")  # type: ignore[attr-defined]
            return error.rule != "rates"  # type: ignore[attr-defined]
        return True

    schedule = cosine(0.03)
    assert check(0, schedule(0, 10, ()), 0.5) and check(5, schedule(5, 10, ()), 0.5)
    assert not check(6, 2 * schedule(6, 10, ()), 0.5)  # it changes its mind
    assert not check(6, schedule(6, 10, ()), 1e-30)
    assert not check(6, 1e-30, 0.5)


def test_who_comes_later_holds_the_model_against_the_first_one() -> None:
    world = secure_world()
    sums = train(world, number=0)
    assert sums is not None
    fresh = node(world)
    world.histories[VICTIM] = fresh
    assert train(world, crafted(world), 1) is None
    world = secure_world()
    honest = world.toy.state.vector + (sums["update"] / float(sums["weight"])).float()
    assert train(world, honest, 3) is not None, world.refused()


def test_right_answers_are_told_of_models_that_were_trained_here_or_pinned() -> None:
    world = secure_world()
    world.allow(actions=("train", "evaluate"), in_the_clear=("evaluate",), least_images=0)
    assert train(world) is not None

    def asked(vector: Tensor) -> Any:
        return world.tell(world.request(action="evaluate", vector=vector, round=1, settings={"scores": True}))

    answer = asked(world.toy.state.vector)
    assert set(answer.metrics) == {"accuracy", "count"} and not answer.sums
    made_up = crafted(world)
    assert asked(made_up).startswith("refused by the rule 'models'")
    world.histories[VICTIM].pinned = (model_digest(made_up),)
    assert not isinstance(asked(made_up), str)


@pytest.mark.parametrize("name", sorted(server_rules.SERVER_RULES))
def test_no_server_rule_reaches_farther_than_it_says(name: str) -> None:
    """Updates of the largest length in the worst direction, 30 rounds of them."""
    build = server_rules.SERVER_RULES[name]
    rule = build(0.1) if name == "feddyn" else build()
    generator = torch.Generator().manual_seed(3)
    size, longest = 50, 0.7
    x = torch.zeros(size)
    state = rule.init(size)
    direction = torch.randn(size, generator=generator)
    for round in range(30):
        update = torch.randn(size, generator=generator) if round % 7 == 3 else direction.clone()
        update *= longest / update.norm()
        info = server_rules.RoundInfo(4, 4, 0.1, {"control": update, "agreement": torch.ones(size)}, {"tau": 1.0})
        moved, state = rule.step(x, update, state, info)
        assert float((moved - x).norm()) <= rule.reach(longest, size, round + 1) * (1 + 1e-5)
        x = moved


def test_the_bound_is_that_of_the_rule(monkeypatch: pytest.MonkeyPatch) -> None:
    """A broken variant: a bound that no step exceeds lets the jump through."""
    world = secure_world()
    assert train(world) is not None
    monkeypatch.setattr(ModelHistory, "_check_step", nothing)
    monkeypatch.setattr(histories, "check_head", nothing)
    assert train(world, crafted(world), 1) is not None


def test_algorithms_of_the_zoo_have_a_reach_under_secure_aggregation() -> None:
    made = vary(zoo.fedavg(), privacy=Secure())
    assert made.server.reach(2.0, 10, 1) == 2.0


def scored(world: World, vector: Tensor, number: int = 0) -> Mapping[str, Tensor] | None:
    """The hidden gradient of all weights of the body at these weights, over all images of all clients."""
    names = [name for name, _ in world.context.network.named_parameters() if not name.startswith("head")]
    return world.sum(action="gradient", vector=vector, number=number, names="\n".join(names), draw=0, share=1.0)


def test_weights_are_scored_at_the_nodes_own_values_only(monkeypatch: pytest.MonkeyPatch) -> None:
    """Under a head that is sure of all classes but the victim's, the hidden gradient is that of the victim alone."""
    world = secure_world()
    weights = select(world.context.network, lambda name: True, buffers=False)
    own = weights.gather(world.context.network)
    assert scored(world, own) is not None
    for spoiled in (own + 1e-6, own.where(torch.arange(len(own)) != 5, 0.1 * own)):  # nothing is softened here
        world = secure_world()
        assert scored(world, spoiled) is None
        assert "not those of this node's network" in world.refused()
    world = secure_world()
    assert scored(world, crafted(world)) is None
    refused = [answer for _, _, answer in world.said if isinstance(answer, str)]
    assert refused and all("rule 'head'" in answer for answer in refused)
    assert torch.equal(weights.gather(world.context.network), own)  # a refusal leaves no foreign weights behind

    monkeypatch.setattr(ModelHistory, "check_scored", nothing)
    world = secure_world()
    sums = scored(world, crafted(world))
    assert sums is not None
    alone = secure_world()
    keep = alone.context.rows
    alone.context.rows = lambda client: keep(client) if client == VICTIM else keep(client)[:0]
    own_sums = scored(alone, crafted(alone))
    assert own_sums is not None
    difference = (sums["gradient"] - own_sums["gradient"]).norm() / own_sums["gradient"].norm()
    assert float(difference) < 1e-3


def test_weights_are_scored_before_the_first_round_only() -> None:
    world = secure_world()
    own = select(world.context.network, lambda name: True, buffers=False).gather(world.context.network)
    assert train(world) is not None
    world.said.clear()
    assert scored(world, own, number=1) is None
    assert "before the first round only" in world.refused()


def test_softened_weights_may_be_scored_where_the_trainable_kind_softens_them() -> None:
    world = secure_world()
    own = select(world.context.network, lambda name: True, buffers=False).gather(world.context.network)
    trainable = Sparse(soft=0.1)
    request = world.request(vector=own.where(torch.arange(len(own)) % 3 != 0, own * 0.1))
    history = node(world)
    history.check_scored(request, vary(world.algorithm, trainable=trainable), world.context)
    with pytest.raises(Refused) as refusal:
        history.check_scored(request, world.algorithm, world.context)
    assert refusal.value.fields["check"] == "scored"
