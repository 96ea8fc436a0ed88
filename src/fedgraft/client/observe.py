"""What a client shows of itself beside an update: alignment, representations, labels, curvature, a mask of its own."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Protocol, runtime_checkable

import torch
from torch import Tensor

from fedgraft.aggregate.similarity import svcca_of_bases
from fedgraft.aggregate.sketch import basis_of
from fedgraft.aggregate.slots import Observe
from fedgraft.algorithms.algorithm import Algorithm
from fedgraft.client.context import ClientContext, ClientMemory, answer, features, vector_of
from fedgraft.client.sums import scores_of
from fedgraft.core.errors import FedgraftError, Refused
from fedgraft.core.messages import Request, Response
from fedgraft.core.protocols import Examples, Network
from fedgraft.core.rng import torch_stream
from fedgraft.core.space import Bound, select
from fedgraft.edit.calibrate import Calibration
from fedgraft.local.features import features as look_through
from fedgraft.local.features import hidden
from fedgraft.local.self_weight import learned, parted
from fedgraft.privacy.dp import bound_key, gaussian, simulation_key


def own_mask(
    request: Request, algorithm: Algorithm, context: ClientContext, memory: ClientMemory
) -> tuple[Response, ClientMemory]:
    """A mask of the client's own, calibrated on its own examples; only its bits leave."""
    if not isinstance(algorithm.trainable, ChoosesMask):
        raise FedgraftError(f"client {request.client} was asked for a mask, and {algorithm.trainable.kind} has none")
    space = select(context.network, lambda name: True, buffers=False)
    before = space.gather(context.network)
    space.scatter(vector_of(request), context.network)

    def score(round: int) -> Mapping[str, Tensor]:
        again = replace(request, vector=space.gather(context.network), settings={**request.settings, "draw": round})
        return scores_of(again, context).mean()

    mask = algorithm.trainable.calibrated(context.network, score).mask
    space.scatter(before, context.network)
    return replace(answer(request, context), evidence={"mask": mask.bits()}), memory


def _representation(
    wanted: Observe, request: Request, context: ClientContext
) -> tuple[dict[str, float], dict[str, Tensor]]:
    """Pooled features of n of the client's own examples, after training."""
    rows = context.rows(request.client)
    stream = torch_stream(context.seed, "representation", request.round, request.client)
    n = int(wanted.options["samples"])
    picks = torch.cat([torch.randperm(len(rows), generator=stream) for _ in range(-(-n // len(rows)))])[:n]
    shown = torch.cat([z for z, _ in features(context, rows[picks])])
    return {}, {"representation": _noised(shown, wanted, request, context)}


def _noised(shown: Tensor, wanted: Observe, request: Request, context: ClientContext) -> Tensor:
    """Rows of length one with Gaussian noise of the asked-for size in every entry; as they are without noise.

    Asked again for the same rows a client gives the same answer, not a second sample of its noise.
    """
    noise = float(wanted.options.get("noise", 0.0))
    if noise == 0:
        return shown
    rows = torch.nn.functional.normalize(shown.cpu(), dim=1)
    key = bound_key(context.noise_key or simulation_key(context.seed), rows)
    return rows + noise * gaussian(rows.numel(), key, f"shown by {request.client}", request.round).view_as(rows).float()


def _probe(context: ClientContext) -> Examples:
    if context.probe is None:
        raise FedgraftError("comparing representations needs a probe: images that every client has, row by row")
    return context.probe


def _alignment(wanted: Observe, request: Request, context: ClientContext) -> tuple[dict[str, float], dict[str, Tensor]]:
    """SVCCA of each layer after training with the same layer of the model the round began with; numbers only."""
    layers, keep, top = wanted.options["layers"], int(wanted.options["keep"]), int(wanted.options["top"])
    extra = int(wanted.options["sketch"])
    after = hidden(context.network, layers, _probe(context))
    key = (request.round, layers, keep, extra)
    if context.reference is None or context.reference[0] != key:  # the same for every client of the round
        values = context.space.gather(context.network)
        context.space.scatter(vector_of(request), context.network)
        before = [basis_of(x, keep, extra) for x in hidden(context.network, layers, _probe(context))]
        context.space.scatter(values, context.network)
        context.reference = (key, before)
    found = [
        svcca_of_bases(basis_of(x, keep, extra), q, top).value for x, q in zip(after, context.reference[1], strict=True)
    ]
    return dict(zip(wanted.scalars, found, strict=True)), {}


def _probe_representation(
    wanted: Observe, request: Request, context: ClientContext
) -> tuple[dict[str, float], dict[str, Tensor]]:
    """Pooled features of the shared probe, after training."""
    probe = _probe(context)
    batches = look_through(context.network, probe, torch.arange(len(probe)), size=256)
    shown = torch.cat([z for _, z in batches])
    return {}, {"probe_representation": _noised(shown, wanted, request, context)}


def _fisher(wanted: Observe, request: Request, context: ClientContext) -> tuple[dict[str, float], dict[str, Tensor]]:
    """The mean squared gradient of single images at the trained model, by trained coordinate."""
    rows, bound = context.rows(request.client), context.bind(context.space)
    stream = torch_stream(context.seed, "fisher_merge", request.round, request.client)
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


def _self_weight(
    wanted: Observe, request: Request, context: ClientContext
) -> tuple[dict[str, float], dict[str, Tensor]]:
    """How much this client's own model should count when it is mixed with the others' mean."""
    common = request.auxiliary.get("common")
    if common is None:
        raise Refused("the order lacks the mean of all models, with which a self-weight is learned", "request")
    rows = parted(context.rows(request.client), float(wanted.options["aside"]), context.seed, request.client)[1]
    space, network = context.space, context.network
    own = space.gather(network)
    weight = learned(network, lambda v: space.scatter(v, network), own, common, context.examples, rows)
    return {"self_weight": weight}, {}


def _labels(wanted: Observe, request: Request, context: ClientContext) -> tuple[dict[str, float], dict[str, Tensor]]:
    """The client's label histogram: an oracle that a private federation would not give away."""
    labels = context.examples.labels[context.rows(request.client)]
    return {}, {"labels": torch.bincount(labels, minlength=context.network.classes).float()}


@runtime_checkable
class ChoosesMask(Protocol):
    """A trainable kind whose clients can choose coordinates by scores of their own."""

    def calibrated(self, network: Network, scores: Callable[[int], Mapping[str, Tensor]]) -> Calibration:
        """The mask that these scores give."""
        ...


OBSERVATIONS: dict[str, Callable[[Observe, Request, ClientContext], tuple[dict[str, float], dict[str, Tensor]]]] = {
    "alignment": _alignment,
    "representation": _representation,
    "probe_representation": _probe_representation,
    "labels": _labels,
    "fisher": _fisher,
    "self_weight": _self_weight,
}
