"""Head initialisation: the head from sums over clients equals the head from the pooled data.

Features are float32 and depend in their last bits on how many rows a batch has, hence the tolerances.
"""

from __future__ import annotations

from collections.abc import Iterable
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from tests.support.errors import raises
from tests.support.toy import CLASSES, WIDTH, Toy
from tests.support.toy_heads import CLIENTS, setting

from fedgraft.client.actions import action_named
from fedgraft.runs import head_init
from fedgraft.runs.head_init import (
    GRID,
    LocalScorer,
    calibrate_temperature,
    install,
    probe_head,
    ridge_head,
    solve,
    strongest_penalty,
)
from fedgraft.server.secure_sum import Sums

ALL = torch.arange(120)


def sums(toy: Toy, clients: Iterable[int] = CLIENTS) -> Sums:
    """What asks these clients of the toy for sums."""
    return Sums(toy.engine.exchange, "toy", clients, toy.network, toy.algorithm.privacy)


def test_sums_over_clients_are_the_sums_over_the_pool() -> None:
    toy, features, labels, _ = setting()
    asking = sums(toy)
    sums_of_clients = asking.ask(action_named("statistics"))
    z = torch.cat([features, torch.ones(len(features), 1, dtype=torch.float64)], 1)
    torch.testing.assert_close(sums_of_clients["gram"], z.T @ z, rtol=1e-5, atol=1e-4)
    one_hot = torch.nn.functional.one_hot(labels, CLASSES).double()
    torch.testing.assert_close(sums_of_clients["cross"], z.T @ one_hot, rtol=1e-5, atol=1e-4)
    assert set(sums_of_clients) == {"gram", "cross"} and asking.clients == tuple(CLIENTS) and not asking.lost


def test_the_ridge_head_is_scikit_learns_on_the_pool() -> None:
    from sklearn.linear_model import Ridge

    toy, features, labels, judge = setting()
    head, penalty = ridge_head(sums(toy), 0.01, judge)
    assert penalty == 0.01 and head.shape == (CLASSES, WIDTH + 1)
    targets = torch.nn.functional.one_hot(labels, CLASSES).double() - 1 / CLASSES
    strength = 0.01 * float(features.square().sum(0).mean())
    theirs = Ridge(alpha=strength, solver="cholesky").fit(features.numpy(), targets.numpy())
    np.testing.assert_allclose(head[:, :-1].numpy(), theirs.coef_, rtol=1e-4, atol=1e-6)
    np.testing.assert_allclose(head[:, -1].numpy(), theirs.intercept_, rtol=1e-4, atol=1e-6)


def test_a_client_that_is_left_out_is_missed() -> None:
    """The planted bug: sums of some clients give another head."""
    toy, _, _, judge = setting()
    whole, _ = ridge_head(sums(toy), 0.01, judge)
    part, _ = ridge_head(sums(toy, range(4)), 0.01, judge)
    assert not torch.allclose(whole, part)


def test_the_penalty_is_chosen_on_the_judges_points() -> None:
    toy, _, _, judge = setting()
    head, penalty = ridge_head(sums(toy), None, judge)
    assert penalty in GRID
    best = max(judge([ridge_head(sums(toy), p, judge)[0]])[0][0] for p in GRID)
    assert judge([head])[0][0] >= best - (best * (1 - best) / judge.count) ** 0.5


