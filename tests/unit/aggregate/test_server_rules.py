"""Server rules: values by hand, Flower's strategies on the same arrays, degenerate cases, and frozen coordinates."""

from __future__ import annotations

import math
import os
from typing import Any

import numpy as np
import pytest
import torch
from tests.support.errors import raises
from torch import Tensor

from fedgraft.aggregate import server_rules as rules
from fedgraft.aggregate.mean import sum_unweighted, weighted_mean
from fedgraft.local.optimizers import sgdm

INFO = rules.RoundInfo(clients_total=10, clients_answered=4)


def vectors(count: int, size: int, seed: int = 0) -> Tensor:
    return torch.randn(count, size, generator=torch.Generator().manual_seed(seed))


def run(rule: rules.ServerRule, start: Tensor, updates: Tensor, info: rules.RoundInfo = INFO) -> Tensor:
    state, x = rule.init(len(start)), start
    for update in updates:
        x, state = rule.step(x, update, state, info)
    return x


def info_for(rule: rules.ServerRule, size: int) -> rules.RoundInfo:
    return rules.RoundInfo(10, 4, sums={"control": torch.ones(size), "agreement": torch.ones(size)}, scalars={"tau": 1})


EVERY = {name: make(0.1) if name == "feddyn" else make() for name, make in rules.SERVER_RULES.items()}
by_rule = pytest.mark.parametrize("rule", EVERY.values(), ids=EVERY.keys())


# ---- golden values ------------------------------------------------------------------------------------------------


def test_golden_two_steps() -> None:
    """One coordinate at 1, changes 0.5 then 0.25 (all exact in binary)."""
    updates, one = torch.tensor([[0.5], [0.25]]), torch.ones(1)
    assert run(rules.plain_rule(), one, updates).item() == 1.75
    assert run(rules.plain_rule(lr=2.0), one, updates).item() == 2.5
    # v1 = .5, x1 = 1.5; v2 = .5*.5 + .25 = .5, x2 = 2
    assert run(rules.momentum(beta=0.5), one, updates).item() == 2.0
    # m1 = .25, v1 = .125; x1 = 1 + .25 / (sqrt .125 + 1); m2 = .125 + .125 = .25, v2 = .0625 + .03125 = .09375
    x1 = 1 + 0.25 / (math.sqrt(0.125) + 1)
    x2 = x1 + 0.25 / (math.sqrt(0.09375) + 1)
    assert run(rules.adam(1.0, (0.5, 0.5), 1.0), one, updates).item() == pytest.approx(x2, rel=1e-6)
    # Yogi: v1 = 0 + .5*.25 = .125; v2: s = .0625, v1 > s, so v2 = .125 - .5*.0625 = .09375, here equal to Adam's
    assert run(rules.yogi(1.0, (0.5, 0.5), 1.0), one, updates).item() == pytest.approx(x2, rel=1e-6)
    # Adagrad without momentum: v1 = .25, x1 = 1 + .5 / 1.5; v2 = .3125
    x2 = 1 + 0.5 / 1.5 + 0.25 / (math.sqrt(0.3125) + 1)
    assert run(rules.adagrad(1.0, tau=1.0), one, updates).item() == pytest.approx(x2, rel=1e-6)


def test_yogi_differs_from_adam_when_the_change_shrinks() -> None:
    updates = torch.tensor([[1.0], [0.1], [0.1]])
    adam, yogi = (run(make(1.0, (0.5, 0.5), 1e-3), torch.zeros(1), updates) for make in (rules.adam, rules.yogi))
    assert not torch.allclose(adam, yogi, rtol=1e-2)


def test_scaffold_moves_the_control_by_the_sum_over_all_clients() -> None:
    # K = 10, |S| = 4, each c_k' - c_k = 5: (4 / 10) * 5 = 2.
    info = rules.RoundInfo(10, 4, sums={"control": sum_unweighted([torch.tensor([5.0])] * 4)})
    rule = rules.scaffold_rule(lr=0.5)
    x, state = rule.step(torch.ones(1), torch.tensor([4.0]), rule.init(1), info)
    assert (x.item(), state["control"].item()) == (3.0, 2.0)


def test_scaffold_with_one_client_is_sgd() -> None:
    """One client, control variates zero at the start: c_k = c ever after, so the correction c - c_k is zero."""
    rule, lr, steps = rules.scaffold_rule(), 0.1, 3
    x, state, own = torch.tensor([2.0]), rule.init(1), torch.zeros(1)
    plain = x.clone()
    for _ in range(4):
        y = x.clone()
        for _ in range(steps):
            y = y - lr * (y - own + state["control"])  # gradient of y^2 / 2
            plain = plain - lr * plain
        new = own - state["control"] + (x - y) / (lr * steps)
        info = rules.RoundInfo(1, 1, lr, sums={"control": new - own})
        x, state = rule.step(x, y - x, state, info)
        own = new
        torch.testing.assert_close(own, state["control"])
        torch.testing.assert_close(x, plain)


