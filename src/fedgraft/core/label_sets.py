"""Label sets: several findings per image, each present, absent or unknown.

Labels of examples are either classes (N,), or label sets (N, C): `PRESENT`, `ABSENT` or `UNKNOWN` for each of the C
outputs of the network. The probability of a finding is the sigmoid of its logit; the loss of an image is the sum of the
binary cross-entropies of its known labels, so an unknown label adds nothing to any loss, gradient or metric.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn.functional import binary_cross_entropy_with_logits, cross_entropy

from fedgraft.core.errors import FedgraftError

PRESENT = 1
ABSENT = 0
UNKNOWN = -1


def are_label_sets(labels: Tensor) -> bool:
    """Return whether labels are sets (N, C), not classes (N,)."""
    return labels.ndim == 2


def require_classes(labels: Tensor, what: str) -> None:
    """Refuse label sets; `what` is the subject of the error's sentence."""
    if are_label_sets(labels):
        raise FedgraftError(
            "E-CORE-LABEL-SETS",
            f"{what} needs one class per image, and these labels are sets of findings",
            "train with the loss one_vs_all, or give one class per image",
        )


def as_label_sets(labels: Tensor, classes: int) -> Tensor:
    """Return label sets (N, C) as they are, and classes (N,) as sets of one finding each."""
    if are_label_sets(labels):
        return labels
    return torch.nn.functional.one_hot(labels, classes)


def counts_of(labels: Tensor) -> Tensor:
    """Return how many images each finding is absent from and present in, int64 (2, C); unknown ones are in neither."""
    return torch.stack([(labels == ABSENT).sum(0), (labels == PRESENT).sum(0)])


def label_losses(
    logits: Tensor, labels: Tensor, smoothing: float = 0.0, positive_weight: Tensor | None = None
) -> Tensor:
    """Return the binary cross-entropy of each label, (B, C); exactly 0, without a gradient, where it is unknown.

    Args:
        logits: (B, C).
        labels: label sets (B, C).
        smoothing: share of each target that moves to one half.
        positive_weight: by which losses of present findings are multiplied, (C,).
    """
    targets = (labels == PRESENT).to(logits.dtype)
    targets = targets * (1 - smoothing) + smoothing / 2
    losses = binary_cross_entropy_with_logits(logits, targets, pos_weight=positive_weight, reduction="none")
    return losses.where(labels != UNKNOWN, torch.zeros_like(losses))


def image_losses(logits: Tensor, labels: Tensor) -> Tensor:
    """Return the loss of each image (B,): cross-entropy of its class, or the sum over its known labels."""
    if are_label_sets(labels):
        return label_losses(logits, labels).sum(1)
    return cross_entropy(logits, labels, reduction="none")


def mean_loss(logits: Tensor, labels: Tensor) -> Tensor:
    """Return the mean of `image_losses`, a scalar."""
    if are_label_sets(labels):
        return image_losses(logits, labels).mean()
    return cross_entropy(logits, labels)


def loss_sum(logits: Tensor, labels: Tensor) -> Tensor:
    """Return the sum of `image_losses`, a scalar."""
    if are_label_sets(labels):
        return image_losses(logits, labels).sum()
    return cross_entropy(logits, labels, reduction="sum")


def logit_errors(logits: Tensor, labels: Tensor) -> Tensor:
    """Return the gradient of each image's loss with respect to its logits, (B, C): probability minus target."""
    if are_label_sets(labels):
        errors = logits.sigmoid() - (labels == PRESENT).to(logits.dtype)
        return errors.where(labels != UNKNOWN, torch.zeros_like(errors))
    errors = logits.softmax(1)
    errors[torch.arange(len(errors), device=errors.device), labels.long()] -= 1
    return errors


def exact_matches(logits: Tensor, labels: Tensor) -> Tensor:
    """Return whether all known labels of each image are right at a probability of one half, bool (B,).

    A score that is no number says that the finding is absent. An image without a known label is right.
    """
    right = (logits > 0) == (labels == PRESENT)
    return (right | (labels == UNKNOWN)).all(1)