def test_among_equals_the_strongest_penalty_wins() -> None:
    _, _, _, judge = setting()
    head = torch.randn(CLASSES, WIDTH + 1, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    assert strongest_penalty([(head, 0.1), (head, 1.0), (head, 0.01)], judge)[1] == 1.0


def test_a_class_nobody_holds_stays_at_rest() -> None:
    """Its targets are the same everywhere, so only the bias speaks of it."""
    z = torch.randn(50, WIDTH, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    z = torch.cat([z - z.mean(0), torch.ones(50, 1, dtype=torch.float64)], 1)
    labels = torch.arange(50) % 2
    cross = z.T @ torch.nn.functional.one_hot(labels, 3).double()
    head = solve(z.T @ z, cross, 0.1)
    assert head[2, :-1].abs().max() < 1e-12 and float(head[2, -1]) == pytest.approx(-1 / 3)


def test_the_probe_head_is_logistic_regression_on_the_pool() -> None:
    from sklearn.linear_model import LogisticRegression

    toy, features, labels, _ = setting()
    decay = 0.01
    head = probe_head(sums(toy), 500, decay, damping=0.01)
    mean, covariance = features.mean(0), torch.cov(features.T, correction=0)
    # Features behind a layer norm have a direction without any variance; the damping keeps it from being blown up.
    factor = torch.linalg.cholesky(covariance + 0.01 * covariance.diagonal().mean() * torch.eye(WIDTH).double())
    white = torch.linalg.solve_triangular(factor, (features - mean).T, upper=False).T
    z = torch.cat([white, torch.ones(len(white), 1, dtype=torch.float64)], 1)
    theirs = LogisticRegression(C=1 / (decay * len(z)), fit_intercept=False, tol=1e-10, max_iter=5000)
    theirs.fit(z.numpy(), labels.numpy())
    ours = torch.cat([features, torch.ones(len(z), 1, dtype=torch.float64)], 1) @ head.T
    np.testing.assert_allclose(ours.numpy(), z.numpy() @ theirs.coef_.T, rtol=1e-2, atol=5e-3)


def test_the_summed_gradient_is_autograds() -> None:
    toy, features, labels, _ = setting()
    head = torch.randn(CLASSES, WIDTH + 1, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    answer = sums(toy).ask(action_named("head_gradient"), head=head)
    z = torch.cat([features, torch.ones(len(features), 1, dtype=torch.float64)], 1)
    leaf = head.clone().requires_grad_()
    loss = torch.nn.functional.cross_entropy(z @ leaf.T, labels, reduction="sum")
    loss.backward()
    torch.testing.assert_close(answer["gradient"], leaf.grad, rtol=1e-5, atol=1e-5)
    assert float(answer["loss"]) == pytest.approx(float(loss.detach()), rel=1e-6)


def test_tempering_scales_and_never_worsens_the_loss() -> None:
    toy, _, _, judge = setting()
    head, _ = ridge_head(sums(toy), 0.01, judge)
    warm = calibrate_temperature(head, judge)
    ratio = warm / head
    assert torch.allclose(ratio, ratio[0, 0].expand_as(ratio)) and float(ratio[0, 0]) >= 1
    (right, loss), (right_before, loss_before) = judge([warm, head])
    assert loss <= loss_before and right == right_before


def test_few_images_that_are_all_right_do_not_make_a_head_sure_of_everything() -> None:
    """Their likelihood rises without end; the scale stops half a nat short of it, and many images move it nowhere."""
    labels = torch.arange(3).repeat(4)
    few = LocalScorer(torch.eye(3)[labels], labels)
    head = torch.cat([torch.eye(3, dtype=torch.float64), torch.zeros(3, 1, dtype=torch.float64)], 1)
    (right, loss), (_, endless) = few([calibrate_temperature(head, few), head * 10**2.5])
    assert right == 1 and endless < 1e-9
    assert 0.25 / len(labels) < loss <= 0.5 / len(labels)  # the next smaller scale of the grid would be beyond

    draws = torch.Generator().manual_seed(0)
    logits = 3 * torch.randn(20_000, 3, generator=draws, dtype=torch.float64)
    drawn = torch.multinomial(logits.softmax(1), 1, generator=draws)[:, 0]
    many = LocalScorer(logits / 3, drawn)  # the head that is right has the scale 3
    assert float(calibrate_temperature(head, many)[0, 0]) == pytest.approx(
        10**0.5, rel=1e-9
    )  # the grid's nearest to it


def test_the_installed_head_classifies_and_the_backbone_keeps_its_bits() -> None:
    toy, _, _, judge = setting()
    backbone = {n: p.detach().clone() for n, p in toy.network.named_parameters() if not n.startswith("head")}
    before = float((toy.network(toy.tests.inputs).argmax(1) == toy.tests.labels).double().mean())
    head, _ = ridge_head(sums(toy), None, judge)
    install(toy.network, head)
    after = float((toy.network(toy.tests.inputs).argmax(1) == toy.tests.labels).double().mean())
    assert after == pytest.approx(judge([head])[0][0], abs=1e-9) and after > before
    assert all(torch.equal(p, backbone[n]) for n, p in toy.network.named_parameters() if n in backbone)


class DeadSums:
    """Sums of clients whose network gives zeros for every image: forty images of four classes."""

    clients = (0,)

    def ask(self, action: object) -> dict[str, torch.Tensor]:
        gram = torch.zeros(WIDTH + 1, WIDTH + 1, dtype=torch.float64)
        gram[-1, -1] = 40
        cross = torch.zeros(WIDTH + 1, 4, dtype=torch.float64)
        cross[-1] = 10
        return {"gram": gram, "cross": cross}


@pytest.mark.parametrize("method", ["ridge", "probe", "lda"])
def test_a_network_whose_features_are_all_zero_is_one_sentence(method: str) -> None:
    """No equation for a head has a solution; without the guard it is torch's own error."""
    options = SimpleNamespace(ridge=None, probe_steps=2)
    setup: Any = SimpleNamespace(config=SimpleNamespace(head=method, model=options))
    dead: Any = DeadSums()
    with raises("E-RUN-HEAD-SINGULAR"):
        head_init._make_head(setup, dead, lambda heads: [])
    with pytest.raises(torch.linalg.LinAlgError):
        head_init._solve_for_head(setup, dead, lambda heads: [])