def test_feddyn_by_the_letter_and_at_zero() -> None:
    """h - alpha (1/K) sum, x = mean y - h / alpha; alpha = 0 is FedAvg; alpha cancels at the server."""
    updates, start = vectors(3, 5), vectors(1, 5, 9)[0]
    for alpha in (0.01, 0.5):
        h, x = torch.zeros(5), start
        for update in updates:
            h = h - alpha * (4 * update) / 10
            x = (x + update) - h / alpha
        torch.testing.assert_close(run(rules.feddyn_rule(alpha), start, updates), x)
    torch.testing.assert_close(
        run(rules.feddyn_rule(1e-6), start, updates), run(rules.feddyn_rule(1.0), start, updates)
    )
    assert torch.equal(run(rules.feddyn_rule(0.0), start, updates), run(rules.plain_rule(), start, updates))
    with raises("E-AGGREGATE-FEDDYN-ALPHA"):
        rules.feddyn_rule(-1.0)


def test_fednova_equals_fedavg_for_equal_steps() -> None:
    """As clients send them, updates per unit of local work; `tau` is that work (see local/test_optimizers)."""
    updates, counts, start = vectors(3, 40), torch.tensor([5.0, 20.0, 75.0]), vectors(1, 40, 3)[0]
    average = start + weighted_mean(updates, counts)
    tau = sgdm(momentum=0.9).effective_steps(7)
    sent = rules.RoundInfo(10, 3, scalars={"tau": tau})
    nova, _ = rules.fednova_rule().step(start, weighted_mean(updates / tau, counts), {}, sent)
    torch.testing.assert_close(nova, average)


def test_fednova_with_unequal_steps_by_hand() -> None:
    # p = (1/2, 1/2), steps (1, 3): tau_eff = 2; d = (1, 9/3) = (1, 3), mean 2; x = 0 + 2 * 2 = 4 (FedAvg: 5).
    updates, counts, lengths = [torch.tensor([1.0]), torch.tensor([9.0])], torch.ones(2), torch.tensor([1.0, 3.0])
    normal = [c / n for c, n in zip(updates, lengths, strict=True)]
    x, _ = rules.fednova_rule().step(
        torch.zeros(1), weighted_mean(normal, counts), {}, rules.RoundInfo(2, 2, scalars={"tau": 2.0})
    )
    assert x.item() == 4.0


def test_fedgma_by_hand() -> None:
    # Signs agree fully in coordinate 0 (|1/4 + 3/4| = 1), by |1/4 - 3/4| = 1/2 in 1; 2 has a zero: 3/4.
    updates = torch.tensor([[1.0, 4.0, 0.0], [1.0, -4.0, 4.0]])
    counts = torch.tensor([1, 3])
    agreement = rules.sign_agreement(updates, counts)
    assert agreement.tolist() == [1.0, 0.5, 0.75]
    mean, info = weighted_mean(updates, counts), rules.RoundInfo(2, 2, sums={"agreement": agreement})  # (1, -2, 3)
    soft, _ = rules.fedgma_rule(0.7).step(torch.zeros(3), mean, {}, info)
    hard, _ = rules.fedgma_rule(0.7, soft=False).step(torch.zeros(3), mean, {}, info)
    assert soft.tolist() == [1.0, -1.0, 3.0]
    assert hard.tolist() == [1.0, 0.0, 3.0]
    average, _ = rules.fedgma_rule(0.0).step(torch.zeros(3), mean, {}, info)
    assert torch.equal(average, mean)


def test_agreement_at_the_threshold_counts() -> None:
    """Seven of ten against three is 0.4, though 7 * 0.1 - 3 * 0.1 is 0.39999999999999997 in floating point."""
    updates = [torch.ones(1)] * 7 + [-torch.ones(1)] * 3
    info = rules.RoundInfo(10, 10, sums={"agreement": rules.sign_agreement(updates, torch.ones(10))})
    x, _ = rules.fedgma_rule(0.4, soft=False).step(torch.zeros(1), torch.ones(1), {}, info)
    assert x.item() == 1.0


# ---- laws ---------------------------------------------------------------------------------------------------------


@by_rule
def test_steps_are_pure(rule: rules.ServerRule) -> None:
    x, update, state, info = vectors(1, 6)[0], vectors(1, 6, 1)[0], rule.init(6), info_for(rule, 6)
    held = {k: v.clone() for k, v in state.items()}
    first, _ = rule.step(x, update, state, info)
    second, _ = rule.step(x, update, state, info)
    assert torch.equal(first, second)
    assert first.dtype == torch.float32
    assert all(torch.equal(state[k], held[k]) for k in held)
    assert torch.equal(x, vectors(1, 6)[0])


