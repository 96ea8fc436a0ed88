"""Metrics of sets of findings, from the sums of `metrics.label_scores` alone, each with a 95 % interval.

A metric of one finding (`auroc:effusion`) is over the images where it is known. Means over findings (macro) are over
those for which the metric is defined: present in one image and absent from another. Micro metrics pool all known labels
of all findings; their interval treats labels as independent, which those of one image are not.

Scores are known by their histogram bin only. As scikit-learn does with ties, a pair in one bin counts half in an AUROC,
and precision and recall are read off where a bin ends. How far the value can be from that of the exact scores is stored
in `Metric.binned`, and the interval is wider by it.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace

import numpy as np
from torch import Tensor

from fedgraft.core.errors import FedgraftError
from fedgraft.metrics import intervals
from fedgraft.metrics.label_scores import EDGES, FALSE_NEGATIVE, FALSE_POSITIVE, TRUE_NEGATIVE, TRUE_POSITIVE
from fedgraft.metrics.metrics import (
    Array,
    Metric,
    as_numpy,
    by_class_name,
    mean_defined,
    mean_metric,
    ratio,
    share,
)

SPECIFICITIES = {"sensitivity_at_80": 0.80, "sensitivity_at_90": 0.90, "sensitivity_at_95": 0.95}
"""Sensitivities at a specificity of at least so much."""
BY_FINDING_ONLY = ("sensitivity", "specificity")
"""Metrics that have no value over all findings."""
BY_FINDING = (*BY_FINDING_ONLY, "f1", "auroc", "average_precision", *SPECIFICITIES, "calibration_error")
"""Metrics that each finding has, as `name:finding`."""
MICRO = ("auroc_micro", "average_precision_micro")
NAMES = ("accuracy", *BY_FINDING, *MICRO, "log_loss")
"""The metrics of label sets. `accuracy` is the share of images whose known labels are all right at one half."""


def metric_arrays(sums: Mapping[str, Array]) -> dict[str, Array]:
    """Return the metrics without intervals, NaN where undefined; metrics by finding (C,) have the key `name:`."""
    outcomes = sums["outcomes"]
    negative, positive = sums["histogram"]  # (C, B) each
    hits = outcomes[TRUE_POSITIVE]
    present = hits + outcomes[FALSE_NEGATIVE]
    absent = outcomes[TRUE_NEGATIVE] + outcomes[FALSE_POSITIVE]
    images, right = sums["matches"]
    known, probability, found = sums["calibration"]  # (C, 15) each
    gaps = np.abs(probability - found).sum(1)
    by_finding = {
        "sensitivity": ratio(hits, present),
        "specificity": ratio(outcomes[TRUE_NEGATIVE], absent),
        "f1": np.where(present > 0, ratio(2 * hits, present + hits + outcomes[FALSE_POSITIVE]), np.nan),
        "auroc": area(negative, positive),
        "average_precision": average_precision(negative, positive),
    }
    for name, specificity in SPECIFICITIES.items():
        by_finding[name] = ratio(hits_at_specificity(negative, positive, specificity)[0], present)
        by_finding[name] = np.where(absent > 0, by_finding[name], np.nan)
    pooled = (negative.sum(0)[None], positive.sum(0)[None])
    values = {
        "accuracy": ratio(right, images),
        "auroc_micro": area(*pooled)[0],
        "average_precision_micro": average_precision(*pooled)[0],
        "calibration_error": ratio(np.abs(probability.sum(0) - found.sum(0)).sum(), known.sum()),
        "log_loss": ratio(sums["loss"][0], images),
    }
    for name, numbers in by_finding.items():
        values[f"{name}:"] = numbers
        if name not in BY_FINDING_ONLY:
            values[name] = mean_defined(numbers)
    values["calibration_error:"] = ratio(gaps, known.sum(1))
    return values


def area(negative: Array, positive: Array) -> Array:
    """Return the AUROC of each row of histograms (C, B); a pair in one bin counts half."""
    won_pairs = (positive * (negative.cumsum(1) - negative / 2)).sum(1)
    return ratio(won_pairs, positive.sum(1) * negative.sum(1))


def average_precision(negative: Array, positive: Array) -> Array:
    """Return the average precision of each row of histograms (C, B), NaN without both kinds of labels.

    The sum over bins, from the highest scores down, of the gain in recall times the precision at the end of the bin.
    """
    above, hits_above = _counts_above(negative, positive)
    precision = ratio(hits_above + positive, above + positive + negative)
    total = positive.sum(1)
    value = ratio((positive * np.nan_to_num(precision)).sum(1), total)
    return np.where(negative.sum(1) > 0, value, np.nan)


def average_precision_bound(negative: Array, positive: Array) -> Array:
    """Return how far the average precision of exact scores can be from that of their bins, for each row (C,).

    At most all positive labels of a bin come first and are tied, at least each comes by itself after all negative ones.
    """
    from scipy.special import digamma

    above, hits_above = _counts_above(negative, positive)
    binned = positive * np.nan_to_num(ratio(hits_above + positive, above + positive + negative))
    highest = positive * np.nan_to_num(ratio(hits_above + positive, above + positive))
    passed = above + negative  # labels before the first positive one of the bin, at worst
    lowest = positive - (passed - hits_above) * (digamma(passed + positive + 1) - digamma(passed + 1))
    widest = np.maximum((highest - binned).sum(1), (binned - lowest).sum(1))
    return ratio(widest, positive.sum(1))


def _counts_above(negative: Array, positive: Array) -> tuple[Array, Array]:
    """Return how many labels, and how many positive ones, lie in higher bins than each, (C, B) both."""
    both = negative + positive
    labels_above = both.sum(1, keepdims=True) - both.cumsum(1)
    positives_above = positive.sum(1, keepdims=True) - positive.cumsum(1)
    return labels_above, positives_above


def hits_at_specificity(negative: Array, positive: Array, specificity: float) -> tuple[Array, Array]:
    """Return the positive labels above the lowest edge of bins with this specificity, and those in the bin below it.

    Both are (C,). A threshold inside that bin could reach the specificity too, and some of its positive labels.
    """
    below = negative.cumsum(1)  # (C, B): negative labels up to and with this bin
    needed = specificity * negative.sum(1, keepdims=True) - 1e-9
    first = (below >= needed).argmax(1)  # the threshold is this bin's upper edge
    rows = np.arange(len(negative))
    hits = positive.sum(1) - positive.cumsum(1)[rows, first]
    return hits, positive[rows, first]


def best_thresholds(sums: Mapping[str, Tensor], names: Sequence[str]) -> dict[str, float]:
    """Return for each finding the probability above which it is said: where sensitivity plus specificity is greatest.

    Of equal ones it is the nearest to one half; one half for a finding that is not both present and absent somewhere.
    """
    negative, positive = as_numpy(sums)["histogram"]
    edges = EDGES.numpy()
    thresholds = {}
    for finding, name in enumerate(names):
        thresholds[name] = 0.5
        absent = negative[finding].sum()
        present = positive[finding].sum()
        if not absent or not present:
            continue
        specificity = negative[finding].cumsum()[:-1] / absent
        sensitivity = 1 - positive[finding].cumsum()[:-1] / present
        gain = specificity + sensitivity
        best = np.flatnonzero(gain >= gain.max() - 1e-12)
        edge = float(edges[best[np.abs(edges[best]).argmin()]])
        thresholds[name] = 1 / (1 + math.exp(-edge))
    return thresholds


def compute(sums: Mapping[str, Tensor], names: Sequence[str]) -> dict[str, Metric | None]:
    """Return every metric by its name, those of one finding as `name:finding`; None: undefined for these images.

    The `n` of a finding's metric are the known labels behind it, of any other the images.
    """
    arrays = as_numpy(sums)
    if arrays["outcomes"].shape[1] != len(names) or len(set(names)) != len(names):
        raise FedgraftError(
            "E-METRICS-CLASS-NAMES",
            f"sums of {arrays['outcomes'].shape[1]} findings need as many different names, not {len(names)}",
            "give one name per finding",
            classes=arrays["outcomes"].shape[1],
            names=len(names),
        )
    values = metric_arrays(arrays)
    metrics: dict[str, Metric | None] = {"accuracy": share(arrays["matches"][1], arrays["matches"][0])}
    metrics |= _outcome_metrics(arrays["outcomes"], values, names)
    negative, positive = arrays["histogram"]
    metrics |= _ranking_metrics(negative, positive, values, names)
    metrics |= _error_metrics(arrays, values, names)
    images = int(arrays["matches"][0])
    for name, metric in metrics.items():
        if metric is not None and ":" not in name:
            metrics[name] = replace(metric, n=images)
    return metrics


def _outcome_metrics(outcomes: Array, values: Mapping[str, Array], names: Sequence[str]) -> dict[str, Metric | None]:
    """Return sensitivity, specificity and F1 of each finding at a probability of one half, and the mean F1."""
    hits = outcomes[TRUE_POSITIVE]
    present = hits + outcomes[FALSE_NEGATIVE]
    metrics: dict[str, Metric | None] = {}
    for i, name in enumerate(names):
        metrics[f"sensitivity:{name}"] = share(hits[i], present[i])
        absent = outcomes[TRUE_NEGATIVE, i] + outcomes[FALSE_POSITIVE, i]
        metrics[f"specificity:{name}"] = share(outcomes[TRUE_NEGATIVE, i], absent)
    defined = present > 0
    involved = (present + outcomes[FALSE_POSITIVE])[defined]
    metrics |= _means("f1", values, defined, intervals.f1(hits[defined], involved), involved, names)
    return metrics


def _ranking_metrics(
    negative: Array, positive: Array, values: Mapping[str, Array], names: Sequence[str]
) -> dict[str, Metric | None]:
    """Return AUROC, average precision and sensitivities at a specificity: of each finding, their means, and micro.

    `negative` and `positive` are the histograms (C, B).
    """
    defined = (negative.sum(1) > 0) & (positive.sum(1) > 0)
    below, above = negative[defined], positive[defined]
    absent, present = below.sum(1), above.sum(1)
    known = absent + present
    metrics: dict[str, Metric | None] = {}
    limits = intervals.auroc(area(below, above), present, absent)
    bound = _area_bound(below, above)
    metrics |= _means("auroc", values, defined, limits, known, names, bound)
    precision = average_precision(below, above)
    bound = average_precision_bound(below, above)
    metrics |= _means(
        "average_precision", values, defined, intervals.wilson(precision * present, present), known, names, bound
    )
    for name, specificity in SPECIFICITIES.items():
        hits, unsure = hits_at_specificity(below, above, specificity)
        limits = intervals.wilson(hits, present)
        metrics |= _means(name, values, defined, limits, present, names, unsure / present)
    metrics |= _micro_metrics(negative.sum(0)[None], positive.sum(0)[None])
    return metrics


def _area_bound(negative: Array, positive: Array) -> Array:
    """Return how far the AUROC of exact scores can be from that of their bins, for each row of histograms (C,)."""
    return ratio((positive * negative).sum(1) / 2, positive.sum(1) * negative.sum(1))


def _micro_metrics(negative: Array, positive: Array) -> dict[str, Metric | None]:
    """Return AUROC and average precision over the labels of all findings, from histograms (1, B)."""
    absent, present = negative.sum(1), positive.sum(1)
    if not absent[0] or not present[0]:
        return dict.fromkeys(MICRO)
    n = int(absent[0] + present[0])
    value = area(negative, positive)
    precision = average_precision(negative, positive)
    area_limits = intervals.auroc(value, present, absent)
    precision_limits = intervals.wilson(precision * present, present)
    precision_bound = average_precision_bound(negative, positive)
    return {
        "auroc_micro": _metric(value[0], area_limits, 0, n, _area_bound(negative, positive)[0]),
        "average_precision_micro": _metric(precision[0], precision_limits, 0, n, precision_bound[0]),
    }


def _metric(value: float, limits: tuple[Array, Array], i: int, n: int, bound: float) -> Metric:
    """Return the i-th of several metrics, whose interval is wider by the bound of its bins."""
    low = max(0.0, float(limits[0][i] - bound))
    high = min(1.0, float(limits[1][i] + bound))
    return Metric(float(value), low, high, n, binned=float(bound))


def _means(
    name: str,
    values: Mapping[str, Array],
    defined: Array,
    limits: tuple[Array, Array],
    n: Array,
    names: Sequence[str],
    bound: Array | None = None,
) -> dict[str, Metric | None]:
    """Return a metric of each finding as `name:finding`, and their mean as `name`.

    Args:
        name: of the metric.
        values: those of `metric_arrays`.
        defined: for which findings it is defined, bool (C,).
        limits, n, bound: limits, numbers of labels and errors due to bins of these findings.
        names: of the findings.
    """
    numbers = values[f"{name}:"][defined]
    if bound is None:
        bound = np.zeros(len(numbers))
    metrics = [_metric(number, limits, i, int(n[i]), bound[i]) for i, number in enumerate(numbers.tolist())]
    low = np.array([metric.low for metric in metrics])
    high = np.array([metric.high for metric in metrics])
    mean_bound = float(bound.sum() / max(1, len(bound)))
    mean = mean_metric(numbers, (low, high), None, int(np.sum(n)), binned=mean_bound)
    return {name: mean} | by_class_name(name, metrics, defined, names)


def _error_metrics(
    sums: Mapping[str, Array], values: Mapping[str, Array], names: Sequence[str]
) -> dict[str, Metric | None]:
    """Return the expected calibration error, of all known labels and of each finding, and the mean loss of an image."""
    images = int(sums["matches"][0])
    calibration = sums["calibration"]  # (3, C, 15)
    metrics: dict[str, Metric | None] = {"log_loss": None}
    metrics["calibration_error"] = _calibration_metric(calibration.sum(1), float(values["calibration_error"]))
    for finding, name in enumerate(names):
        value = float(values["calibration_error:"][finding])
        metrics[f"calibration_error:{name}"] = _calibration_metric(calibration[:, finding], value)
    if images:
        loss_sum, square_sum = sums["loss"].tolist()
        loss_low, loss_high = intervals.mean_interval(loss_sum, square_sum, images)
        metrics["log_loss"] = Metric(float(values["log_loss"]), loss_low, loss_high, images, "nats")
    return metrics


def _calibration_metric(bins: Array, value: float) -> Metric | None:
    """Return an expected calibration error with its interval from its bins (3, 15), None without a known label."""
    known = int(bins[0].sum())
    if not known:
        return None
    low, high = intervals.calibration_error(*bins)
    return Metric(value, low, high, known, "%")
