"""DeLong and McNemar against brute force and a published example; sites against one place; small groups stay hidden."""

from __future__ import annotations

import itertools
import math

import numpy as np
import pytest
import torch
from tests.support.errors import raises

from fedgraft.metrics.comparison import (
    comparison_sums,
    delong,
    implausible_comparison,
    merge_comparisons,
    paired_tests,
)
from fedgraft.metrics.statistics import holm


def brute_force(pair: np.ndarray, present: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Areas and covariance by the definition of DeLong et al. (1988), equations 3 to 5: every pair of images."""
    above, below = pair[:, present], pair[:, ~present]
    m, n = above.shape[1], below.shape[1]
    v10, v01 = np.zeros((2, m)), np.zeros((2, n))
    for model, i, j in itertools.product(range(2), range(m), range(n)):
        psi = 1.0 if above[model, i] > below[model, j] else 0.5 if above[model, i] == below[model, j] else 0.0
        v10[model, i] += psi / n
        v01[model, j] += psi / m
    area = v10.mean(1)
    covariance = np.zeros((2, 2))
    for a, b in itertools.product(range(2), range(2)):
        s10 = sum((v10[a, i] - area[a]) * (v10[b, i] - area[b]) for i in range(m)) / (m - 1)
        s01 = sum((v01[a, j] - area[a]) * (v01[b, j] - area[b]) for j in range(n)) / (n - 1)
        covariance[a, b] = s10 / m + s01 / n
    return area, covariance


def problem(seed: int, n: int, ties: bool) -> tuple[np.ndarray, np.ndarray]:
    """Return correlated scores of two models and labels."""
    rng = np.random.default_rng(seed)
    present = rng.random(n) < 0.3
    present[:2], present[2:4] = True, False
    common = rng.normal(size=n) + present
    pair = np.stack([common + rng.normal(size=n), common + 0.5 * rng.normal(size=n)])
    if ties:
        pair = np.round(pair)
    return pair, present


@pytest.mark.parametrize("ties", [False, True])
@pytest.mark.parametrize("seed", range(4))
def test_delong_is_the_definition(seed: int, ties: bool) -> None:
    pair, present = problem(seed, 80, ties)
    area, covariance = delong(pair, present)
    expected_area, expected_covariance = brute_force(pair, present)
    assert np.abs(area - expected_area).max() < 1e-12
    assert np.abs(covariance - expected_covariance).max() < 1e-12
    from sklearn.metrics import roc_auc_score

    for model in range(2):
        assert abs(area[model] - roc_auc_score(present, pair[model])) < 1e-12


def test_delong_without_ties_counted_half_is_another_number() -> None:
    """The broken variant: ordinal ranks in place of midranks."""
    pair, present = problem(1, 80, True)
    ranks = pair.argsort(kind="stable").argsort().astype(float)
    assert np.abs(delong(ranks, present)[0] - brute_force(pair, present)[0]).max() > 1e-3


def test_the_test_of_one_site_is_delongs() -> None:
    pair, present = problem(7, 120, False)
    logits = [torch.tensor(np.stack([pair[model], -pair[model]], axis=1)) for model in range(2)]
    labels = torch.tensor(np.stack([present, ~present], axis=1).astype(np.int64))
    (test, mirrored) = paired_tests(comparison_sums(*logits, labels), ["a", "b"]).areas
    area, covariance = brute_force(pair, present)
    error = math.sqrt(covariance[0, 0] + covariance[1, 1] - 2 * covariance[0, 1])
    z = (area[1] - area[0]) / error
    p = math.erfc(abs(z) / math.sqrt(2))
    # Scores are rounded to 2^-20 or so before they are ranked; no two of these are that near.
    for value, expected in ((test.first, area[0]), (test.second, area[1]), (test.z, z), (test.p, p)):
        assert abs(value - expected) < 1e-12
    assert abs(test.high - test.low - 2 * 1.959963984540054 * error) < 1e-12
    assert abs(mirrored.difference - test.difference) < 1e-12  # absent for present, with the scores reversed
    assert test.heterogeneity is None


def test_unknown_labels_are_not_there() -> None:
    pair, present = problem(3, 60, True)
    logits = [torch.tensor(np.stack([pair[model]] * 2, axis=1)) for model in range(2)]
    labels = torch.tensor(np.stack([present, present], axis=1).astype(np.int64))
    labels[::5, 1] = -1
    kept = torch.arange(60) % 5 != 0
    whole = comparison_sums(*logits, labels)
    part = comparison_sums(logits[0][kept], logits[1][kept], labels[kept].clone())
    assert torch.equal(whole["areas"][:, 1], part["areas"][:, 0])
    assert torch.equal(whole["discordant"][:, 1], part["discordant"][:, 1])


def site(seed: int, n: int = 90, classes: int = 3) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return the logits of two models and label sets of one site."""
    rng = np.random.default_rng([11, seed])
    labels = (rng.random((n, classes)) < 0.4).astype(np.int64)
    common = rng.normal(size=(n, classes)) + labels
    first = common + rng.normal(size=(n, classes))
    second = common + 0.6 * rng.normal(size=(n, classes))
    labels[rng.random((n, classes)) < 0.1] = -1
    return torch.tensor(first), torch.tensor(second), torch.tensor(labels)


def test_sites_are_pooled_by_inverse_variance() -> None:
    sites = [comparison_sums(*site(number)) for number in range(4)]
    pooled = paired_tests(merge_comparisons(sites, 3), ["a", "b", "c"])
    for finding, name in enumerate(["a", "b", "c"]):
        tests = [paired_tests(sums, ["a", "b", "c"]).areas[finding] for sums in sites]
        weights = np.array([((test.high - test.low) / (2 * 1.959963984540054)) ** -2 for test in tests])
        gaps = np.array([test.difference for test in tests])
        mean = (weights * gaps).sum() / weights.sum()
        q = (weights * (gaps - mean) ** 2).sum()
        from scipy.stats import chi2, norm

        test = pooled.areas[finding]
        assert test.finding == name and test.sites == 4
        assert abs(test.difference - mean) < 1e-12
        assert abs(test.p - 2 * norm.sf(abs(mean) * math.sqrt(weights.sum()))) < 1e-12
        assert test.heterogeneity is not None and abs(test.heterogeneity - chi2.sf(q, 3)) < 1e-9


def test_mcnemar_is_the_exact_binomial_test_over_all_sites() -> None:
    parts = [site(number) for number in range(3)]
    sums = merge_comparisons([comparison_sums(*part) for part in parts], 3)
    result = paired_tests(sums, ["a", "b", "c"])
    first, second, labels = (torch.cat([part[i] for part in parts]) for i in range(3))
    for finding, test in enumerate(result.by_finding):
        known = labels[:, finding] != -1
        truth = labels[known, finding] == 1
        one = ((first[known, finding] > 0) == truth).numpy()
        two = ((second[known, finding] > 0) == truth).numpy()
        b, c = int((one & ~two).sum()), int((~one & two).sum())
        tail = sum(math.comb(b + c, k) for k in range(min(b, c) + 1)) / 2 ** (b + c)
        assert (test.only_first, test.only_second, test.images) == (b, c, int(known.sum()))
        assert abs(test.p - min(1.0, 2 * tail)) < 1e-12
    assert result.accuracy is not None and result.accuracy.images == len(labels)


def test_classes_are_compared_against_the_rest() -> None:
    rng = np.random.default_rng(2)
    labels = torch.tensor(rng.integers(0, 3, 90))
    first = torch.tensor(rng.normal(size=(90, 3))) + torch.nn.functional.one_hot(labels, 3)
    second = first + torch.tensor(rng.normal(size=(90, 3)))
    result = paired_tests(comparison_sums(first, second, labels), ["a", "b", "c"])
    from sklearn.metrics import roc_auc_score

    for name, test in enumerate(result.areas):
        score = torch.softmax(first, 1)[:, name]
        assert abs(test.first - roc_auc_score(labels == name, score)) < 1e-9
    assert result.by_finding == ()
    assert result.accuracy is not None
    gained = (second.argmax(1) == labels).double().mean() - (first.argmax(1) == labels).double().mean()
    assert abs(result.accuracy.difference - float(gained)) < 1e-12


def test_what_has_no_variance_is_left_out() -> None:
    first, _, labels = site(0)
    same = paired_tests(comparison_sums(first, first.clone(), labels), ["a", "b", "c"])
    assert same.areas == ()
    assert same.accuracy is not None and same.accuracy.p == 1.0
    empty = paired_tests(merge_comparisons([], 3), ["a", "b", "c"])
    assert empty.areas == () and empty.accuracy is None


def test_small_groups_are_left_out() -> None:
    first, second, labels = site(0)
    labels[:, 1] = 0
    labels[:4, 1] = 1
    sums = comparison_sums(first, second, labels, smallest=5)
    assert sums["sites"].tolist() == [1, 0, 1]
    assert not sums["discordant"][:, 1].any() and not sums["areas"][:, 1].any()
    assert comparison_sums(first, second, labels, smallest=4)["sites"].tolist() == [1, 1, 1]


def test_sums_that_cannot_be_are_noticed() -> None:
    sums = comparison_sums(*site(0))
    assert implausible_comparison(sums) == ""
    for name, place, value in (
        ("areas", (0, 0), -1.0),
        ("areas", (1, 1), 1e9),
        ("areas", (3, 0), 1e6),
        ("right", (0,), 0.5),
        ("right", (1,), 1e6),
        ("discordant", (0, 2), 1e6),
    ):
        lie = {key: tensor.clone() for key, tensor in sums.items()}
        lie[name][place] = value
        assert implausible_comparison(lie), name
    with raises("E-METRICS-INPUT-SHAPE"):
        comparison_sums(torch.zeros(3, 2), torch.zeros(3, 3), torch.zeros(3, 2))


def test_holm_is_the_procedure_of_1979() -> None:
    assert holm([0.01, 0.04, 0.03, 0.005]) == pytest.approx([0.03, 0.06, 0.06, 0.02], abs=1e-15)
    assert holm([0.6, 0.9]) == [1.0, 1.0]
    assert holm([]) == []