@by_rule
def test_coordinates_that_never_move_stay(rule: rules.ServerRule) -> None:
    """A coordinate whose change was always zero keeps its bits, and a zero round from the start moves nothing."""
    x, updates = vectors(1, 8)[0], vectors(4, 8, 1)
    updates[:, 3:5] = 0
    end = run(rule, x, updates, info_for(rule, 8))
    assert torch.equal(end[3:5], x[3:5])
    assert not torch.equal(end[0], x[0])


@by_rule
def test_buffers_take_the_plain_mean(rule: rules.ServerRule) -> None:
    x, update, info = vectors(1, 8)[0], vectors(1, 8, 1)[0], info_for(rule, 8)
    tailed = rules.plain_tail(rule, 5)
    moved, state = tailed.step(x, update, tailed.init(8), info)
    assert torch.equal(moved[5:], x[5:] + update[5:])
    bare, _ = rule.step(x[:5], update[:5], rule.init(5), info_for(rule, 5))
    assert torch.equal(moved[:5], bare)
    assert all(len(v) == 5 for v in state.values() if v.ndim)


def test_degenerate_settings_are_fedavg() -> None:
    x, updates = vectors(1, 30)[0], vectors(3, 30, 1)
    assert torch.equal(run(rules.momentum(beta=0.0), x, updates), run(rules.plain_rule(), x, updates))
    assert torch.equal(run(rules.plain_rule(), x, torch.zeros(3, 30)), x)


@pytest.mark.parametrize("name", ["scaffold", "fednova", "fedgma"])
def test_missing_information_is_named(name: str) -> None:
    rule = rules.SERVER_RULES[name]()
    with raises("E-AGGREGATE-RULE-INPUT", name=rule.needs[0]):
        rule.step(torch.zeros(2), torch.zeros(2), rule.init(2), INFO)


def test_tau_of_zero_is_refused_because_it_makes_nan() -> None:
    assert math.isnan((torch.zeros(1) / (torch.zeros(1).sqrt() + 0)).item())
    with raises("E-AGGREGATE-TAU"):
        rules.adam(tau=0.0)


# ---- Flower's strategies on the same arrays -------------------------------------------------------------------------


@pytest.fixture
def flower() -> Any:
    os.environ.setdefault("FLWR_TELEMETRY_ENABLED", "0")
    return pytest.importorskip("flwr.server.strategy")


def theirs(flower: Any, name: str, start: Tensor, updates: Tensor, **options: float) -> np.ndarray:
    """Flower averages weights, so each round one client sends x + change."""
    from flwr.common import Code, FitRes, Status, ndarrays_to_parameters, parameters_to_ndarrays

    x = start.numpy().copy()
    strategy = getattr(flower, name)(initial_parameters=ndarrays_to_parameters([x]), **options)
    for turn, update in enumerate(updates, start=1):
        sent = ndarrays_to_parameters([x + update.numpy()])
        parameters, _ = strategy.aggregate_fit(turn, [(None, FitRes(Status(Code.OK, ""), sent, 1, {}))], [])
        x = parameters_to_ndarrays(parameters)[0]
    return x


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(
    ("name", "options", "rule"),
    [
        # Flower corrects Adam's bias with the exponent round + 1, one ahead of Kingma and Ba; `flower` repeats that.
        ("FedAdam", {"eta": 0.1, "tau": 1e-3}, rules.adam(0.1, tau=1e-3, correction="flower")),
        ("FedYogi", {"eta": 0.01, "tau": 1e-3}, rules.yogi(0.01)),
        ("FedAdagrad", {"eta": 0.1, "tau": 1e-3}, rules.adagrad(0.1)),
        ("FedAvgM", {"server_learning_rate": 0.7, "server_momentum": 0.9}, rules.momentum(0.7, 0.9)),
    ],
)
def test_parity_with_flower(flower: Any, name: str, options: dict[str, float], rule: rules.ServerRule) -> None:
    start, updates = vectors(1, 50)[0], vectors(5, 50, 1)
    expected = theirs(flower, name, start, updates, **options)
    np.testing.assert_allclose(run(rule, start, updates), expected, rtol=2e-4, atol=2e-5)


def test_corrections_differ() -> None:
    start, updates = torch.zeros(3), vectors(2, 3)
    ends = [run(rules.adam(correction=c), start, updates) for c in ("none", "kingma", "flower")]
    assert not torch.allclose(ends[0], ends[1])
    assert not torch.allclose(ends[1], ends[2])
    # Kingma: the first step is lr * sign(change) when tau is small
    first = run(rules.adam(0.1, tau=1e-12, correction="kingma"), start, updates[:1])
    torch.testing.assert_close(first, 0.1 * updates[0].sign())
