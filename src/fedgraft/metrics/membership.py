"""Membership inference from sums: how well a model tells the images it was trained on from others.

An attacker who has an image and the model looks at the image's loss: training lowers it. What leaves a site is the
number of its images by loss, once for images it trained on (members) and once for test images (outsiders), apart for
rare classes and for the others; no number belongs to a single image. From these follow the area under the attack's ROC
curve (0.5: the attacker guesses), the share of members found at a false alarm rate of 1 %, and how much more often the
model is right about members than about outsiders.

The same sums hold the histograms of another score, such as that of `shadow_score`: smaller means "more like a member".
Yeom et al., Privacy risk in machine learning (2018), for the loss; Carlini et al., Membership inference attacks from
first principles (2022), for scores against shadow models.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from fedgraft.core.label_sets import are_label_sets, exact_matches, image_losses
from fedgraft.metrics import intervals
from fedgraft.metrics.metrics import Metric
from fedgraft.metrics.scores import SumLayout

Array = np.ndarray
BINS = 96
"""Bins of a histogram; ties within a bin count one half."""
LEAST_LOG, MOST_LOG = -7.0, 2.0
"""Range of the logarithm (base 10) of a loss; what lies outside counts in the first or the last bin."""
COMMON, RARE = 0, 1
"""Rows of every tensor: images of other classes, and images of rare ones."""
FALSE_ALARMS = 0.01
LEAST_OUTSIDERS = 100
"""Fewer outsiders do not show a false alarm rate of 1 %."""


@dataclass(frozen=True)
class Attack:
    """What an attacker gains, each number with its 95 % interval; None where there are too few images."""

    members: int
    outsiders: int
    auc: Metric | None
    """Area under the ROC curve: the chance that a member looks more like one than an outsider does."""
    found: Metric | None
    """Share of the members that are found at a false alarm rate of 1 %."""

    def table(self) -> dict[str, Any]:
        """Return the attack as plain values for JSON."""
        return asdict(self)


@dataclass(frozen=True)
class Gap:
    """How much more often the model is right about members than about outsiders of a group of classes."""

    members: Metric | None
    """Accuracy on members."""
    outsiders: Metric | None
    gap: Metric | None

    def table(self) -> dict[str, Any]:
        """Return the gap as plain values for JSON."""
        return asdict(self)


def side_layouts() -> dict[str, SumLayout]:
    """Return the layout of one client's sums about one side: histogram and right answers, by group."""
    images = 2.0**24
    return {"losses": SumLayout((2, BINS), images, 1.0), "right": SumLayout((2,), images, 1.0)}


def rare_classes(counts: Array) -> Array:
    """Return which classes are rare, bool (C,): those with less than half of an even share of the images.

    `counts` (C,) are the images of each class at all sites; a class without images is not rare.
    """
    even = counts.sum() / max(1, len(counts))
    return (counts > 0) & (counts < even / 2)


def is_of_rare_class(labels: Tensor, rare: Tensor) -> Tensor:
    """Return whether each image is of a rare class, or has a rare finding, bool (n,); `rare` is bool (C,)."""
    if are_label_sets(labels):
        return ((labels == 1) & rare).any(1)
    return rare[labels]


def loss_bins(logits: Tensor, labels: Tensor) -> Tensor:
    """Return the bin of each image's loss, int64 (n,)."""
    losses = image_losses(logits.double(), labels).clamp(min=10.0**LEAST_LOG)
    return bins_of(losses.log10(), LEAST_LOG, MOST_LOG)


def bins_of(scores: Tensor, least: float, most: float) -> Tensor:
    """Return the bin of each score between `least` and `most`, int64 (n,); scores outside count at the ends."""
    places = (scores - least) / (most - least) * BINS
    return places.floor().clamp(0, BINS - 1).long()


def right_answers(logits: Tensor, labels: Tensor) -> Tensor:
    """Return whether each answer is right, bool (n,); of label sets whether all known labels are."""
    if are_label_sets(labels):
        return exact_matches(logits, labels).bool()
    return logits.argmax(1) == labels


def side_sums(bins: Tensor, right: Tensor, is_rare: Tensor, smallest: int) -> dict[str, Tensor]:
    """Return the sums of one site about one side, members or outsiders, by name, float64.

    `bins` (n,) are the bins of the images' losses, `right` (n,) whether the answers are right, `is_rare` (n,) whether
    the image is of a rare class. A group with fewer than `smallest` images is left out.
    """
    sums = {name: torch.zeros(layout.shape, dtype=torch.float64) for name, layout in side_layouts().items()}
    for group, chosen in ((COMMON, ~is_rare), (RARE, is_rare)):
        if int(chosen.sum()) < smallest:
            continue
        sums["losses"][group] = torch.bincount(bins[chosen], minlength=BINS).double()
        sums["right"][group] = float(right[chosen].sum())
    return sums


