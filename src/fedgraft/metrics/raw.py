"""Where the predictions themselves are at hand (simulation, one site's own page): exact AUROC, paired comparisons."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from fedgraft.core.rng import numpy_stream
from fedgraft.metrics import scores
from fedgraft.metrics.metrics import UNITS, Array, Metric, auroc_metrics, compute, values


def exact(logits: Tensor, labels: Tensor, names: Sequence[str]) -> dict[str, Metric | None]:
    """Every metric of these predictions (n, C), with the AUROC of the scores themselves, ties counted as half.

    Its mean's interval is narrower than from histograms: here the covariance of the classes is known.
    """
    found = compute(scores.count(logits, labels, len(names)), names)
    positive = (labels.cpu()[:, None] == torch.arange(len(names))).numpy()  # (n, C)
    sides = np.stack([(~positive).sum(0), positive.sum(0)])
    k = sides.min(0) > 0
    ranks = scores.log_odds(logits).numpy()
    area, parts = np.empty(k.sum()), np.empty((k.sum(), len(labels)))
    for i, c in enumerate(np.flatnonzero(k)):
        area[i], parts[i] = auroc_influence(ranks[:, c], positive[:, c])
    return found | auroc_metrics(area, np.zeros(len(area)), sides, parts @ parts.T, names)


def auroc_influence(score: Array, positive: Array) -> tuple[float, Array]:
    """The AUROC of scores (n,), and what each image does to it (DeLong et al. 1988); both sides must have images."""
    from scipy.stats import rankdata

    m, n = positive.sum(), (~positive).sum()
    place = rankdata(score)
    place[positive] = (place[positive] - rankdata(score[positive])) / n  # share of negatives below it
    place[~positive] = 1 - (place[~positive] - rankdata(score[~positive])) / m  # share of positives above it
    area = place[positive].mean()
    return float(area), (place - area) / np.where(positive, m, n)


def paired(
    first: Tensor, second: Tensor, labels: Tensor, names: Sequence[str], seed: int, draws: int = 1000
) -> dict[str, Metric | None]:
    """Every metric of the first model minus the second's on the same images, with a bootstrap over images.

    The 95 % interval is that of the 2.5 % and 97.5 % points of the draws that have the metric. AUROCs are those of
    the histograms.
    """
    stream, n = numpy_stream(seed, "paired bootstrap"), len(labels)
    picks = [np.arange(n), *(stream.integers(0, n, n) for _ in range(draws if n else 0))]
    one, two = (_table(scores.rows(logits, labels, len(names)), picks, names) for logits in (first, second))
    return {name: _difference(one[name] - two[name], n, name) for name in one}


def _table(images: scores.Rows, picks: Sequence[Array], names: Sequence[str]) -> dict[str, Array]:
    """Every metric on each choice of rows, (len(picks),)."""
    found = dict[str, list[float]]()
    for rows in map(torch.from_numpy, picks):
        sums = scores.total(scores.Rows(*(each[rows] for each in images)), len(names))
        for name, value in values({k: v.numpy() for k, v in sums.items()}).items():
            parts = zip([name + c for c in names], value, strict=True) if name.endswith(":") else [(name, value)]
            for part, number in parts:
                found.setdefault(part, []).append(float(number))
    return {name: np.array(numbers) for name, numbers in found.items()}


def _difference(gaps: Array, n: int, name: str) -> Metric | None:
    """The first gap, with the points of the others."""
    if np.isnan(gaps[0]):
        return None
    low, high = np.nanquantile(gaps[1:], [0.025, 0.975])
    return Metric(float(gaps[0]), float(low), float(high), n, UNITS.get(name.partition(":")[0], "points"))
