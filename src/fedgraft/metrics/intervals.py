"""95 % intervals of metrics in closed form, from counts alone: same sums, same interval, simulated or deployed.

None of them shrinks to a point where everything is right, as a bootstrap does.

- proportions: Wilson, Probable Inference (1927);
- AUROC: the score interval of Newcombe, Confidence intervals for an effect size measure based on the Mann-Whitney
  statistic, part 2 (2006), method 5: the variance of Hanley and McNeil (1982) at the limit, not at the estimate;
- F1 of a class: F1 = 2s/(1+s) grows with s = TP/(TP+FP+FN), a proportion, so Wilson's limits carry over;
- means over classes: from the limits of each (in the way of Zou and Donner, Construction of confidence limits, 2008)
  and the correlation of the classes: none for sensitivities, by the delta method for F1 (Takahashi et al. 2022), and
  the worst there can be for AUROC from histograms, which cannot know it.
"""

from __future__ import annotations

import numpy as np

Array = np.ndarray
Z = 1.959963984540054  # of 95 %


def wilson(hits: Array | float, n: Array | float) -> tuple[Array, Array]:
    """Limits of a proportion; n must be positive."""
    hits, n = np.asarray(hits, float), np.asarray(n, float)
    p, z2 = hits / n, Z * Z
    middle, half = p + z2 / (2 * n), Z * np.sqrt(p * (1 - p) / n + z2 / (4 * n * n))
    low, high = (middle - half) / (1 + z2 / n), (middle + half) / (1 + z2 / n)
    return np.where(hits == 0, 0.0, low.clip(0, p)), np.where(hits == n, 1.0, high.clip(p, 1))


def auroc(area: Array, positives: Array, negatives: Array) -> tuple[Array, Array]:
    """Limits of an AUROC: where it is just Z standard errors of that limit away."""
    area, m, n = (np.asarray(x, float) for x in (area, positives, negatives))
    near, far = np.stack([area, area]), np.stack([np.zeros_like(area), np.ones_like(area)])
    for _ in range(40):
        limit = (near + far) / 2
        spread = 1 + ((m + n) / 2 - 1) * ((1 - limit) / (2 - limit) + limit / (1 + limit))
        outside = (area - limit) ** 2 > Z * Z * limit * (1 - limit) * spread / (m * n)
        near, far = np.where(outside, near, limit), np.where(outside, limit, far)
    # At the very end the variance is zero: a limit there means that the estimate is there as well.
    return np.where(area <= 0, 0.0, near[0]), np.where(area >= 1, 1.0, near[1])


def f1(hits: Array, involved: Array) -> tuple[Array, Array]:
    """Limits of the F1 of a class, from its hits and the images involved (TP + FP + FN)."""
    low, high = wilson(hits, involved)
    return 2 * low / (1 + low), 2 * high / (1 + high)


def mean_of(values: Array, low: Array, high: Array, covariance: Array | None) -> tuple[float, float]:
    """Limits of the mean of estimates with these limits and this covariance (k, k); None: unknown, the widest.

    What lies below the estimates adds like standard errors, and so does what lies above; neither is less than the
    standard error: score limits of few images are narrower, which one class can afford and a mean of many cannot.
    """
    if len(values) == 1:
        return float(low[0]), float(high[0])
    value = float(values.mean())
    if covariance is None:  # as wide as if all rose and fell together, as skewed or even as any dependence makes it
        half = float((high - low).mean()) / 2
        return min(low.mean(), value - half), max(high.mean(), value + half)
    error, correlation = Z * np.sqrt(np.diagonal(covariance)), _correlation(covariance)
    down, up = np.maximum(values - low, error), np.maximum(high - values, error)
    below, above = (float(side @ correlation @ side) ** 0.5 / len(values) for side in (down, up))
    return value - below, value + above


def _correlation(covariance: Array) -> Array:
    """Correlations; what does not vary is correlated with nothing but itself."""
    spread = np.sqrt(np.diagonal(covariance))
    scale = np.divide(1.0, spread, out=np.zeros_like(spread), where=spread > 0)
    found = covariance * np.outer(scale, scale)
    np.fill_diagonal(found, 1.0)
    return found


def share_covariance(hits: Array, n: Array) -> Array:
    """Of shares of separate images (k, k); of a single image unknown, here zero."""
    return np.diag(hits * (n - hits) / (n * n * np.maximum(1, n - 1)))


def f1_covariance(confusion: Array) -> Array:
    """Of the F1 of classes (C, C): an image of one taken for the other counts against both."""
    hits, both = np.diagonal(confusion), confusion.sum(0) + confusion.sum(1)
    size = np.maximum(1, both)  # a class that occurs nowhere has an F1 of 0 here
    score, wrong = 2 * hits / size, both - 2 * hits
    covariance = (confusion + confusion.T) * np.outer(score / size, score / size)
    np.fill_diagonal(covariance, (hits * (2 - 2 * score) ** 2 + wrong * score**2) / size**2)
    few = np.sqrt((both - hits) / np.maximum(1, both - hits - 1))  # as n/(n-1) does for a share
    return covariance * np.outer(few, few)


def calibration_error(count: Array, sure: Array, right: Array) -> tuple[float, float]:
    """Limits of the expected calibration error, from images, sums of confidences and images right by bin.

    The estimate leans upward: chance alone makes gaps. It is off by at most the weighted sum of the errors of the
    bins' accuracies (triangle inequality), so the lower limit is that sum's 97.5 % point below it.
    """
    used = count > 0
    count, sure, right = count[used], sure[used], right[used]
    weight, sure, rate = count / count.sum(), sure / count, right / count
    gap, (low, high) = np.abs(sure - rate), wilson(right, count)
    likely = (right + Z * Z / 2) / (count + Z * Z)  # not zero or one where none or all are right
    error = weight * np.sqrt(likely * (1 - likely) / count)
    slack = float(error.sum() * np.sqrt(2 / np.pi) + Z * np.sqrt((1 - 2 / np.pi) * (error**2).sum()))
    up = weight * (np.maximum(sure - low, high - sure) - gap)
    value = float((weight * gap).sum())
    return max(0.0, value - slack), min(1.0, value + float((up**2).sum() ** 0.5))


def mean(total: float, squares: float, n: int) -> tuple[float | None, float | None]:
    """Student's limits of a mean of numbers not below zero, from sum and sum of squares; one number has none."""
    from scipy.special import stdtrit

    if n < 2:
        return None, None
    variance = max(0.0, squares - total * total / n) / (n - 1)
    half = float(stdtrit(n - 1, 0.975)) * (variance / n) ** 0.5
    return max(0.0, total / n - half), total / n + half