def join_sides(members: Mapping[str, Tensor], outsiders: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return the sums of both sides: the histograms "members" and "outsiders" (2, BINS), and "right" (side, group)."""
    return {
        "members": members["losses"],
        "outsiders": outsiders["losses"],
        "right": torch.stack([members["right"], outsiders["right"]]),
    }


def implausible_side(sums: Mapping[str, Tensor]) -> str:
    """Return what cannot be true of a client's sums about one side; "" if nothing."""
    histogram = sums["losses"]
    right = sums["right"]
    for counts in (histogram, right):
        if bool((counts < 0).any()) or bool((counts != counts.round()).any()):
            return "it has counts that are no numbers of images"
    if bool((right > histogram.sum(1)).any()):
        return "it is right about more images than there are"
    return ""


def merge_membership(parts: Iterable[Mapping[str, Tensor]]) -> dict[str, Tensor]:
    """Return the sums of `join_sides` over several sites."""
    shapes = {"members": (2, BINS), "outsiders": (2, BINS), "right": (2, 2)}
    total = {name: torch.zeros(shape, dtype=torch.float64) for name, shape in shapes.items()}
    for part in parts:
        for name in total:
            total[name] += part[name]
    return total


def attack(sums: Mapping[str, Tensor]) -> Attack:
    """Return what an attacker gains who takes images with small scores for members, over both groups."""
    members = sums["members"].sum(0).numpy()
    outsiders = sums["outsiders"].sum(0).numpy()
    sizes = (int(members.sum()), int(outsiders.sum()))
    return Attack(*sizes, _area(members, outsiders), _found(members, outsiders))


def gap(sums: Mapping[str, Tensor], group: int) -> Gap:
    """Return how much more often the model is right about members of a group than about its outsiders."""
    sides = []
    for side, name in enumerate(("members", "outsiders")):
        images = int(sums[name][group].sum())
        sides.append((int(sums["right"][side, group]), images))
    shares = [_share(right, images) for right, images in sides]
    difference = None
    if shares[0] is not None and shares[1] is not None:
        value = shares[0].value - shares[1].value
        low, high = newcombe(sides[0], sides[1])
        difference = Metric(value, low, high, min(sides[0][1], sides[1][1]), "points")
    return Gap(shares[0], shares[1], difference)


def newcombe(first: tuple[int, int], second: tuple[int, int]) -> tuple[float, float]:
    """Return the 95 % interval of the difference of two independent shares, each (hits, n): Newcombe (1998), method 10.

    It is made of the two Wilson intervals.
    """
    p = first[0] / first[1]
    q = second[0] / second[1]
    low_p, high_p = wilson(*first)
    low_q, high_q = wilson(*second)
    below = np.sqrt((p - low_p) ** 2 + (high_q - q) ** 2)
    above = np.sqrt((high_p - p) ** 2 + (q - low_q) ** 2)
    return float(p - q - below), float(p - q + above)


def shadow_score(target: Tensor, out_mean: Tensor, out_deviation: float) -> Tensor:
    """Return how the target's log loss compares with that of models that did not see the image, (n,).

    `target` and `out_mean` are logarithms of losses by image; smaller scores mean "more like a member".
    """
    return (target - out_mean) / max(out_deviation, 1e-6)


def wilson(hits: int, n: int) -> tuple[float, float]:
    """Return the 95 % interval of a share of `n`: Wilson's."""
    low, high = intervals.wilson(np.asarray(float(hits)), np.asarray(float(n)))
    return float(low), float(high)


def _share(hits: int, n: int) -> Metric | None:
    if not n:
        return None
    low, high = wilson(hits, n)
    return Metric(hits / n, low, high, n, "%", hits)


def _area(members: Array, outsiders: Array) -> Metric | None:
    """Return the area under the ROC curve with DeLong's interval; an image's component is that of its bin.

    None with fewer than two images on a side.
    """
    m = members.sum()
    n = outsiders.sum()
    if m < 2 or n < 2:
        return None
    outsiders_above = outsiders[::-1].cumsum()[::-1] - outsiders
    members_below = members.cumsum() - members
    of_members = (outsiders_above + outsiders / 2) / n  # component of a member in each bin
    of_outsiders = (members_below + members / 2) / m
    area = float((members * of_members).sum() / m)
    variance = (members * (of_members - area) ** 2).sum() / (m - 1) / m
    variance += (outsiders * (of_outsiders - area) ** 2).sum() / (n - 1) / n
    reach = intervals.Z * float(np.sqrt(variance))
    return Metric(area, max(0.0, area - reach), min(1.0, area + reach), int(m + n), "")


def _found(members: Array, outsiders: Array) -> Metric | None:
    """Return the share of members below the largest threshold that takes at most 1 % of the outsiders for members.

    None with fewer than `LEAST_OUTSIDERS`.
    """
    n = outsiders.sum()
    if n < LEAST_OUTSIDERS or not members.sum():
        return None
    allowed = outsiders.cumsum() <= FALSE_ALARMS * n
    hits = int(members[allowed].sum())
    return _share(hits, int(members.sum()))
