"""FedNCM and FedCOF against scikit-learn and a plain loop; the algorithms that are a head and nothing else."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from tests.support.errors import raises
from tests.support.tiny import tiny
from tests.support.toy import CLASSES, WIDTH, Toy
from tests.support.toy_heads import CLIENTS, setting

from fedgraft import algorithms as zoo
from fedgraft.client.actions import action_named
from fedgraft.core.files import read_metrics
from fedgraft.privacy.protection import Privacy, Secure
from fedgraft.runs.closed_form import (
    class_covariances,
    class_mean_head,
    client_class_sums,
    cof_heads,
    lda_heads,
    ncm_head,
)
from fedgraft.runs.loop import run
from fedgraft.runs.setup import with_closed_form_head
from fedgraft.server.secure_sum import Sums


def sums(toy: Toy, privacy: Privacy | None = None) -> Sums:
    return Sums(toy.engine.exchange, "toy", CLIENTS, toy.network, privacy or toy.algorithm.privacy)


def test_fedncm_is_scikit_learns_class_means_by_cosine() -> None:
    from sklearn.metrics.pairwise import cosine_similarity
    from sklearn.neighbors import NearestCentroid

    toy, features, labels, judge = setting()
    head = ncm_head(sums(toy))
    assert head.shape == (CLASSES, WIDTH + 1) and not bool(head[:, -1].any())
    theirs = NearestCentroid().fit(features.numpy(), labels.numpy())
    scale = np.linalg.norm(theirs.centroids_, axis=1, keepdims=True)
    np.testing.assert_allclose(head[:, :-1].numpy(), theirs.centroids_ / scale, rtol=1e-4, atol=1e-6)
    points = judge.features[:, :-1].numpy()
    mine = (judge.features @ head.T).argmax(1).numpy()
    assert (mine == cosine_similarity(points, theirs.centroids_).argmax(1)).all()


def test_fedlda_is_scikit_learns_discriminant_analysis() -> None:
    from sklearn.discriminant_analysis import LinearDiscriminantAnalysis

    toy, features, labels, _ = setting()
    statistics = sums(toy).ask(action_named("statistics"))
    ((head, _),) = lda_heads(statistics["gram"], statistics["cross"], (0.1,))
    theirs = LinearDiscriminantAnalysis(solver="lsqr", shrinkage=0.1)
    theirs.fit(features.double().numpy(), labels.numpy())
    np.testing.assert_allclose(head[:, :-1].numpy(), theirs.coef_, rtol=1e-4, atol=1e-5)
    np.testing.assert_allclose(head[:, -1].numpy(), theirs.intercept_, rtol=1e-4, atol=1e-4)


def test_fedlda_hardly_ever_predicts_a_class_that_nobody_holds() -> None:
    generator = torch.Generator().manual_seed(0)
    features = torch.cat([torch.randn(200, 4, generator=generator).double(), torch.ones(200, 1)], 1)
    labels = torch.arange(200) % 2
    features[labels == 1, 0] += 4
    cross = torch.zeros(5, 3, dtype=torch.float64).index_add_(1, labels, features.T)
    ((head, _),) = lda_heads(features.T @ features, cross, (0.1,))
    assert head.isfinite().all()
    predicted = (features @ head.T).argmax(1)
    assert int((predicted == 2).sum()) < 10 and float((predicted == labels).double().mean()) > 0.9


def test_fedncm_by_hand_and_a_class_nobody_holds() -> None:
    """Summed features (3, 4) of two images: the direction (0.6, 0.8). Nobody's class points the other way."""
    cross = torch.tensor([[3.0, 0.0], [4.0, 0.0], [2.0, 0.0]], dtype=torch.float64)
    assert class_mean_head(cross).tolist() == [[0.6, 0.8, 0.0], [-0.6, -0.8, 0.0]]


def test_the_hidden_class_means_are_the_clear_ones() -> None:
    toy, _, _, _ = setting()
    hidden = ncm_head(sums(toy, Secure()))
    torch.testing.assert_close(hidden, ncm_head(sums(toy)), rtol=1e-6, atol=1e-8)
    with raises("E-RUN-COF-HIDDEN"):
        client_class_sums(sums(toy, Secure()))


def by_class(toy_features: torch.Tensor, owner: torch.Tensor, labels: torch.Tensor, classes: int) -> torch.Tensor:
    """Each owner's sums by class, (owners, width+1, classes), by a loop."""
    n, width = int(owner.max()) + 1, toy_features.shape[1]
    each = torch.zeros(n, width + 1, classes, dtype=torch.float64)
    for z, k, c in zip(toy_features, owner, labels, strict=True):
        each[k, :-1, c] += z
        each[k, -1, c] += 1
    return each


