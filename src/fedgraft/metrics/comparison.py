"""Paired comparison of two models on the same images: DeLong's test of AUROCs, McNemar's of accuracies, from sums.

- DeLong, DeLong and Clarke-Pearson, Comparing the areas under two or more correlated receiver operating characteristic
  curves (1988), with the midranks of Sun and Xu (2014). The structural components, one number per image, stay where the
  images are; what leaves is, by finding (or class, against the rest), the inverse variance of the difference, and it
  times the first model's area, the difference, and its square. Sites are pooled by inverse variance; Cochran's Q says
  whether they agree.
- McNemar, Note on the sampling error of the difference between correlated proportions (1947), in its exact form, from
  the counts of images where one model alone is right.
- Several findings are corrected after Holm (`metrics.statistics`).

Law: the sums of parts add up, so that pooling in one place or through a secure sum is the same but for its rounding.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from fedgraft.core.device import fetch
from fedgraft.core.errors import FedgraftError
from fedgraft.core.label_sets import ABSENT, PRESENT, UNKNOWN, are_label_sets, exact_matches
from fedgraft.metrics import scores
from fedgraft.metrics.intervals import Z
from fedgraft.metrics.scores import SumLayout
from fedgraft.metrics.statistics import holm

Array = np.ndarray
WEIGHT, AREA, DIFFERENCE, SQUARE = range(4)
"""Rows of `areas`."""
_LARGEST_WEIGHT = 2.0**40
"""Inverse variances beyond this are rounding errors of a variance that is zero."""
_STEP = 2.0**-20
_LEAST = 2  # images of each kind that a variance needs


@dataclass(frozen=True)
class AreaTest:
    """DeLong's test of one finding: the areas of both models, their difference with a 95 % interval, its p-value."""

    finding: str
    first: float
    second: float
    difference: float
    """The second model's area minus the first one's."""
    low: float
    high: float
    z: float
    p: float
    p_holm: float
    """Corrected for the number of findings."""
    sites: int
    heterogeneity: float | None
    """p-value of Cochran's Q over the sites; None with fewer than two."""


@dataclass(frozen=True)
class ShareTest:
    """McNemar's exact test: of how many images the first model alone is right, the second alone, and the p-value."""

    name: str
    only_first: int
    only_second: int
    images: int
    difference: float
    """The second model's share of right answers minus the first one's."""
    p: float
    p_holm: float


@dataclass(frozen=True)
class Comparison:
    """Two models compared on the same images: each finding's AUROC, accuracy over all, and each finding's accuracy."""

    areas: tuple[AreaTest, ...]
    accuracy: ShareTest | None
    by_finding: tuple[ShareTest, ...]
    """Accuracy of each finding at a probability of one half; empty for classes."""

    def table(self) -> dict[str, Any]:
        """Return the comparison as plain values for JSON."""
        return asdict(self)


def layouts(classes: int) -> dict[str, SumLayout]:
    """Return the layout of one client's sums for this number of findings or classes."""
    images = 2.0**24
    return {
        "areas": SumLayout((4, classes), _LARGEST_WEIGHT, _STEP),
        "sites": SumLayout((classes,), 2.0, 1.0),
        "right": SumLayout((3,), images, 1.0),
        "discordant": SumLayout((3, classes), images, 1.0),
    }


