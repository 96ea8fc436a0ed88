"""What a client answers in sums: statistics for a head, gradients, Fisher scores, counts, scores.

Each looks at the network as it is (or at the weights an order carries) and at the client's rows. A sum can be hidden.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import cast

import torch
from torch import Tensor, nn

from fedgraft.client.context import ClientContext, features, vector_of
from fedgraft.core.errors import FedgraftError
from fedgraft.core.messages import Request, Response, Scalar
from fedgraft.core.protocols import Examples, Network
from fedgraft.core.rng import torch_stream
from fedgraft.core.space import select
from fedgraft.edit.fisher import ESTIMATORS, Scores
from fedgraft.metrics import scores
from fedgraft.metrics.evaluate import counted
from fedgraft.privacy.secagg.ring import Segment


@dataclass(frozen=True)
class Summand:
    """What one named tensor of an answer looks like, and how a secure sum of it is written."""

    shape: tuple[int, ...]
    dtype: torch.dtype
    limit: float
    step: float


def summands(action: str, network: Network, settings: Mapping[str, Scalar]) -> dict[str, Summand]:
    """The sums that an action answers with; server and clients work them out from what both know.

    Limits lie far beyond what data gives, steps far below: docs/decisions/12-secure-head-initialisation.md.
    """
    side, classes = network.width + 1, network.classes

    def linear(*shape: int) -> Summand:
        return Summand(shape, torch.float64, 2.0**40, 2.0**-33)

    if action == "statistics":
        return {"gram": linear(side, side), "cross": linear(side, classes)}
    if action == "class_sums":
        return {"cross": linear(side, classes)}
    if action == "head_gradient":
        return {"gradient": linear(classes, side), "loss": linear(1), "count": linear(1)}
    if action == "gradient":
        names = set(str(settings["names"]).split("\n"))
        size = sum(p.numel() for name, p in network.named_parameters() if name in names)
        return {"gradient": Summand((size,), torch.float32, 2.0**23, 2.0**-40)}
    if action == "fisher_scores":
        names = set(str(settings["names"]).split("\n"))
        size = sum(p.numel() for name, p in network.named_parameters() if name in names)
        return {"scores": Summand((size + 1,), torch.float32, 2.0**23, 2.0**-50)}
    if action == "class_counts":
        return {"counts": Summand((classes,), torch.float64, 2.0**24, 1.0)}
    if action == "scores":
        return {name: Summand(s.shape, torch.float64, s.limit, s.step) for name, s in scores.shapes(classes).items()}
    raise FedgraftError(f"the answers to {action!r} are not sums")


def sums_lie(action: str, response: Response) -> str:
    """What cannot be in sums over a client's examples, as far as they are no longer than it says; empty: nothing."""
    s, n = response.sums, response.examples
    if action == "statistics":
        diagonal, last = s["gram"].diagonal(), s["cross"][-1]
        whole = float(diagonal[-1]) == n and float(last.sum()) == n and bool((last >= 0).all())
        if not whole or not bool((diagonal >= 0).all()) or not torch.allclose(s["gram"], s["gram"].T):
            return "its sums are not those of so many examples"
    if action in {"class_sums", "class_counts"}:
        counts = s["cross"][-1] if action == "class_sums" else s["counts"]
        if float(counts.sum()) != n or not bool((counts >= 0).all()) or not bool((counts % 1 == 0).all()):
            return "its sums are not those of so many examples"
    if action == "head_gradient" and (float(s["count"]) != n or float(s["loss"]) < 0):
        return "its loss is not that of so many examples"
    if action == "fisher_scores" and not (0 < float(s["scores"][-1]) <= n and bool((s["scores"] >= 0).all())):
        return "its scores are not sums of squares over so many examples"
    return ""


