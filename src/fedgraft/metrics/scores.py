"""The sums that a client computes from its predictions, and from which `metrics.metrics` computes every metric.

Only sums leave a site, no prediction. They are float64 tensors of fixed shape, so they can pass a secure sum:

- `confusion` (C, C): images by true class (row) and predicted class (column); of equal scores the first class wins.
- `top5` (1): images whose class is among the five highest scores; of equal scores lower class numbers come first.
- `histogram` (2, C, B): for each class c the images of other classes (0) and of c (1) by the score of c, in bins that
  are the same for everybody. The score is the log-odds of c, shifted so that chance (1/C) is zero. Bins are narrow
  around chance, where a young model puts everything, and widen with distance (asinh), where a trained model spreads.
- `calibration` (3, 15): images, sum of confidences and correct images, by the confidence of the prediction in 15 equal
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
_EVEN_UNTIL = 0.003  # bins are about equally wide up to this distance from chance, then they widen
_LAST_EDGE = 40.0  # everything beyond this distance is in one bin
EDGES = _EVEN_UNTIL * torch.sinh(
    torch.linspace(-1, 1, BINS - 1, dtype=torch.float64) * math.asinh(_LAST_EDGE / _EVEN_UNTIL)
)  # (B-1,)
CONFIDENCE_BINS = 15
LOSS_LIMIT = 1000.0
"""Larger and undefined losses count as this one, so that a diverged model cannot break a sum."""
STEP = 2.0**-30
"""Confidences, losses and log-odds are rounded to multiples of this."""


class SumLayout(NamedTuple):
    """Shape of one named tensor of sums, and its limit and resolution inside a secure sum."""

    shape: tuple[int, ...]
    limit: float
    step: float


def sum_layouts(classes: int) -> dict[str, SumLayout]:
    """Return the layout of one client's sums for this number of classes; a client has at most 2^24 images."""
    images = 2.0**24
    return {
        "confusion": SumLayout((classes, classes), images, 1.0),
        "top5": SumLayout((1,), images, 1.0),
        "histogram": SumLayout((2, classes, BINS), images, 1.0),
        "calibration": SumLayout((3, CONFIDENCE_BINS), images, STEP),
        "loss": SumLayout((2,), images * LOSS_LIMIT**2, STEP),
    }


def log_odds(logits: Tensor) -> Tensor:
    """Return the log-odds of each class against the rest, float64 (n, C), shifted so that 1/C is zero.

    They are rounded to multiples of `STEP`: scores that differ in the last bits only are ties. In a row with NaN or
    +inf, or with -inf alone, all classes are at chance.
    """
    clean = _clean_logits(logits)
    log_probability = clean.log_softmax(1).clamp(max=-torch.finfo(torch.float64).tiny)
    log_complement = torch.log(-torch.expm1(log_probability))
    return rounded(log_probability - log_complement + math.log(max(1, logits.shape[1] - 1)))


def predicted_classes(logits: Tensor) -> Tensor:
    """Return the predicted class of each row (n,): the highest score, and of equal scores the lowest class number.

    Everything that names or counts predictions takes them from here, so that ties are broken the same way everywhere.
    In a row that is not finite all classes are equal, so class 0 is predicted.
    """
    return _clean_logits(logits).argmax(1)


def true_class_rank(logits: Tensor, labels: Tensor) -> Tensor:
    """Return how many classes rank before the true one (n,), with the tie rule of `predicted_classes`.

    0: the prediction is correct; below 5: the true class is among the five highest.
    """
    clean = _clean_logits(logits)
    labels = labels.cpu().long()
    true_score = clean.gather(1, labels[:, None])
    higher = (clean > true_score).sum(1)
    equal_and_earlier = ((clean == true_score) & (torch.arange(clean.shape[1]) < labels[:, None])).sum(1)
    return higher + equal_and_earlier


def bin_numbers(scores: Tensor) -> Tensor:
    """Return the histogram bin of each score, in the same shape."""
    return torch.searchsorted(EDGES, scores.contiguous())


class ImageScores(NamedTuple):
    """What each image adds to the sums: tensors (n,), `bins` (n, C)."""

    labels: Tensor
    prediction: Tensor
    within_top5: Tensor
    bins: Tensor
    confidence: Tensor
    loss: Tensor


@torch.no_grad()
def score_images(logits: Tensor, labels: Tensor, classes: int, largest_loss: float = LOSS_LIMIT) -> ImageScores:
    """Return what each image adds to the sums, from logits (n, C) and labels (n,).

    Losses count up to `largest_loss`.
    """
    _check_inputs(logits, labels, classes)
    labels = labels.cpu().long()
    clean = _clean_logits(logits)
    true_score = clean.gather(1, labels[:, None])  # (n, 1)
    log_total = clean.logsumexp(1)  # (n,)
    confidence = (clean.max(1).values - log_total).exp().clamp(max=1.0)
    loss = torch.where(_has_finite_maximum(logits), log_total - true_score[:, 0], LOSS_LIMIT).clamp(0.0, largest_loss)
    return ImageScores(
        labels=labels,
        prediction=predicted_classes(logits),
        within_top5=true_class_rank(logits, labels) < 5,
        bins=bin_numbers(log_odds(logits)),
        confidence=rounded(confidence),
        loss=loss,
    )