def comparison_sums(first: Tensor, second: Tensor, labels: Tensor, smallest: int = _LEAST) -> dict[str, Tensor]:
    """Return the sums over one site's images, by name, from the logits of two models (n, C) and their labels.

    Labels are classes (n,) or label sets (n, C). Findings that are present or absent in fewer than `smallest` images
    are left out.

    - `areas` (4, C): inverse variance w of the difference of the AUROCs, w times the first AUROC, w times the
      difference, w times its square; zeros where it has no variance.
    - `sites` (C): 1 where that counts.
    - `right` (3): images that the first model alone has right, the second alone, and all images.
    - `discordant` (3, C): the same for the known labels of each finding at a probability of one half; for classes 0.
    """
    if first.shape != second.shape or len(first) != len(labels):
        raise FedgraftError(
            "E-METRICS-INPUT-SHAPE",
            f"scores of the shapes {tuple(first.shape)} and {tuple(second.shape)} do not fit {len(labels)} labels",
            "compare two models of the same classes on the same images",
        )
    classes = first.shape[1]
    label_sets = are_label_sets(labels)
    targets = labels if label_sets else _one_against_rest(labels, classes)
    areas = torch.zeros(4, classes, dtype=torch.float64)
    sites = torch.zeros(classes, dtype=torch.float64)
    discordant = torch.zeros(3, classes, dtype=torch.float64)
    both = [_scores(logits, label_sets) for logits in (first, second)]
    for finding in range(classes):
        column = targets[:, finding]
        present = int((column == PRESENT).sum())
        absent = int((column == ABSENT).sum())
        if min(present, absent) < max(smallest, _LEAST):
            continue
        known = (column != UNKNOWN).numpy()
        pair = np.stack([model[:, finding][known] for model in both])
        area, covariance = delong(pair, (column == PRESENT).numpy()[known])
        variance = covariance[0, 0] + covariance[1, 1] - 2 * covariance[0, 1]
        if variance > 1 / _LARGEST_WEIGHT:
            gap = area[1] - area[0]
            areas[:, finding] = torch.tensor([1.0, area[0], gap, gap * gap], dtype=torch.float64) / variance
            sites[finding] = 1
        if label_sets:
            discordant[:, finding] = _discordant(first[:, finding], second[:, finding], column)
    right = [_right(logits, labels) for logits in (first, second)]
    return {
        "areas": areas,
        "sites": sites,
        "right": _counts(right[0], right[1]),
        "discordant": discordant,
    }


def delong(pair: Array, present: Array) -> tuple[Array, Array]:
    """Return the AUROCs (2,) of two scores (2, n) of the same images and their covariance (2, 2), by midranks.

    `present` (n,) says which images have the finding; there are at least two of each kind.
    """
    above = pair[:, present]
    below = pair[:, ~present]
    m = above.shape[1]
    n = below.shape[1]
    from_present = np.empty((2, m))
    from_absent = np.empty((2, n))
    for model in range(2):
        ranks = _midranks(np.concatenate([above[model], below[model]]))
        from_present[model] = (ranks[:m] - _midranks(above[model])) / n
        from_absent[model] = 1 - (ranks[m:] - _midranks(below[model])) / m
    return from_present.mean(1), np.cov(from_present) / m + np.cov(from_absent) / n


def _midranks(values: Array) -> Array:
    """Return the rank of each value from 1 on; equal values have the mean of their ranks."""
    from scipy.stats import rankdata

    return np.asarray(rankdata(values), dtype=float)


def _one_against_rest(labels: Tensor, classes: int) -> Tensor:
    """Return classes (n,) as label sets (n, C)."""
    return (labels.long()[:, None] == torch.arange(classes)).long()


def _scores(logits: Tensor, label_sets: bool) -> Array:
    """Return what images are ranked by, float64 (n, C), as in the metrics: equal up to rounding is equal."""
    if label_sets:
        clean = fetch(logits.detach()).double().nan_to_num(0.0, posinf=1e30, neginf=-1e30)
        return scores.rounded(clean).numpy()
    return scores.log_odds(logits).numpy()


def _right(logits: Tensor, labels: Tensor) -> Tensor:
    """Return which images a model has right, bool (n,): their class, or all known labels."""
    if are_label_sets(labels):
        return exact_matches(logits, labels)
    return scores.predicted_classes(logits) == labels


def _discordant(first: Tensor, second: Tensor, column: Tensor) -> Tensor:
    """Return the counts of one finding's known labels (3,), as `_counts` does."""
    known = column != UNKNOWN
    truth = (column == PRESENT)[known]
    return _counts((first[known] > 0) == truth, (second[known] > 0) == truth)