def test_fedcofs_covariance_by_hand() -> None:
    """One class, width 1: clients with means 0 (n=2) and 3 (n=1). Mean 1; 2·1 + 1·4 = 6 over K-1 = 1; times n-1 = 2."""
    each = torch.tensor([[[0.0], [2.0]], [[3.0], [1.0]]], dtype=torch.float64)
    within, seen = class_covariances(each)
    assert within.tolist() == [[12.0]] and int(seen) == 1
    with raises("E-RUN-COF-ONE-OWNER"):
        cof_heads(each[:1], (0.1,))


@pytest.mark.slow
def test_fedcofs_covariance_is_unbiased_where_clients_draw_alike() -> None:
    """Over many drawn federations the mean estimate is the true covariance, within five standard errors."""
    g = torch.Generator().manual_seed(0)
    root = torch.tensor([[1.0, 0.0], [0.7, 0.5]], dtype=torch.float64)
    true, estimates = root @ root.T, []
    owner = torch.arange(24) % 6
    for _ in range(400):
        z = torch.randn(24, 2, generator=g, dtype=torch.float64) @ root.T
        each = by_class(z, owner, torch.zeros(24, dtype=torch.int64), 1)
        estimates.append(class_covariances(each)[0] / 23)
    stack = torch.stack(estimates)
    error = stack.std(0) / 400**0.5
    assert bool(((stack.mean(0) - true).abs() < 5 * error).all())


def test_fedcof_with_one_image_per_client_is_the_scatter_within_classes() -> None:
    """Then client means are the images themselves: exactly the pooled scatter, and the head scikit-learn's solution."""
    g = torch.Generator().manual_seed(1)
    labels = torch.arange(30) % 3
    z = torch.randn(30, 4, generator=g, dtype=torch.float64) + labels[:, None]
    each = by_class(z, torch.arange(30), labels, 3)
    within, _ = class_covariances(each)
    wanted = sum(
        (z[labels == c] - z[labels == c].mean(0)).T @ (z[labels == c] - z[labels == c].mean(0)) for c in range(3)
    )
    torch.testing.assert_close(within, wanted)
    ((head, _),) = cof_heads(each, (0.5,))
    raw = torch.linalg.inv(wanted + 0.5 * wanted.diagonal().mean() * torch.eye(4)) @ torch.stack(
        [z[labels == c].sum(0) for c in range(3)], 1
    )
    torch.testing.assert_close(head[:, :-1], (raw / raw.norm(dim=0)).T)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["fed3r", "fedprobe", "fedncm", "fedcof", "fedlda"])
def test_a_head_is_a_whole_algorithm(name: str, tmp_path: Path) -> None:
    """No round, no update; the head is what `model.head` makes, bit for bit."""
    config = tiny(f"algorithm.name={name}", "rounds.total=7")
    summary = run(config, tmp_path / name, console=False)
    assert summary["rounds"] == 0 and "note" not in summary
    (lines,) = read_metrics(tmp_path / name)
    assert "bytes_up" not in lines and summary["bytes_up"] == summary["bytes_up_outside_rounds"]
    numbers = {"fed3r": 33 * 33 + 33 * 10, "fedncm": 33 * 10, "fedcof": 33 * 10, "fedlda": 33 * 43}.get(
        name
    )  # float64, width 32
    if numbers:
        assert 3 * 8 * numbers < summary["bytes_up"] < 3 * (8 * numbers + 600) and 0 < summary["bytes_down"] < 1500
    else:  # statistics once, then a gradient for every step
        assert summary["bytes_up"] > 3 * 8 * (33 * 43 + 330) and summary["bytes_down"] > 3 * 8 * 330
    kind = zoo.named(name).closed_form
    plain = run(tiny(f"model.head={kind}", "rounds.total=0"), tmp_path / "plain", console=False)
    assert summary["test"] == plain["test"] and summary["test"]["accuracy"] > 0.2


def test_another_head_or_a_body_beside_it_is_refused() -> None:
    with raises("E-RUN-OTHER-HEAD"):
        with_closed_form_head(tiny("algorithm.name=fed3r", "model.head=ncm"), zoo.fed3r())
    with raises("E-ALGORITHM-COMBINATION"):
        zoo.fedncm(trainable=zoo.fedbabu().trainable)