def sum_scores(images: ImageScores, classes: int) -> dict[str, Tensor]:
    """Return the sums over these images that the module's text lists, by name."""
    labels = images.labels
    confidence = images.confidence
    correct = images.prediction == labels
    # The small shift keeps confidences such as 1/5, which lie on an edge, in the lower bin however they were rounded.
    bin_number = (confidence * CONFIDENCE_BINS - 16 * STEP).ceil().long().clamp(1, CONFIDENCE_BINS) - 1
    is_own_class = (labels[:, None] == torch.arange(classes)).long()  # (n, C)
    cells = (is_own_class * classes + torch.arange(classes)) * BINS + images.bins
    calibration = [
        _weighted_count(bin_number, torch.ones_like(confidence), CONFIDENCE_BINS),
        _weighted_count(bin_number, confidence, CONFIDENCE_BINS),
        _weighted_count(bin_number, correct, CONFIDENCE_BINS),
    ]
    return {
        "confusion": _count(labels * classes + images.prediction, classes**2).view(classes, classes),
        "top5": images.within_top5.sum().double().view(1),
        "histogram": _count(cells.flatten(), 2 * classes * BINS).view(2, classes, BINS),
        "calibration": torch.stack(calibration),
        "loss": torch.stack([rounded(images.loss).sum(), rounded(images.loss.square()).sum()]),
    }


def count_scores(logits: Tensor, labels: Tensor, classes: int, largest_loss: float = LOSS_LIMIT) -> dict[str, Tensor]:
    """Return the sums over these images that the module's text lists, by name, from logits (n, C) and labels (n,).

    An image's loss counts up to `largest_loss`.
    """
    return sum_scores(score_images(logits, labels, classes, largest_loss), classes)


def merge_scores(
    parts: Iterable[Mapping[str, Tensor]], classes: int, layouts: Mapping[str, SumLayout] | None = None
) -> dict[str, Tensor]:
    """Return the sums (by name) of several sets of images added up; zeros if there is no set.

    `layouts` None: those of `sum_layouts`.
    """
    if layouts is None:
        layouts = sum_layouts(classes)
    total = {name: torch.zeros(layout.shape, dtype=torch.float64) for name, layout in layouts.items()}
    for part in parts:
        for name, value in total.items():
            if part[name].shape != value.shape:
                raise FedgraftError(
                    "E-METRICS-SUM-SHAPE",
                    f"the sums {name!r} have the shape {tuple(part[name].shape)} and {classes} classes need "
                    f"{tuple(value.shape)}",
                    "give parts that all have the same classes",
                    sum=name,
                    classes=classes,
                )
            value += part[name]
    return total


def is_plausible_sum(layout: SumLayout, tensor: Tensor | None) -> bool:
    """Return whether a tensor can be a sum of one client: shape, type, finite, not negative, in its limit."""
    if tensor is None or tensor.shape != layout.shape or tensor.dtype != torch.float64:
        return False
    return bool(tensor.isfinite().all() and (tensor >= 0).all() and (tensor <= layout.limit).all())


def _count(places: Tensor, length: int) -> Tensor:
    """Return how often each of the places 0..length-1 occurs, float64."""
    return torch.bincount(places, minlength=length).double()


def _weighted_count(places: Tensor, weights: Tensor, length: int) -> Tensor:
    """Return the sum of the weights at each of the positions 0..length-1, float64; `places` are the positions."""
    return torch.bincount(places, weights.double(), minlength=length).double()


def rounded(values: Tensor) -> Tensor:
    """Return the values rounded to multiples of `STEP`."""
    return (values / STEP).round() * STEP


def _has_finite_maximum(logits: Tensor) -> Tensor:
    """Return which rows define probabilities, bool (n,)."""
    return logits.max(1).values.isfinite().cpu()  # the largest is NaN if any is, inf if any is, -inf if all are


def _clean_logits(logits: Tensor) -> Tensor:
    """Return the logits in float64 on the CPU, with zeros in rows that define no probabilities."""
    return torch.where(_has_finite_maximum(logits)[:, None], logits.detach().cpu().double(), 0.0)


def _check_inputs(logits: Tensor, labels: Tensor, classes: int) -> None:
    """Refuse logits that are not (n, C) and labels outside 0..C-1."""
    if logits.shape != (len(labels), classes):
        raise FedgraftError(
            "E-METRICS-LOGITS-SHAPE",
            f"scores of the shape {tuple(logits.shape)} do not fit {len(labels)} labels and {classes} classes",
            "give one row of scores per label and one column per class",
            shape=tuple(logits.shape),
            labels=len(labels),
            classes=classes,
        )
    if not len(labels):
        return
    lowest = int(labels.min())
    highest = int(labels.max())
    if not 0 <= lowest <= highest < classes:
        raise FedgraftError(
            "E-METRICS-LABEL-RANGE",
            f"labels from {lowest} to {highest} do not fit {classes} classes",
            f"number the labels from 0 to {classes - 1}",
            lowest=lowest,
            highest=highest,
            classes=classes,
        )
