"""What a client can report besides a change: statistics for a head, sensitivities, alignment, representations.

None of these trains. Each looks at the network as it is (or at the weights an order carries) and at the client's rows.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Protocol, cast, runtime_checkable

import torch
from torch import Tensor, nn

from fedgraft.aggregate.similarity import svcca_basis, svcca_of_bases
from fedgraft.aggregate.slots import Observe
from fedgraft.algorithm import Algorithm
from fedgraft.context import ClientContext, ClientMemory, answer, features, vector_of
from fedgraft.edit.calibrate import Calibration
from fedgraft.edit.fisher import ESTIMATORS, Scores
from fedgraft.edit.space import Bound, select
from fedgraft.errors import FedgraftError, Refused
from fedgraft.local import scores
from fedgraft.local.evaluate import counted
from fedgraft.local.features import features as look_through
from fedgraft.local.features import hidden as hidden
from fedgraft.local.self_weight import learned, parted
from fedgraft.messages import Order, Reply, Scalar
from fedgraft.privacy.secagg.ring import Segment
from fedgraft.protocols import Examples, Network
from fedgraft.randomness import torch_stream


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


def sums_lie(action: str, reply: Reply) -> str:
    """What cannot be in sums over a client's examples, as far as they are no longer than it says; empty: nothing."""
    s, n = reply.sums, reply.examples
    if action == "statistics":
        diagonal, last = s["gram"].diagonal(), s["cross"][-1]
        whole = float(diagonal[-1]) == n and float(last.sum()) == n and bool((last >= 0).all())
        if not whole or not bool((diagonal >= 0).all()) or not torch.allclose(s["gram"], s["gram"].T):
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


def statistics(
    order: Order, algorithm: Algorithm, context: ClientContext, memory: ClientMemory
) -> tuple[Reply, ClientMemory]:
    """Head initialisation: the sums a closed-form head needs (ZᵀZ, ZᵀY, counts). No image and no feature leaves."""
    rows = context.rows(order.client)
    network, width, classes = context.network, context.network.width, context.network.classes
    gram = torch.zeros(width + 1, width + 1, dtype=torch.float64)
    cross = torch.zeros(width + 1, classes, dtype=torch.float64)
    for z, labels in features(context, rows):
        z = torch.cat([z.double(), torch.ones(len(z), 1, dtype=torch.float64)], 1)
        gram += z.T @ z
        cross.index_add_(1, labels, z.T)
    network.eval()
    return replace(answer(order, context), sums={"gram": gram, "cross": cross}), memory


def class_sums(
    order: Order, algorithm: Algorithm, context: ClientContext, memory: ClientMemory
) -> tuple[Reply, ClientMemory]:
    """Summed features by class with their counts, (width+1, classes): what class means need, and nothing more."""
    cross = torch.zeros(context.network.width + 1, context.network.classes, dtype=torch.float64)
    for z, labels in features(context, context.rows(order.client)):
        cross.index_add_(1, labels, torch.cat([z.double(), torch.ones(len(z), 1, dtype=torch.float64)], 1).T)
    return replace(answer(order, context), sums={"cross": cross}), memory


def head_gradient(
    order: Order, algorithm: Algorithm, context: ClientContext, memory: ClientMemory
) -> tuple[Reply, ClientMemory]:
    """Head initialisation by probe: loss and gradient of a head (classes, width+1) summed over this client's rows."""
    head, rows = order.auxiliary["head"], context.rows(order.client)
    gradient, loss = torch.zeros_like(head), torch.zeros(1, dtype=head.dtype)
    for z, labels in features(context, rows):
        z = torch.cat([z.to(head.dtype), torch.ones(len(z), 1, dtype=head.dtype)], 1)
        logits = z @ head.T
        loss += torch.nn.functional.cross_entropy(logits, labels, reduction="sum")
        error = logits.softmax(1)
        error[torch.arange(len(labels)), labels] -= 1
        gradient += error.T @ z
    count = torch.full((1,), float(len(rows)), dtype=head.dtype)
    return replace(answer(order, context), sums={"gradient": gradient, "loss": loss, "count": count}), memory


def class_counts(
    order: Order, algorithm: Algorithm, context: ClientContext, memory: ClientMemory
) -> tuple[Reply, ClientMemory]:
    """How many training images of each class the client has."""
    labels = context.examples.labels[context.rows(order.client)]
    counts = torch.bincount(labels, minlength=context.network.classes).double()
    return replace(answer(order, context), sums={"counts": counts}), memory


def count(
    order: Order, algorithm: Algorithm, context: ClientContext, memory: ClientMemory
) -> tuple[Reply, ClientMemory]:
    """How models do on images the client holds out or tests on: right, among the first five, sum of losses, images.

    The models are the order's, or heads (n, classes, width+1) on the untouched backbone. Only these numbers leave,
    and the sums of `local.scores` where the order asks for `scores`.
    """
    examples, rows = _held(order, context)
    more: dict[str, Tensor] = {}
    if "heads" in order.auxiliary:
        counts = _count_heads(order.auxiliary["heads"], context, rows)
    else:
        context.show(vector_of(order))
        found, more = counted(context.network, examples, rows, scores=bool(order.settings.get("scores")))
        numbers = [found.accuracy, found.top5, found.loss, 1.0]
        counts = torch.tensor([numbers], dtype=torch.float64) * len(rows)
        counts[:, :2] = counts[:, :2].round()
    return replace(answer(order, context), sums={"counts": counts, **more}), memory


