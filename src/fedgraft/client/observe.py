"""What a client shows of itself beside an update: alignment, representations, labels, curvature, a mask of its own."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from fedgraft.aggregate.similarity import svcca_of_bases
from fedgraft.aggregate.sketch import basis_of
from fedgraft.aggregate.slots import Observe
from fedgraft.client.context import ClientContext, features, model_vector
from fedgraft.core.errors import FedgraftError, Refused
from fedgraft.core.messages import Request
from fedgraft.core.protocols import Examples, Network
from fedgraft.core.rng import torch_stream
from fedgraft.core.space import Bound
from fedgraft.local.features import feature_batches as look_through
from fedgraft.local.features import hidden
from fedgraft.local.self_weight import learn_self_weight, split_aside
from fedgraft.privacy.dp import bound_key, gaussian, simulation_key


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
        context.space.scatter(model_vector(request), context.network)
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
    rows = split_aside(context.rows(request.client), float(wanted.options["aside"]), context.seed, request.client)[1]
    space, network = context.space, context.network
    own = space.gather(network)
    weight = learn_self_weight(network, lambda v: space.scatter(v, network), own, common, context.examples, rows)
    return {"self_weight": weight}, {}


def _labels(wanted: Observe, request: Request, context: ClientContext) -> tuple[dict[str, float], dict[str, Tensor]]:
    """The client's label histogram: an oracle that a private federation would not give away."""
    labels = context.examples.labels[context.rows(request.client)]
    return {}, {"labels": torch.bincount(labels, minlength=context.network.classes).float()}


OBSERVATIONS: dict[str, Callable[[Observe, Request, ClientContext], tuple[dict[str, float], dict[str, Tensor]]]] = {
    "alignment": _alignment,
    "representation": _representation,
    "probe_representation": _probe_representation,
    "labels": _labels,
    "fisher": _fisher,
    "self_weight": _self_weight,
}
