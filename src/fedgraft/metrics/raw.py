"""Metrics from the predictions themselves (a simulation, a site's own page): exact AUROC and paired comparisons.

The exact AUROC and its covariance follow DeLong et al., Comparing the areas under two or more correlated receiver
operating characteristic curves (1988).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np
import torch
from torch import Tensor

from fedgraft.core.label_sets import ABSENT, PRESENT, are_label_sets
from fedgraft.core.rng import numpy_stream
from fedgraft.metrics import label_metrics, scores
from fedgraft.metrics.label_scores import count_label_scores
from fedgraft.metrics.metrics import UNITS, Array, Metric, auroc_metrics, compute, metric_arrays


def exact(logits: Tensor, labels: Tensor, names: Sequence[str]) -> dict[str, Metric | None]:
    """Return every metric of these predictions, with the AUROC of the scores themselves, ties counted as half.

    `logits` are (n, C), `names` the classes or findings. The interval of the mean AUROC is narrower than from
    histograms: here the covariance of the classes is known.
    """
    if are_label_sets(labels):
        metrics = label_metrics.compute(count_label_scores(logits, labels), names)
        positive = (labels == PRESENT).cpu().numpy()  # (n, C)
        negative = (labels == ABSENT).cpu().numpy()
        score = logits.cpu().double().nan_to_num(0.0).numpy()
    else:
        metrics = compute(scores.count_scores(logits, labels, len(names)), names)
        positive = (labels.cpu()[:, None] == torch.arange(len(names))).numpy()
        negative = ~positive
        score = scores.log_odds(logits).numpy()
    sides = np.stack([negative.sum(0), positive.sum(0)])
    defined = sides.min(0) > 0
    area = np.empty(defined.sum())
    influence = np.zeros((defined.sum(), len(labels)))  # 0 for an image that does not say the finding
    for i, number in enumerate(np.flatnonzero(defined)):
        known = positive[:, number] | negative[:, number]
        area[i], influence[i, known] = auroc_influence(score[known, number], positive[known, number])
    covariance = influence @ influence.T
    return metrics | auroc_metrics(area, np.zeros(len(area)), sides, covariance, names)


def auroc_influence(score: Array, positive: Array) -> tuple[float, Array]:
    """Return the AUROC of scores (n,) and the influence of each image on it, (n,).

    `positive` (n,) is bool; both sides must have images. The influences' squares add up to the variance (DeLong).
    """
    from scipy.stats import rankdata

    m = positive.sum()
    n = (~positive).sum()
    placement = rankdata(score)
    placement[positive] = (placement[positive] - rankdata(score[positive])) / n  # share of negatives below it
    placement[~positive] = 1 - (placement[~positive] - rankdata(score[~positive])) / m  # share of positives above it
    area = placement[positive].mean()
    return float(area), (placement - area) / np.where(positive, m, n)


def paired_bootstrap(
    first: Tensor, second: Tensor, labels: Tensor, names: Sequence[str], seed: int, draws: int = 1000
) -> dict[str, Metric | None]:
    """Return every metric of the first model minus the second's on the same images, with a bootstrap interval.

    `first` and `second` are the models' logits (n, C). The limits are the 2.5 % and 97.5 % points over the draws in
    which the metric is defined. AUROCs are those of the histograms.
    """
    stream = numpy_stream(seed, "paired bootstrap")
    n = len(labels)
    samples = [np.arange(n)]  # the images themselves, then the resamples
    if n:
        for _ in range(draws):
            samples.append(stream.integers(0, n, n))
    first_values = _values_by_sample(first, labels, samples, names)
    second_values = _values_by_sample(second, labels, samples, names)
    differences = {}
    for name in first_values:
        differences[name] = _difference(first_values[name] - second_values[name], n, name)
    return differences


def _sums_by_sample(
    logits: Tensor, labels: Tensor, samples: Sequence[Array], classes: int
) -> Iterator[dict[str, Tensor]]:
    """Yield the sums for metrics of each sample of rows."""
    if are_label_sets(labels):
        for sample in samples:
            rows = torch.from_numpy(sample)
            yield count_label_scores(logits[rows], labels[rows])
        return
    images = scores.score_images(logits, labels, classes)
    for sample in samples:
        rows = torch.from_numpy(sample)
        sampled = scores.ImageScores(*(tensor[rows] for tensor in images))
        yield scores.sum_scores(sampled, classes)


def _values_by_sample(
    logits: Tensor, labels: Tensor, samples: Sequence[Array], names: Sequence[str]
) -> dict[str, Array]:
    """Return every metric (by name) on each sample of rows, (len(samples),) each; NaN where it is undefined."""
    arrays_of = label_metrics.metric_arrays if are_label_sets(labels) else metric_arrays
    values: dict[str, list[float]] = {}
    for sums in _sums_by_sample(logits, labels, samples, len(names)):
        for name, value in arrays_of({key: tensor.numpy() for key, tensor in sums.items()}).items():
            if not name.endswith(":"):
                values.setdefault(name, []).append(float(value))
                continue
            for class_name, number in zip(names, value, strict=True):
                values.setdefault(name + class_name, []).append(float(number))
    return {name: np.array(numbers) for name, numbers in values.items()}


def _difference(gaps: Array, n: int, name: str) -> Metric | None:
    """Return the first gap, that of all images, as a metric with limits from the others, the resamples.

    None if it is undefined. `name` is the metric's, from which the unit follows.
    """
    if np.isnan(gaps[0]):
        return None
    low, high = np.nanquantile(gaps[1:], [0.025, 0.975])
    unit = UNITS.get(name.partition(":")[0], "points")
    return Metric(float(gaps[0]), float(low), float(high), n, unit)
