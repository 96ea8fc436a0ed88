"""What a client counts about its predictions: sums from which every metric of `report.metrics` can be had.

Only sums leave a site, no prediction. They are float64 tensors of fixed shape, so they pass a secure sum:

- `confusion` (C, C): images by true class (row) and predicted class (column), the first among equals.
- `top5` (1): images whose class is among the five highest scores; of equal scores lower class numbers come first.
- `histogram` (2, C, B): for each class c the images of other classes (0) and of c (1) by the score of c, in bins that
  are the same for everybody. The score is the log-odds of c, moved so that chance (1/C) is zero. Bins are narrow
  around chance, where a young model puts everything, and widen with distance (asinh), where a trained model spreads.
- `calibration` (3, 15): images, sum of confidences and images right, by the confidence of the prediction in 15 equal
  bins (a, b], as in Guo et al., On Calibration of Modern Neural Networks (2017).
- `loss` (2): sum of the cross-entropies and of their squares, in nats.

The histogram of very few images says much about each of them: a site should give it in a secure sum, or not at all.

Law: the sums of parts add up to the sums of the whole, bit for bit. Counts are integers; confidences and losses are
rounded to multiples of `STEP`, which float64 adds exactly as long as a sum stays below 2^23.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from typing import NamedTuple

import torch
from torch import Tensor

from fedgraft.core.errors import FedgraftError

BINS = 511  # odd: chance has a bin of its own, and the bins are symmetric around it
_FINE, _FAR = 0.003, 40.0  # bins are even up to about _FINE from chance, then widen; beyond _FAR all is one bin
EDGES = _FINE * torch.sinh(torch.linspace(-1, 1, BINS - 1, dtype=torch.float64) * math.asinh(_FAR / _FINE))  # (B-1,)
CONFIDENCE_BINS = 15
LOSS_LIMIT = 1000.0
"""A loss above this, or none at all, counts as this: a model that diverged cannot break a sum."""
STEP = 2.0**-30


class Sum(NamedTuple):
    """What one named tensor of sums looks like, and how fine and how large it can be in a secure sum."""

    shape: tuple[int, ...]
    limit: float
    step: float


def shapes(classes: int) -> dict[str, Sum]:
    """The sums of one client; everybody works them out from the number of classes. At most 2^24 images each."""
    images = 2.0**24
    return {
        "confusion": Sum((classes, classes), images, 1.0),
        "top5": Sum((1,), images, 1.0),
        "histogram": Sum((2, classes, BINS), images, 1.0),
        "calibration": Sum((3, CONFIDENCE_BINS), images, STEP),
        "loss": Sum((2,), images * LOSS_LIMIT**2, STEP),
    }


def log_odds(logits: Tensor) -> Tensor:
    """The log-odds of each class against the rest, float64 (n, C), moved so that 1/C is zero.

    Rounded to multiples of `STEP`: what differs in the last bits only is a tie. A row that is not finite (-inf for
    some classes is) says nothing: all its classes are at chance.
    """
    known = _known(logits)
    inside = known.log_softmax(1).clamp(max=-torch.finfo(torch.float64).tiny)
    return _round(inside - torch.log(-torch.expm1(inside)) + math.log(max(1, logits.shape[1] - 1)))


def guesses(logits: Tensor) -> Tensor:
    """The predicted class of each row (n,): the highest score, and of equal scores the class of the lowest number.

    Everything that names or counts predictions takes them from here, so that ties are broken the same way everywhere.
    A row that is not finite says nothing, so that all its classes are equal.
    """
    return _known(logits).argmax(1)


def ahead(logits: Tensor, labels: Tensor) -> Tensor:
    """How many classes come before the true one (n,), by the same rule: 0 is right, below 5 is within five guesses."""
    known = _known(logits)
    labels = labels.cpu().long()
    own = known.gather(1, labels[:, None])
    higher = (known > own).sum(1)
    equal_and_earlier = ((known == own) & (torch.arange(known.shape[1]) < labels[:, None])).sum(1)
    return higher + equal_and_earlier


def bins(scores: Tensor) -> Tensor:
    """The bin of each score, same shape."""
    return torch.searchsorted(EDGES, scores.contiguous())


class Rows(NamedTuple):
    """What each image adds to the sums: (n,) each, `bins` (n, C)."""

    labels: Tensor
    guess: Tensor
    near: Tensor
    bins: Tensor
    sure: Tensor
    loss: Tensor


@torch.no_grad()
def rows(logits: Tensor, labels: Tensor, classes: int) -> Rows:
    """What each image adds: logits (n, C), labels (n,)."""
    _check(logits, labels, classes)
    labels, known = labels.cpu().long(), _known(logits)
    own, total = known.gather(1, labels[:, None]), known.logsumexp(1)  # (n, 1), (n,)
    sure = (known.max(1).values - total).exp().clamp(max=1.0)
    loss = torch.where(_finite(logits), total - own[:, 0], LOSS_LIMIT).clamp(0.0, LOSS_LIMIT)
    return Rows(labels, guesses(logits), ahead(logits, labels) < 5, bins(log_odds(logits)), _round(sure), loss)


def total(images: Rows, classes: int) -> dict[str, Tensor]:
    """The sums over these images."""
    labels, sure, right = images.labels, images.sure, images.guess == images.labels
    slot = (sure * CONFIDENCE_BINS - 16 * STEP).ceil().long().clamp(
        1, CONFIDENCE_BINS
    ) - 1  # 1/5 is on an edge, however rounded
    side = (labels[:, None] == torch.arange(classes)).long()  # (n, C)
    cells = (side * classes + torch.arange(classes)) * BINS + images.bins
    calibration = [_add(slot, weights, CONFIDENCE_BINS) for weights in (torch.ones_like(sure), sure, right)]
    return {
        "confusion": _add(labels * classes + images.guess, None, classes**2).view(classes, classes),
        "top5": images.near.sum().double().view(1),
        "histogram": _add(cells.flatten(), None, 2 * classes * BINS).view(2, classes, BINS),
        "calibration": torch.stack(calibration),
        "loss": torch.stack([_round(images.loss).sum(), _round(images.loss.square()).sum()]),
    }


def count(logits: Tensor, labels: Tensor, classes: int) -> dict[str, Tensor]:
    """The sums of these images: logits (n, C), labels (n,)."""
    return total(rows(logits, labels, classes), classes)


def merge(parts: Iterable[Mapping[str, Tensor]], classes: int) -> dict[str, Tensor]:
    """The sums of several sets of images together; of none: zeros."""
    total = {name: torch.zeros(s.shape, dtype=torch.float64) for name, s in shapes(classes).items()}
    for part in parts:
        for name, value in total.items():
            if part[name].shape != value.shape:
                raise FedgraftError(
                    f"the sums {name!r} have the shape {tuple(part[name].shape)} and {classes} classes need "
                    f"{tuple(value.shape)}; all parts must have the same classes"
                )
            value += part[name]
    return total


def plausible(name: str, found: Tensor | None, classes: int) -> bool:
    """Whether a tensor can be this sum of one client: its shape and type, finite, not negative, within its limit."""
    shape, limit, _ = shapes(classes)[name]
    if found is None or found.shape != shape or found.dtype != torch.float64:
        return False
    return bool(found.isfinite().all() and (found >= 0).all() and (found <= limit).all())


def _add(where: Tensor, weights: Tensor | None, length: int) -> Tensor:
    return torch.bincount(where, None if weights is None else weights.double(), minlength=length).double()


def _round(x: Tensor) -> Tensor:
    return (x / STEP).round() * STEP


def _finite(logits: Tensor) -> Tensor:
    """Rows from which probabilities can be had, (n,)."""
    return logits.max(1).values.isfinite().cpu()  # the largest is NaN if any is, inf if any is, -inf if all are


def _known(logits: Tensor) -> Tensor:
    """Logits in float64 on the CPU; rows that say nothing are zero."""
    return torch.where(_finite(logits)[:, None], logits.detach().cpu().double(), 0.0)


def _check(logits: Tensor, labels: Tensor, classes: int) -> None:
    if logits.shape != (len(labels), classes):
        raise FedgraftError(
            f"scores of the shape {tuple(logits.shape)} do not fit {len(labels)} labels and {classes} classes"
        )
    if len(labels) and not 0 <= int(labels.min()) <= int(labels.max()) < classes:
        raise FedgraftError(
            f"labels from {int(labels.min())} to {int(labels.max())} do not fit {classes} classes; they count from 0"
        )
