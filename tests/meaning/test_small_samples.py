"""Limits and small samples: corrections by hand, random signs that are signs, and the ends of allowed ranges."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from scipy import stats
from tests.support.errors import raises

from fedgraft.edit.fisher import logit_gradients
from fedgraft.metrics import intervals
from fedgraft.metrics.intervals import f1_covariance
from fedgraft.privacy.secagg.ring import Ring, Segment
from fedgraft.server.validate import largest


def test_the_variance_of_f1_is_corrected_for_the_images_that_can_change_it() -> None:
    """F1 depends on the m images that are of the class or taken for it: m / (m - 1), as for any variance of a mean."""
    confusion = np.array([[3.0, 1.0, 0.0], [2.0, 4.0, 1.0], [0.0, 1.0, 2.0]])
    covariance = f1_covariance(confusion)
    for c in range(3):
        hits = confusion[c, c]
        missed_or_wrong = confusion[c].sum() + confusion[:, c].sum() - 2 * hits
        size = 2 * hits + missed_or_wrong
        score = 2 * hits / size
        # Each hit moves F1 by (2 - 2 F1) / size, each other image by -F1 / size: the delta method.
        plain = (hits * (2 - 2 * score) ** 2 + missed_or_wrong * score**2) / size**2
        images = hits + missed_or_wrong
        np.testing.assert_allclose(covariance[c, c], plain * images / (images - 1), rtol=1e-12)


def test_random_signs_estimate_the_expected_fisher_without_bias() -> None:
    """E[g g'] over random signs is diag(p) - p p', the Fisher information of the logits."""
    logits = torch.tensor([[0.3, -0.7, 1.1, 0.0]]).repeat(40_000, 1)
    targets = torch.zeros(len(logits), dtype=torch.long)
    (gradient,) = logit_gradients(logits, targets, "rademacher", torch.Generator().manual_seed(0))
    p = logits[0].softmax(0)
    torch.testing.assert_close(
        gradient.T @ gradient / len(logits), torch.diag(p) - torch.outer(p, p), rtol=0, atol=0.01
    )
    torch.testing.assert_close(gradient.mean(0), torch.zeros(4), rtol=0, atol=0.01)


@pytest.mark.parametrize(("area", "positives", "negatives"), [(0.8, 5, 7), (0.6, 40, 3), (0.97, 100, 900)])
def test_limits_of_an_auroc_are_z_standard_errors_of_their_own_away(
    area: float, positives: int, negatives: int
) -> None:
    """Newcombe 2006, method 5: Hanley and McNeil's variance with (m + n) / 2 in the place of m and of n."""
    low, high = intervals.auroc(np.array(area), np.array(positives), np.array(negatives))
    for limit in (float(low), float(high)):
        middle = (positives + negatives) / 2
        q1 = limit / (2 - limit) - limit**2  # of one positive with two negatives, over chance
        q2 = 2 * limit**2 / (1 + limit) - limit**2
        variance = (limit * (1 - limit) + (middle - 1) * (q1 + q2)) / (positives * negatives)
        assert abs(area - limit) == pytest.approx(1.959964 * variance**0.5, rel=1e-4)


def test_the_largest_value_of_nothing_is_zero() -> None:
    assert largest(torch.empty(0)) == 0.0
    assert largest(torch.tensor([0.5, -2.0, 1.0])) == 2.0


def test_a_secure_sum_has_one_to_a_million_clients() -> None:
    segments = (Segment("x", 3, 1.0),)
    for clients in (1, 2**20):
        assert Ring(segments, clients).clients == clients
    for clients in (0, 2**20 + 1):
        with raises("E-PRIVACY-RING"):
            Ring(segments, clients)


def test_the_interval_of_a_mean_is_students() -> None:
    values = np.array([0.2, 1.7, 0.9, 3.0])
    low, high = intervals.mean_interval(float(values.sum()), float((values**2).sum()), len(values))
    expected = stats.t.interval(0.95, len(values) - 1, values.mean(), stats.sem(values))
    assert (low, high) == pytest.approx((max(0.0, expected[0]), expected[1]))
    assert intervals.mean_interval(1.0, 1.0, 1) == (None, None)
