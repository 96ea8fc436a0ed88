"""95 % confidence intervals of metrics in closed form, from counts alone: same sums, same interval.

None of them shrinks to a point where every prediction is correct, as a bootstrap does.

- proportions: Wilson, Probable Inference (1927);
- AUROC: the score interval of Newcombe, Confidence intervals for an effect size measure based on the Mann-Whitney
  statistic, part 2 (2006), method 5: the variance of Hanley and McNeil (1982) at the limit, not at the estimate;
- F1 of a class: F1 = 2s/(1+s) grows with s = TP/(TP+FP+FN), a proportion, so Wilson's limits carry over;
- means over classes: from the limits of each (in the way of Zou and Donner, Construction of confidence limits, 2008)
  and the correlation of the classes: none for sensitivities, by the delta method for F1 (Takahashi et al. 2022), and
  the worst possible for AUROC from histograms, which do not determine it.

Every function returns (lower limit, upper limit).
"""

from __future__ import annotations

import numpy as np

Array = np.ndarray
Z = 1.959963984540054  # of 95 %
_BISECTIONS = 40


def wilson(hits: Array | float, n: Array | float) -> tuple[Array, Array]:
    """Return Wilson's limits of a proportion of `hits` among `n`; n must be positive."""
    hits = np.asarray(hits, float)
    n = np.asarray(n, float)
    p = hits / n
    z2 = Z * Z
    middle = p + z2 / (2 * n)
    half = Z * np.sqrt(p * (1 - p) / n + z2 / (4 * n * n))
    low = (middle - half) / (1 + z2 / n)
    high = (middle + half) / (1 + z2 / n)
    return np.where(hits == 0, 0.0, low.clip(0, p)), np.where(hits == n, 1.0, high.clip(p, 1))


def auroc(area: Array, positives: Array, negatives: Array) -> tuple[Array, Array]:
    """Return the limits of an AUROC `area`: the values that are Z of their own standard errors away from it.

    `positives` and `negatives` are numbers of images.
    """
    area = np.asarray(area, float)
    m = np.asarray(positives, float)
    n = np.asarray(negatives, float)
    # Bisection for both limits at once: `inner` starts at the estimate, `outer` at 0 and at 1.
    inner = np.stack([area, area])
    outer = np.stack([np.zeros_like(area), np.ones_like(area)])
    for _ in range(_BISECTIONS):
        limit = (inner + outer) / 2
        spread = 1 + ((m + n) / 2 - 1) * ((1 - limit) / (2 - limit) + limit / (1 + limit))
        outside = (area - limit) ** 2 > Z * Z * limit * (1 - limit) * spread / (m * n)
        inner = np.where(outside, inner, limit)
        outer = np.where(outside, limit, outer)
    # At 0 and 1 the variance is zero: a limit there means that the estimate is there as well.
    return np.where(area <= 0, 0.0, inner[0]), np.where(area >= 1, 1.0, inner[1])


def f1(hits: Array, involved: Array) -> tuple[Array, Array]:
    """Return the limits of the F1 of a class, from its hits (TP) and the images involved (TP + FP + FN)."""
    low, high = wilson(hits, involved)
    return 2 * low / (1 + low), 2 * high / (1 + high)


def mean_of(values: Array, low: Array, high: Array, covariance: Array | None) -> tuple[float, float]:
    """Return the limits of the mean of the estimates `values` (k,) with these limits and this covariance (k, k).
    Without a covariance (None) the dependence is unknown and the widest interval is returned. Distances below the
    estimates add like standard errors, and so do distances above; neither is less than the standard error: score limits
    of few images are narrower, which is fine for one class and not for a mean of many.
    """
    if len(values) == 1:
        return float(low[0]), float(high[0])
    value = float(values.mean())
    if covariance is None:  # as wide as if all rose and fell together, as skewed or even as any dependence makes it
        half = float((high - low).mean()) / 2
        return min(low.mean(), value - half), max(high.mean(), value + half)
    standard_error = Z * np.sqrt(np.diagonal(covariance))
    correlation = _correlation(covariance)
    down = np.maximum(values - low, standard_error)
    up = np.maximum(high - values, standard_error)
    below = float(down @ correlation @ down) ** 0.5 / len(values)
    above = float(up @ correlation @ up) ** 0.5 / len(values)
    return value - below, value + above


def _correlation(covariance: Array) -> Array:
    """Return the correlation matrix; an estimate of variance zero is correlated only with itself."""
    deviation = np.sqrt(np.diagonal(covariance))
    scale = np.divide(1.0, deviation, out=np.zeros_like(deviation), where=deviation > 0)
    correlation = covariance * np.outer(scale, scale)
    np.fill_diagonal(correlation, 1.0)
    return correlation


def share_covariance(hits: Array, n: Array) -> Array:
    """Return the covariance (k, k) of shares of disjoint sets of images; the variance of a single image counts as 0."""
    return np.diag(hits * (n - hits) / (n * n * np.maximum(1, n - 1)))


def f1_covariance(confusion: Array) -> Array:
    """Return the covariance (C, C) of the F1 of classes, from the confusion matrix (true class by row).

    A confusion of two classes lowers the F1 of both.
    """
    hits = np.diagonal(confusion)
    both = confusion.sum(0) + confusion.sum(1)
    size = np.maximum(1, both)  # a class that occurs nowhere has an F1 of 0 here
    score = 2 * hits / size
    wrong = both - 2 * hits
    covariance = (confusion + confusion.T) * np.outer(score / size, score / size)
    np.fill_diagonal(covariance, (hits * (2 - 2 * score) ** 2 + wrong * score**2) / size**2)
    small_sample = np.sqrt((both - hits) / np.maximum(1, both - hits - 1))  # as n/(n-1) does for a share
    return covariance * np.outer(small_sample, small_sample)


def calibration_error(count: Array, confidence_sum: Array, correct: Array) -> tuple[float, float]:
    """Return the limits of the expected calibration error, from images, summed confidences and correct images by bin.

    The estimate is biased upward: chance alone makes gaps. It is off by at most the weighted sum of the errors of the
    bins' accuracies (triangle inequality), so the lower limit is that sum's 97.5 % point below it.
    """
    used = count > 0
    count = count[used]
    correct = correct[used]
    weight = count / count.sum()
    confidence = confidence_sum[used] / count
    accuracy = correct / count
    gap = np.abs(confidence - accuracy)
    low, high = wilson(correct, count)
    likely = (correct + Z * Z / 2) / (count + Z * Z)  # not zero or one where none or all are correct
    error = weight * np.sqrt(likely * (1 - likely) / count)
    slack = float(error.sum() * np.sqrt(2 / np.pi) + Z * np.sqrt((1 - 2 / np.pi) * (error**2).sum()))
    up = weight * (np.maximum(confidence - low, high - confidence) - gap)
    value = float((weight * gap).sum())
    return max(0.0, value - slack), min(1.0, value + float((up**2).sum() ** 0.5))


def mean_interval(total: float, squares: float, n: int) -> tuple[float | None, float | None]:
    """Return Student's limits of a mean of n non-negative numbers, from their sum and sum of squares.

    A single number has no interval: (None, None).
    """
    from scipy.special import stdtrit

    if n < 2:
        return None, None
    variance = max(0.0, squares - total * total / n) / (n - 1)
    half = float(stdtrit(n - 1, 0.975)) * (variance / n) ** 0.5
    return max(0.0, total / n - half), total / n + half
