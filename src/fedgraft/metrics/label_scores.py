"""The sums that a client computes where images have sets of findings; `metrics.label_metrics` makes metrics of them.

As in `metrics.scores` only sums leave a site, float64 tensors of fixed shape that can pass a secure sum:

- `matches` (2): images, and of these the ones whose known labels are all right at a probability of one half.
- `outcomes` (4, C): known labels of each finding that are true negative, false positive, false negative and true
  positive at a probability of one half.
- `histogram` (2, C, B): known labels of each finding that are absent (0) and present (1) by the logit, in bins that are
  the same for everybody. They are about equally wide up to a logit of 1 and widen with distance (asinh): scores of rare
  findings lie far from 0, where the bins of `metrics.scores` are wide.
- `calibration` (3, C, 15): known labels of each finding, sum of their probabilities and present ones, by the
  probability in 15 equal bins.
- `loss` (2): sum over images of the loss and of its square, in nats; an image's loss is the sum over its known labels.

Law: the sums of parts add up to the sums of the whole, bit for bit, as in `metrics.scores`.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from fedgraft.core.device import fetch
from fedgraft.core.errors import FedgraftError
from fedgraft.core.label_sets import ABSENT, PRESENT, UNKNOWN, exact_matches, image_losses
from fedgraft.metrics import scores
from fedgraft.metrics.scores import CONFIDENCE_BINS, LOSS_LIMIT, STEP, SumLayout

BINS = 1023
_LAST_EDGE = 40.0  # everything beyond this distance is in one bin
EDGES = torch.sinh(torch.linspace(-1, 1, BINS - 1, dtype=torch.float64) * math.asinh(_LAST_EDGE))  # (B-1,)
TRUE_NEGATIVE, FALSE_POSITIVE, FALSE_NEGATIVE, TRUE_POSITIVE = range(4)
"""Rows of `outcomes`."""


def layouts(classes: int) -> dict[str, SumLayout]:
    """Return the layout of one client's sums for this number of findings; a client has at most 2^24 images."""
    images = 2.0**24
    return {
        "matches": SumLayout((2,), images, 1.0),
        "outcomes": SumLayout((4, classes), images, 1.0),
        "histogram": SumLayout((2, classes, BINS), images, 1.0),
        "calibration": SumLayout((3, classes, CONFIDENCE_BINS), images, STEP),
        "loss": SumLayout((2,), images * LOSS_LIMIT**2, STEP),
    }


@torch.no_grad()
def count_label_scores(logits: Tensor, labels: Tensor, largest_loss: float = LOSS_LIMIT) -> dict[str, Tensor]:
    """Return the sums over these images, by name, from logits and label sets (n, C).

    A score that is no number counts as one half, and an image's loss counts up to `largest_loss`.
    """
    if logits.shape != labels.shape:
        raise FedgraftError(
            "E-METRICS-INPUT-SHAPE",
            f"scores of the shape {tuple(logits.shape)} do not fit label sets {tuple(labels.shape)}",
            "give one score per label",
        )
    labels = fetch(labels).long()
    clean = fetch(logits).double().nan_to_num(0.0, posinf=1e30, neginf=-1e30)
    classes = labels.shape[1]
    known = labels != UNKNOWN
    present = labels == PRESENT
    predicted = clean > 0
    outcome = torch.stack(
        [
            ((labels == ABSENT) & ~predicted).sum(0),
            ((labels == ABSENT) & predicted).sum(0),
            (present & ~predicted).sum(0),
            (present & predicted).sum(0),
        ]
    )
    cells = (present.long() * classes + torch.arange(classes)) * BINS + torch.searchsorted(EDGES, scores.rounded(clean))
    probability = scores.rounded(clean.sigmoid())[known]
    # The small shift keeps probabilities that lie on an edge in the lower bin however they were rounded.
    bin_number = (probability * CONFIDENCE_BINS - 16 * STEP).ceil().long().clamp(1, CONFIDENCE_BINS) - 1
    place = torch.arange(classes).expand_as(known)[known] * CONFIDENCE_BINS + bin_number
    calibration = []
    for weight in (torch.ones_like(probability), probability, present[known].double()):
        counted = torch.bincount(place, weight, minlength=classes * CONFIDENCE_BINS)
        calibration.append(counted.view(classes, CONFIDENCE_BINS))
    losses = image_losses(clean, labels).clamp(0.0, largest_loss)
    return {
        "matches": torch.stack([torch.tensor(len(labels)), exact_matches(clean, labels).sum()]).double(),
        "outcomes": outcome.double(),
        "histogram": torch.bincount(cells[known], minlength=2 * classes * BINS).double().view(2, classes, BINS),
        "calibration": torch.stack(calibration),
        "loss": torch.stack([scores.rounded(losses).sum(), scores.rounded(losses.square()).sum()]),
    }


def sums_disagree(sums: dict[str, Tensor]) -> bool:
    """Return whether the sums of one client cannot be about the same images."""
    images, right = sums["matches"].tolist()
    negatives, positives = sums["histogram"].sum(2)
    counted_negatives = sums["outcomes"][[TRUE_NEGATIVE, FALSE_POSITIVE]].sum(0)
    counted_positives = sums["outcomes"][[FALSE_NEGATIVE, TRUE_POSITIVE]].sum(0)
    same = bool((negatives == counted_negatives).all() and (positives == counted_positives).all())
    fits = bool((negatives + positives <= images).all()) and right <= images
    calibrated = bool((sums["calibration"][0].sum(1) == negatives + positives).all())
    return not (same and fits and calibrated)