def _held(order: Order, context: ClientContext) -> tuple[Examples, Tensor]:
    """The images that an order's split names, and which of them are this client's."""
    test = order.settings.get("split") == "test"
    of, none = context.test_rows if test else context.held, torch.empty(0, dtype=torch.int64)
    examples = context.tests if test and context.tests is not None else context.examples
    return examples, none if of is None else of(order.client)


def score_sums(
    order: Order, algorithm: Algorithm, context: ClientContext, memory: ClientMemory
) -> tuple[Reply, ClientMemory]:
    """The sums of `local.scores` of the order's model on images the client holds out or tests on."""
    context.show(vector_of(order))
    _, sums = counted(context.network, *_held(order, context))
    return replace(answer(order, context), sums=sums), memory


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


def fisher_scores(
    order: Order, algorithm: Algorithm, context: ClientContext, memory: ClientMemory
) -> tuple[Reply, ClientMemory]:
    """The sums of squared gradients over a share of this client's examples, for the order's weights."""
    return replace(answer(order, context), sums={"scores": _scores(order, context).vector()}), memory


def gradient(
    order: Order, algorithm: Algorithm, context: ClientContext, memory: ClientMemory
) -> tuple[Reply, ClientMemory]:
    """The summed gradient of the named weights over a share of this client's examples, at the order's weights."""
    network, names = context.network, set(str(order.settings["names"]).split("\n"))
    picked, _ = _share(order, context, "gradient")
    whole = select(network, lambda name: True, buffers=False)
    before = whole.gather(network)
    context.release()
    whole.scatter(vector_of(order), network)
    bound = select(network, lambda name: name in names, buffers=False).bind(network)
    network.eval()
    total, device = torch.zeros(bound.trained), next(network.parameters()).device
    for part in picked.split(64):
        logits = network(context.examples.batch(part).to(device), context.examples.entry)
        labels = context.examples.labels[part].to(device)
        torch.nn.functional.cross_entropy(logits, labels, reduction="sum").backward()
        total += bound.gradient().cpu()
    whole.scatter(before, network)
    return replace(answer(order, context), sums={"gradient": total}), memory


def _share(order: Order, context: ClientContext, purpose: str) -> tuple[Tensor, torch.Generator]:
    """A drawn share of the client's rows, sorted, and the stream it was drawn from."""
    rows = context.rows(order.client)
    stream = torch_stream(context.seed, purpose, str(order.settings["draw"]), order.client)
    count = max(1, round(float(order.settings["share"]) * len(rows)))
    return rows[torch.randperm(len(rows), generator=stream)[:count]].sort().values, stream


def own_mask(
    order: Order, algorithm: Algorithm, context: ClientContext, memory: ClientMemory
) -> tuple[Reply, ClientMemory]:
    """A mask of the client's own, calibrated on its own examples; only its bits leave."""
    if not isinstance(algorithm.trainable, ChoosesMask):
        raise FedgraftError(f"client {order.client} was asked for a mask, and {algorithm.trainable.kind} has none")
    space = select(context.network, lambda name: True, buffers=False)
    before = space.gather(context.network)
    space.scatter(vector_of(order), context.network)

    def score(round: int) -> Mapping[str, Tensor]:
        again = replace(order, vector=space.gather(context.network), settings={**order.settings, "draw": round})
        return _scores(again, context).mean()

    mask = algorithm.trainable.calibrated(context.network, score).mask
    space.scatter(before, context.network)
    return replace(answer(order, context), evidence={"mask": mask.bits()}), memory


def _scores(order: Order, context: ClientContext) -> Scores:
    """Score with the order's weights; the network gets its own back, bit for bit."""
    s = order.settings
    picked, stream = _share(order, context, "fisher_scores")
    space = select(context.network, lambda name: True, buffers=False)
    before = space.gather(context.network)
    context.release()
    space.scatter(vector_of(order), context.network)
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


