"""Client actions that return sums from which the server makes a head on the frozen backbone.

Feature statistics (ridge regression), class sums (class means), gradients (logistic regression), class counts.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from fedgraft.algorithms.algorithm import Algorithm
from fedgraft.client.action import RunPhase, sum_action
from fedgraft.client.context import ClientContext, pooled_batches
from fedgraft.core.errors import Refused
from fedgraft.core.label_sets import ABSENT, PRESENT, UNKNOWN, are_label_sets, counts_of, logit_errors, loss_sum
from fedgraft.core.messages import Request, Response, Scalar
from fedgraft.core.protocols import Network
from fedgraft.privacy.secagg.ring import Summand

# docs/decisions/12-secure-head-initialisation.md derives the limit and the step.
_LIMIT = 2.0**40  # largest absolute value of an entry inside a secure sum
_STEP = 2.0**-33  # fixed-point step of an entry inside a secure sum
_WRONG_SUMS = "its sums are not those of so many examples"


def _linear_sum(*shape: int) -> Summand:
    """Return shape and range of a float64 tensor that sums features over examples, as a secure sum needs them."""
    return Summand(shape, torch.float64, _LIMIT, _STEP)


def _with_ones(features: Tensor) -> Tensor:
    """Return the features (B, width) with a further column of ones, which stands for the bias."""
    ones = torch.ones(len(features), 1, dtype=features.dtype)
    return torch.cat([features, ones], dim=1)  # (B, width + 1)


# ---- statistics: what ridge regression needs


def statistics(request: Request, context: ClientContext) -> dict[str, Tensor]:
    """Return the sums of ridge regression over this client's training images: {"gram": ZᵀZ, "cross": ZᵀY}, float64.

    Z are the pooled features with a column of ones (n, width + 1), Y the one-hot labels (n, classes). Of label sets Y
    says which findings are present, and `absent` is the same sum with those that are absent. The network is left in
    evaluation mode.
    """
    network = context.network
    side = network.width + 1
    gram = torch.zeros(side, side, dtype=torch.float64)
    cross = torch.zeros(side, network.classes, dtype=torch.float64)
    absent = torch.zeros_like(cross)
    for batch, labels in pooled_batches(context, context.rows(request.client)):
        z = _with_ones(batch.double())
        gram += z.T @ z
        if are_label_sets(labels):
            cross += z.T @ (labels == PRESENT).double()
            absent += z.T @ (labels == ABSENT).double()
        else:
            cross.index_add_(1, labels, z.T)
    network.eval()
    if network.label_sets:
        return {"gram": gram, "cross": cross, "absent": absent}
    return {"gram": gram, "cross": cross}


def _statistics_summands(network: Network, settings: Mapping[str, Scalar]) -> dict[str, Summand]:
    side = network.width + 1
    summands = {"gram": _linear_sum(side, side), "cross": _linear_sum(side, network.classes)}
    if network.label_sets:
        summands["absent"] = _linear_sum(side, network.classes)
    return summands


def _statistics_implausible(response: Response) -> str:
    """Return what cannot be true of the statistics, given the number of examples the client claims; "" if nothing."""
    gram = response.sums["gram"]
    diagonal = gram.diagonal()
    counts = response.sums["cross"][-1]  # the bias row counts examples by class
    examples = response.examples
    if float(diagonal[-1]) != examples:
        return _WRONG_SUMS
    if "absent" in response.sums:
        reason = _counts_implausible(torch.stack([response.sums["absent"][-1], counts]), int(examples))
        if reason:
            return reason
    elif float(counts.sum()) != examples:
        return _WRONG_SUMS
    if not bool((counts >= 0).all()) or not bool((diagonal >= 0).all()):
        return _WRONG_SUMS
    if not torch.allclose(gram, gram.T):
        return _WRONG_SUMS
    return ""


# ---- what ridge regression needs of findings that some images do not say


def unknown_statistics(request: Request, context: ClientContext) -> dict[str, Tensor]:
    """Return {"gram": (findings, width + 1, width + 1)}: ZᵀZ over the images that do not say each finding asked.

    Taken from the `gram` of `statistics` it leaves the sum over the images whose label is known.
    """
    network = context.network
    findings = _findings_of(request.settings)
    side = network.width + 1
    gram = torch.zeros(len(findings), side, side, dtype=torch.float64)
    for batch, labels in pooled_batches(context, context.rows(request.client)):
        z = _with_ones(batch.double())
        for place, finding in enumerate(findings):
            silent = z[labels[:, finding] == UNKNOWN]
            gram[place] += silent.T @ silent
    network.eval()
    return {"gram": gram}


def _findings_of(settings: Mapping[str, Scalar]) -> list[int]:
    """Return the numbers of the findings that a request names in its settings."""
    return [int(number) for number in str(settings["findings"]).split(",")]


def _unknown_statistics_summands(network: Network, settings: Mapping[str, Scalar]) -> dict[str, Summand]:
    side = network.width + 1
    return {"gram": _linear_sum(len(_findings_of(settings)), side, side)}


def _validate_findings(request: Request, algorithm: Algorithm, context: ClientContext) -> None:
    """Refuse findings that this network does not have, or names twice, or classes."""
    classes = context.network.classes
    numbers = str(request.settings["findings"]).split(",")
    allowed = [str(finding) for finding in range(classes)]
    if not context.network.label_sets or [name for name in allowed if name in numbers] != numbers:
        raise Refused("the request names findings that there are not here", "request")


def _unknown_statistics_implausible(response: Response) -> str:
    """Return what cannot be true of the sums, given the number of examples the client claims; "" if nothing."""
    gram = response.sums["gram"]
    diagonal = gram.diagonal(dim1=1, dim2=2)
    counts = diagonal[:, -1]
    possible = bool((counts % 1 == 0).all()) and bool((diagonal >= 0).all())
    if not possible or float(counts.max()) > response.examples or not torch.allclose(gram, gram.transpose(1, 2)):
        return _WRONG_SUMS
    return ""


# ---- class sums and class counts


def class_sums(request: Request, context: ClientContext) -> dict[str, Tensor]:
    """Return {"cross": (width + 1, classes)}: pooled features summed by class.

    The last row counts the images of each class.
    """
    cross = torch.zeros(context.network.width + 1, context.network.classes, dtype=torch.float64)
    for batch, labels in pooled_batches(context, context.rows(request.client)):
        cross.index_add_(1, labels, _with_ones(batch.double()).T)
    return {"cross": cross}


def _class_sums_summands(network: Network, settings: Mapping[str, Scalar]) -> dict[str, Summand]:
    return {"cross": _linear_sum(network.width + 1, network.classes)}


def class_counts(request: Request, context: ClientContext) -> dict[str, Tensor]:
    """Return how many training images of each class the client has; of label sets without and with each finding."""
    labels = context.examples.labels[context.rows(request.client)]
    if are_label_sets(labels):
        return {"counts": counts_of(labels).double()}
    return {"counts": torch.bincount(labels, minlength=context.network.classes).double()}


def _class_counts_summands(network: Network, settings: Mapping[str, Scalar]) -> dict[str, Summand]:
    shape: tuple[int, ...] = (network.classes,)
    if network.label_sets:
        shape = (2, network.classes)
    return {"counts": Summand(shape, torch.float64, 2.0**24, 1.0)}


def _counts_implausible(counts: Tensor, examples: int) -> str:
    """Return what is wrong with counts by class of a client that claims so many examples; "" if they can be true."""
    whole = bool((counts % 1 == 0).all())
    if counts.ndim == 2:  # without and with each finding; for the others it is unknown
        possible = whole and bool((counts >= 0).all()) and float(counts.sum(0).max()) <= examples
        return "" if possible else _WRONG_SUMS
    if float(counts.sum()) != examples or not bool((counts >= 0).all()) or not whole:
        return _WRONG_SUMS
    return ""


def _class_sums_implausible(response: Response) -> str:
    return _counts_implausible(response.sums["cross"][-1], response.examples)


def _class_counts_implausible(response: Response) -> str:
    return _counts_implausible(response.sums["counts"], response.examples)


# ---- gradient of a logistic-regression head


def head_gradient(request: Request, context: ClientContext) -> dict[str, Tensor]:
    """Return gradient, loss and count of the request's head, each summed over this client's training images.

    The head is the tensor `head` of the request, (classes, width + 1) with the bias last; the loss is the
    cross-entropy. The gradient has the head's shape, loss and count have shape (1,).
    """
    head = request.auxiliary["head"]
    rows = context.rows(request.client)
    gradient = torch.zeros_like(head)
    loss = torch.zeros(1, dtype=head.dtype)
    for batch, labels in pooled_batches(context, rows):
        z = _with_ones(batch.to(head.dtype))
        logits = z @ head.T
        loss += loss_sum(logits, labels)
        gradient += logit_errors(logits, labels).T @ z
    count = torch.full((1,), float(len(rows)), dtype=head.dtype)
    return {"gradient": gradient, "loss": loss, "count": count}


def _head_gradient_summands(network: Network, settings: Mapping[str, Scalar]) -> dict[str, Summand]:
    return {
        "gradient": _linear_sum(network.classes, network.width + 1),
        "loss": _linear_sum(1),
        "count": _linear_sum(1),
    }


def _head_gradient_implausible(response: Response) -> str:
    """Return what cannot be true of loss and count, given the number of examples the client claims; "" if nothing."""
    if float(response.sums["count"]) != response.examples or float(response.sums["loss"]) < 0:
        return "its loss is not that of so many examples"
    return ""


def _head_tensor(network: Network) -> dict[str, tuple[int, ...]]:
    return {"head": (network.classes, network.width + 1)}


ACTIONS = [
    sum_action(
        "statistics",
        statistics,
        _statistics_summands,
        phase=RunPhase.HEAD,
        progress_label="head initialisation: sums over the features",
        implausible=_statistics_implausible,
    ),
    sum_action(
        "unknown_statistics",
        unknown_statistics,
        _unknown_statistics_summands,
        phase=RunPhase.HEAD,
        progress_label="head initialisation: sums over the images that do not say a finding",
        settings={"findings": str},
        validate=_validate_findings,
        implausible=_unknown_statistics_implausible,
    ),
    sum_action(
        "class_sums",
        class_sums,
        _class_sums_summands,
        phase=RunPhase.HEAD,
        progress_label="head initialisation: class sums",
        implausible=_class_sums_implausible,
    ),
    sum_action(
        "head_gradient",
        head_gradient,
        _head_gradient_summands,
        phase=RunPhase.HEAD,
        progress_label="head initialisation: one step of the logistic regression",
        tensors=_head_tensor,
        implausible=_head_gradient_implausible,
    ),
    sum_action(
        "class_counts",
        class_counts,
        _class_counts_summands,
        phase=RunPhase.CALIBRATION,
        progress_label="class counts of the federation",
        implausible=_class_counts_implausible,
    ),
]