def _counts(first: Tensor, second: Tensor) -> Tensor:
    """Return how many are right by the first alone, by the second alone, and how many there are, float64 (3,)."""
    only_first = (first & ~second).sum()
    only_second = (~first & second).sum()
    return torch.stack([only_first, only_second, torch.tensor(len(first))]).double()


def merge_comparisons(parts: Iterable[Mapping[str, Tensor]], classes: int) -> dict[str, Tensor]:
    """Return the sums (by name) of several sites added up; zeros if there is no site."""
    return scores.merge_scores(parts, classes, layouts(classes))


def implausible_comparison(sums: Mapping[str, Tensor]) -> str:
    """Return what cannot be true of one client's sums, which `comparison_sums` describes; "" if nothing.

    The rows of `areas` are inverse variances, and these times the first AUROC, the difference, and its square.
    """
    weight, weighted_auroc, difference, square = sums["areas"]
    if not (weight >= 0).all() or not (weighted_auroc >= 0).all() or not (weighted_auroc <= weight).all():
        return "areas outside 0 to 1"
    if not (difference.abs() <= weight).all() or not torch.isclose(difference.square(), weight * square).all():
        return "differences that do not fit their squares"
    if not (((sums["sites"] == 0) | (sums["sites"] == 1)) & ((sums["sites"] == 1) == (weight > 0))).all():
        return "findings that count without a variance, or have one and do not count"
    for counts in (sums["right"], *sums["discordant"].T):
        if not ((counts >= 0).all() and (counts % 1 == 0).all() and counts[:2].sum() <= counts[2]):
            return "more discordant labels than labels"
    return ""


def paired_tests(sums: Mapping[str, Tensor], names: Sequence[str]) -> Comparison:
    """Return the tests that follow from the sums of one site, or of several added up; `names` are the findings."""
    tests = []
    for finding, name in enumerate(names):
        if sums["sites"][finding] > 0:
            numbers = sums["areas"][:, finding].tolist()
            tests.append(_area_test(name, numbers, round(float(sums["sites"][finding]))))
    corrected = holm([test.p for test in tests])
    areas = tuple(replace(test, p_holm=p) for test, p in zip(tests, corrected, strict=True))
    by_finding = []
    for name, counts in zip(names, sums["discordant"].T.tolist(), strict=True):
        if counts[2]:
            by_finding.append(_share_test(name, counts))
    corrected = holm([test.p for test in by_finding])
    by_finding = [replace(test, p_holm=p) for test, p in zip(by_finding, corrected, strict=True)]
    accuracy = None
    if sums["right"][2]:
        accuracy = _share_test("accuracy", sums["right"].tolist())
    return Comparison(areas, accuracy, tuple(by_finding))


def _area_test(name: str, numbers: Sequence[float], sites: int) -> AreaTest:
    """Return DeLong's test from a column of `areas`, not corrected yet."""
    from scipy.stats import chi2, norm

    weight, area, gap, square = numbers
    difference = gap / weight
    error = weight**-0.5
    z = difference / error
    first = area / weight
    heterogeneity = None
    if sites > 1:
        q = max(0.0, square - gap * gap / weight)
        heterogeneity = float(chi2.sf(q, sites - 1))
    p = float(2 * norm.sf(abs(z)))
    low, high = difference - Z * error, difference + Z * error
    return AreaTest(name, first, first + difference, difference, low, high, z, p, p, sites, heterogeneity)


def _share_test(name: str, counts: Sequence[float]) -> ShareTest:
    """Return McNemar's exact test from counts (only first, only second, all), not corrected yet."""
    from scipy.stats import binomtest

    only_first, only_second, images = (round(count) for count in counts)
    p = 1.0
    if only_first + only_second:
        p = float(binomtest(only_first, only_first + only_second).pvalue)
    return ShareTest(name, only_first, only_second, images, (only_second - only_first) / images, p, p)