def _representation(
    wanted: Observe, order: Order, context: ClientContext
) -> tuple[dict[str, float], dict[str, Tensor]]:
    """Pooled features of n of the client's own examples, after training."""
    rows = context.rows(order.client)
    stream = torch_stream(context.seed, "representation", order.round, order.client)
    n = int(wanted.options["samples"])
    picks = torch.cat([torch.randperm(len(rows), generator=stream) for _ in range(-(-n // len(rows)))])[:n]
    shown = torch.cat([z for z, _ in features(context, rows[picks])])
    return {}, {"representation": _noised(shown, wanted, order, context)}


def _noised(shown: Tensor, wanted: Observe, order: Order, context: ClientContext) -> Tensor:
    """Rows of length one with Gaussian noise of the asked-for size in every entry; as they are without noise."""
    noise = float(wanted.options.get("noise", 0.0))
    if noise == 0:
        return shown
    stream = torch_stream(context.seed, "shown_noise", order.round, order.client)
    rows = torch.nn.functional.normalize(shown.cpu(), dim=1)
    return rows + noise * torch.randn(rows.shape, generator=stream)


def _probe(context: ClientContext) -> Examples:
    if context.probe is None:
        raise FedgraftError("comparing representations needs a probe: images that every client has, row by row")
    return context.probe


def _alignment(wanted: Observe, order: Order, context: ClientContext) -> tuple[dict[str, float], dict[str, Tensor]]:
    """SVCCA of each layer after training with the same layer of the model the round began with; numbers only."""
    layers, keep, top = wanted.options["layers"], int(wanted.options["keep"]), int(wanted.options["top"])
    after = hidden(context.network, layers, _probe(context))
    key = (order.round, layers, keep)
    if context.reference is None or context.reference[0] != key:  # the same for every client of the round
        values = context.space.gather(context.network)
        context.space.scatter(vector_of(order), context.network)
        before = [svcca_basis(x, keep) for x in hidden(context.network, layers, _probe(context))]
        context.space.scatter(values, context.network)
        context.reference = (key, before)
    found = [
        svcca_of_bases(svcca_basis(x, keep), q, top).value for x, q in zip(after, context.reference[1], strict=True)
    ]
    return dict(zip(wanted.scalars, found, strict=True)), {}


def _probe_representation(
    wanted: Observe, order: Order, context: ClientContext
) -> tuple[dict[str, float], dict[str, Tensor]]:
    """Pooled features of the shared probe, after training."""
    probe = _probe(context)
    batches = look_through(context.network, probe, torch.arange(len(probe)), size=256)
    shown = torch.cat([z for _, z in batches])
    return {}, {"probe_representation": _noised(shown, wanted, order, context)}


def _fisher(wanted: Observe, order: Order, context: ClientContext) -> tuple[dict[str, float], dict[str, Tensor]]:
    """The mean squared gradient of single images at the trained model, by trained coordinate."""
    rows, bound = context.rows(order.client), context.bind(context.space)
    stream = torch_stream(context.seed, "fisher_merge", order.round, order.client)
    picked = rows[torch.randperm(len(rows), generator=stream)[: int(wanted.options["samples"])]]
    return {}, {"fisher": squared_gradients(context.network, bound, context.examples, picked)}


def squared_gradients(network: Network, bound: Bound, examples: Examples, rows: Tensor) -> Tensor:
    """The mean over these rows of the squared gradient of each one's loss, (trained,); the model keeps its bits."""
    network.eval()
    total, device = torch.zeros(bound.trained, dtype=torch.float64), bound.values.device
    for row in rows.split(1):
        logits = network(examples.batch(row).to(device), examples.entry)
        torch.nn.functional.cross_entropy(logits, examples.labels[row].to(device)).backward()
        total += bound.gradient().cpu().double().square()
    return (total / max(1, len(rows))).float()


def _self_weight(wanted: Observe, order: Order, context: ClientContext) -> tuple[dict[str, float], dict[str, Tensor]]:
    """How much this client's own model should count when it is mixed with the others' mean."""
    common = order.auxiliary.get("common")
    if common is None:
        raise Refused("the order lacks the mean of all models, with which a self-weight is learned", "order")
    rows = parted(context.rows(order.client), float(wanted.options["aside"]), context.seed, order.client)[1]
    space, network = context.space, context.network
    own = space.gather(network)
    weight = learned(network, lambda v: space.scatter(v, network), own, common, context.examples, rows)
    return {"self_weight": weight}, {}


def _labels(wanted: Observe, order: Order, context: ClientContext) -> tuple[dict[str, float], dict[str, Tensor]]:
    """The client's label histogram: an oracle that a private federation would not give away."""
    labels = context.examples.labels[context.rows(order.client)]
    return {}, {"labels": torch.bincount(labels, minlength=context.network.classes).float()}


@runtime_checkable
class ChoosesMask(Protocol):
    """A trainable kind whose clients can choose coordinates by scores of their own."""

    def calibrated(self, network: Network, scores: Callable[[int], Mapping[str, Tensor]]) -> Calibration:
        """The mask that these scores give."""
        ...


OBSERVATIONS: dict[str, Callable[[Observe, Order, ClientContext], tuple[dict[str, float], dict[str, Tensor]]]] = {
    "alignment": _alignment,
    "representation": _representation,
    "probe_representation": _probe_representation,
    "labels": _labels,
    "fisher": _fisher,
    "self_weight": _self_weight,
}
SUMS: dict[str, Callable[[Order, Algorithm, ClientContext, ClientMemory], tuple[Reply, ClientMemory]]] = {
    "statistics": statistics,
    "class_sums": class_sums,
    "head_gradient": head_gradient,
    "fisher_scores": fisher_scores,
    "scores": score_sums,
    "gradient": gradient,
    "class_counts": class_counts,
}
"""Answers that are sums, so that they can be given under secure aggregation too."""