def sum_segments(action: str, network: Network, settings: Mapping[str, Scalar]) -> tuple[Segment, ...]:
    """The layout of a secure sum of an action's answers."""
    return tuple(
        Segment(name, math.prod(s.shape), s.limit, s.step) for name, s in summands(action, network, settings).items()
    )


def statistics(request: Request, context: ClientContext) -> dict[str, Tensor]:
    """Head initialisation: the sums a closed-form head needs (ZᵀZ, ZᵀY, counts). No image and no feature leaves."""
    rows = context.rows(request.client)
    network, width, classes = context.network, context.network.width, context.network.classes
    gram = torch.zeros(width + 1, width + 1, dtype=torch.float64)
    cross = torch.zeros(width + 1, classes, dtype=torch.float64)
    for z, labels in features(context, rows):
        z = torch.cat([z.double(), torch.ones(len(z), 1, dtype=torch.float64)], 1)
        gram += z.T @ z
        cross.index_add_(1, labels, z.T)
    network.eval()
    return {"gram": gram, "cross": cross}


def class_sums(request: Request, context: ClientContext) -> dict[str, Tensor]:
    """Summed features by class with their counts, (width+1, classes): what class means need, and nothing more."""
    cross = torch.zeros(context.network.width + 1, context.network.classes, dtype=torch.float64)
    for z, labels in features(context, context.rows(request.client)):
        cross.index_add_(1, labels, torch.cat([z.double(), torch.ones(len(z), 1, dtype=torch.float64)], 1).T)
    return {"cross": cross}


def head_gradient(request: Request, context: ClientContext) -> dict[str, Tensor]:
    """Head initialisation by probe: loss and gradient of a head (classes, width+1) summed over this client's rows."""
    head, rows = request.auxiliary["head"], context.rows(request.client)
    gradient, loss = torch.zeros_like(head), torch.zeros(1, dtype=head.dtype)
    for z, labels in features(context, rows):
        z = torch.cat([z.to(head.dtype), torch.ones(len(z), 1, dtype=head.dtype)], 1)
        logits = z @ head.T
        loss += torch.nn.functional.cross_entropy(logits, labels, reduction="sum")
        error = logits.softmax(1)
        error[torch.arange(len(labels)), labels] -= 1
        gradient += error.T @ z
    count = torch.full((1,), float(len(rows)), dtype=head.dtype)
    return {"gradient": gradient, "loss": loss, "count": count}


def class_counts(request: Request, context: ClientContext) -> dict[str, Tensor]:
    """How many training images of each class the client has."""
    labels = context.examples.labels[context.rows(request.client)]
    counts = torch.bincount(labels, minlength=context.network.classes).double()
    return {"counts": counts}


def count(request: Request, context: ClientContext) -> dict[str, Tensor]:
    """How models do on images the client holds out or tests on: right, among the first five, sum of losses, images.

    The models are the order's, or heads (n, classes, width+1) on the untouched backbone. Only these numbers leave,
    and the sums of `local.scores` where the order asks for `scores`.
    """
    examples, rows = _held(request, context)
    more: dict[str, Tensor] = {}
    if "heads" in request.auxiliary:
        counts = _count_heads(request.auxiliary["heads"], context, rows)
    else:
        context.show(vector_of(request))
        found, more = counted(context.network, examples, rows, scores=bool(request.settings.get("scores")))
        numbers = [found.accuracy, found.top5, found.loss, 1.0]
        counts = torch.tensor([numbers], dtype=torch.float64) * len(rows)
        counts[:, :2] = counts[:, :2].round()
    return {"counts": counts, **more}


def _held(request: Request, context: ClientContext) -> tuple[Examples, Tensor]:
    """The images that an order's split names, and which of them are this client's."""
    test = request.settings.get("split") == "test"
    of, none = context.test_rows if test else context.held, torch.empty(0, dtype=torch.int64)
    examples = context.tests if test and context.tests is not None else context.examples
    return examples, none if of is None else of(request.client)


