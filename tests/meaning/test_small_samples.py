"""Intervals and estimates of few images: their corrections by hand, and random signs that are signs."""

from __future__ import annotations

import numpy as np
import torch

from fedgraft.edit.fisher import logit_gradients
from fedgraft.metrics.intervals import f1_covariance


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
