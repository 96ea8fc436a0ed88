"""Observations that a client reports beside an update: alignment, representations, labels, curvature, self-weight.

Each function of `OBSERVATIONS` takes the `Observe` that names the observation with its options, the training request
and the context, whose network holds the trained model. It returns named scalars and named tensors for the response.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from fedgraft.aggregate.similarity import svcca_of_bases
from fedgraft.aggregate.sketch import basis_of
from fedgraft.aggregate.slots import Observe
from fedgraft.client.context import ClientContext, model_vector, pooled_batches
from fedgraft.core.device import Device, fetch
from fedgraft.core.errors import FedgraftError, Refused
from fedgraft.core.messages import Request
from fedgraft.core.protocols import Examples, Network
from fedgraft.core.rng import torch_stream
from fedgraft.core.space import Bound
from fedgraft.local.features import feature_batches, hidden
from fedgraft.local.self_weight import learn_self_weight, split_aside
from fedgraft.privacy.dp import bound_key, gaussian_noise, simulation_key


def _representation(
    wanted: Observe, request: Request, context: ClientContext
) -> tuple[dict[str, float], dict[str, Tensor]]:
    """Return the pooled features of `samples` of the client's own images under the trained model, (samples, width)."""
    rows = context.rows(request.client)
    stream = torch_stream(context.seed, "representation", request.round, request.client)
    samples = int(wanted.options["samples"])
    passes = -(-samples // len(rows))  # a client with fewer rows reports some of them again
    orders = [torch.randperm(len(rows), generator=stream) for _ in range(passes)]
    picked_rows = rows[torch.cat(orders)[:samples]]
    pooled = torch.cat([batch for batch, _ in pooled_batches(context, picked_rows)])
    return {}, {"representation": _with_noise(pooled, wanted, request, context)}


def _with_noise(pooled: Tensor, wanted: Observe, request: Request, context: ClientContext) -> Tensor:
    """Return the rows scaled to length one, with Gaussian noise of the option `noise` in every entry.

    Without the option they are unchanged. A repeated request for the same rows gets the same noise, so averaging
    repeated responses reveals nothing more.
    """
    noise = float(wanted.options.get("noise", 0.0))
    if noise == 0:
        return pooled
    rows = torch.nn.functional.normalize(pooled, dim=1)
    key = bound_key(context.noise_key or simulation_key(context.seed), rows)
    draws = gaussian_noise(rows.numel(), key, f"shown by {request.client}", request.round)
    return rows + noise * draws.view_as(rows).float()


def _probe(context: ClientContext) -> Examples:
    """Return the probe images, which all clients share; raise where the run has none."""
    if context.probe is None:
        raise FedgraftError(
            "E-CLIENT-NO-PROBE",
            "comparing representations needs a probe: images that every client has, row by row",
            "give the run validation images to draw it from (algorithm.probe)",
        )
    return context.probe


def _alignment(wanted: Observe, request: Request, context: ClientContext) -> tuple[dict[str, float], dict[str, Tensor]]:
    """Return the SVCCA of each layer after training with the same layer of the round's starting model, as scalars.

    The starting model's bases are cached in `context.reference` for the other clients of the round; the network's
    weights are put back.
    """
    layers = wanted.options["layers"]
    keep = int(wanted.options["keep"])
    top = int(wanted.options["top"])
    extra = int(wanted.options["sketch"])
    after = hidden(context.network, layers, _probe(context))
    key = (request.round, layers, keep, extra)
    if context.reference is None or context.reference[0] != key:  # the same for every client of the round
        values = context.space.gather(context.network)
        context.space.scatter(model_vector(request), context.network)
        before = hidden(context.network, layers, _probe(context))
        context.space.scatter(values, context.network)
        context.reference = (key, [basis_of(activations, keep, extra) for activations in before])
    scalars = {}
    for name, activations, reference in zip(wanted.scalars, after, context.reference[1], strict=True):
        scalars[name] = svcca_of_bases(basis_of(activations, keep, extra), reference, top).value
    return scalars, {}


def _probe_representation(
    wanted: Observe, request: Request, context: ClientContext
) -> tuple[dict[str, float], dict[str, Tensor]]:
    """Return the pooled features of the probe images under the trained model, (probe images, width)."""
    probe = _probe(context)
    batches = feature_batches(context.network, probe, torch.arange(len(probe)), size=256)
    pooled = torch.cat([batch for _, batch in batches])
    return {}, {"probe_representation": _with_noise(pooled, wanted, request, context)}


def _fisher(wanted: Observe, request: Request, context: ClientContext) -> tuple[dict[str, float], dict[str, Tensor]]:
    """Return the diagonal Fisher of the trained model: the mean squared gradient of `samples` random images."""
    rows = context.rows(request.client)
    bound = context.bind(context.space)
    stream = torch_stream(context.seed, "fisher_merge", request.round, request.client)
    picked = rows[torch.randperm(len(rows), generator=stream)[: int(wanted.options["samples"])]]
    return {}, {"fisher": squared_gradients(context.network, bound, context.examples, picked)}


def squared_gradients(network: Network, bound: Bound, examples: Examples, rows: Tensor) -> Tensor:
    """Return the mean over these rows of the squared gradient of each row's loss, (trained,); no weight changes."""
    network.eval()
    device = Device.of(network)
    total = torch.zeros(bound.trained, dtype=device.widest, device=device.torch_device)
    for row in rows.split(1):
        logits = network(device.put(examples.batch(row)), examples.entry)
        torch.nn.functional.cross_entropy(logits, device.put(examples.labels[row])).backward()
        total += bound.gradient().to(device.widest).square()
    return fetch((total / max(1, len(rows))).float())


def _self_weight(
    wanted: Observe, request: Request, context: ClientContext
) -> tuple[dict[str, float], dict[str, Tensor]]:
    """Return the weight of this client's own model when it is mixed with the mean of the clients' models.

    The mean is the request's tensor `common`, that of the clients which responded last. The weight is learned on the
    rows that training left aside, and the network's weights are overwritten.
    """
    common = request.auxiliary.get("common")
    if common is None:
        raise Refused("the request lacks the mean of all models, with which a self-weight is learned", "request")
    share_aside = float(wanted.options["aside"])
    _, rows = split_aside(context.rows(request.client), share_aside, context.seed, request.client)
    space = context.space
    network = context.network
    own = space.gather(network)

    def load(vector: Tensor) -> None:
        space.scatter(vector, network)

    weight = learn_self_weight(network, load, own, common, context.examples, rows)
    return {"self_weight": weight}, {}


def _labels(wanted: Observe, request: Request, context: ClientContext) -> tuple[dict[str, float], dict[str, Tensor]]:
    """Return the client's label histogram, (classes,): for experiments; a private federation would not reveal it."""
    labels = context.examples.labels[context.rows(request.client)]
    return {}, {"labels": torch.bincount(labels, minlength=context.network.classes).float()}


def _discrepancy(
    wanted: Observe, request: Request, context: ClientContext
) -> tuple[dict[str, float], dict[str, Tensor]]:
    """Return the Euclidean distance between the client's class frequencies and equal ones, as a scalar (FedDisco)."""
    classes = context.network.classes
    labels = context.examples.labels[context.rows(request.client)]
    frequencies = torch.bincount(labels, minlength=classes).double() / len(labels)
    return {"discrepancy": float((frequencies - 1 / classes).norm())}, {}


OBSERVATIONS: dict[str, Callable[[Observe, Request, ClientContext], tuple[dict[str, float], dict[str, Tensor]]]] = {
    "alignment": _alignment,
    "representation": _representation,
    "probe_representation": _probe_representation,
    "labels": _labels,
    "fisher": _fisher,
    "self_weight": _self_weight,
    "discrepancy": _discrepancy,
}