def score_sums(request: Request, context: ClientContext) -> dict[str, Tensor]:
    """The sums of `local.scores` of the order's model on images the client holds out or tests on."""
    context.show(vector_of(request))
    _, sums = counted(context.network, *_held(request, context))
    return sums


def _count_heads(heads: Tensor, context: ClientContext, rows: Tensor) -> Tensor:
    """The counts of each head, (n, 4)."""
    counts = torch.zeros(len(heads), 4, dtype=torch.float64)
    for z, labels in features(context, rows):
        z = torch.cat([z.double(), torch.ones(len(z), 1, dtype=torch.float64)], 1)
        for i, head in enumerate(heads):
            logits = z @ head.T
            best = logits.topk(min(5, logits.shape[1]), dim=1).indices
            right, near = (best[:, 0] == labels).sum(), (best == labels[:, None]).any(1).sum()
            loss = torch.nn.functional.cross_entropy(logits, labels, reduction="sum")
            counts[i] += torch.tensor([float(right), float(near), float(loss), len(labels)], dtype=torch.float64)
    return counts


def fisher_scores(request: Request, context: ClientContext) -> dict[str, Tensor]:
    """The sums of squared gradients over a share of this client's examples, for the order's weights."""
    return {"scores": scores_of(request, context).vector()}


def gradient(request: Request, context: ClientContext) -> dict[str, Tensor]:
    """The summed gradient of the named weights over a share of this client's examples, at the order's weights."""
    network, names = context.network, set(str(request.settings["names"]).split("\n"))
    picked, _ = _share(request, context, "gradient")
    whole = select(network, lambda name: True, buffers=False)
    before = whole.gather(network)
    context.release()
    whole.scatter(vector_of(request), network)
    bound = select(network, lambda name: name in names, buffers=False).bind(network)
    network.eval()
    total, device = torch.zeros(bound.trained), next(network.parameters()).device
    for part in picked.split(64):
        logits = network(context.examples.batch(part).to(device), context.examples.entry)
        labels = context.examples.labels[part].to(device)
        torch.nn.functional.cross_entropy(logits, labels, reduction="sum").backward()
        total += bound.gradient().cpu()
    whole.scatter(before, network)
    return {"gradient": total}


def _share(request: Request, context: ClientContext, purpose: str) -> tuple[Tensor, torch.Generator]:
    """A drawn share of the client's rows, sorted, and the stream it was drawn from."""
    rows = context.rows(request.client)
    stream = torch_stream(context.seed, purpose, str(request.settings["draw"]), request.client)
    count = max(1, round(float(request.settings["share"]) * len(rows)))
    return rows[torch.randperm(len(rows), generator=stream)[:count]].sort().values, stream


def scores_of(request: Request, context: ClientContext) -> Scores:
    """Score with the order's weights; the network gets its own back, bit for bit."""
    s = request.settings
    picked, stream = _share(request, context, "fisher_scores")
    space = select(context.network, lambda name: True, buffers=False)
    before = space.gather(context.network)
    context.release()
    space.scatter(vector_of(request), context.network)
    device = next(context.network.parameters()).device
    estimator, labels = str(s["estimator"]), str(s["labels"])
    batches = [
        (context.examples.batch(part).to(device), context.examples.labels[part].to(device), context.examples.entry)
        for part in picked.split(int(s["batch"]))
    ]
    found = ESTIMATORS[estimator](
        cast(nn.Module, context.network), batches, labels, str(s["names"]).split("\n"), stream
    )
    space.scatter(before, context.network)
    return found


SUMS: dict[str, Callable[[Request, ClientContext], dict[str, Tensor]]] = {
    "statistics": statistics,
    "class_sums": class_sums,
    "head_gradient": head_gradient,
    "fisher_scores": fisher_scores,
    "scores": score_sums,
    "gradient": gradient,
    "class_counts": class_counts,
}
"""Answers that can be given under secure aggregation too."""
