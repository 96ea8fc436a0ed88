"""Scores and gradients of weights on a client's examples, by which the server chooses what trains."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Protocol, cast, runtime_checkable

import torch
from torch import Tensor, nn

from fedgraft.algorithms.algorithm import Algorithm
from fedgraft.client.action import Action, RunPhase, sum_action
from fedgraft.client.context import ClientContext, empty_response, model_vector
from fedgraft.core.client_memory import ClientMemory
from fedgraft.core.device import Device, fetch, inputs_on
from fedgraft.core.errors import FedgraftError, Refused
from fedgraft.core.label_sets import loss_sum
from fedgraft.core.messages import Request, Response, Scalar
from fedgraft.core.protocols import Network
from fedgraft.core.rng import torch_stream
from fedgraft.core.space import select
from fedgraft.edit.calibrate import Calibration
from fedgraft.edit.fisher import ESTIMATORS, Scores
from fedgraft.privacy.secagg.ring import Summand

_SHARE_SETTINGS = {"names": str, "draw": int, "share": float}
"""Names of the weights, one a line; the number of the draw; the share of the client's rows that is drawn."""
_SCORE_SETTINGS = {**_SHARE_SETTINGS, "estimator": str, "labels": str, "batch": int}
"""And the Fisher estimator, whose labels it uses ("true", "expected", ...), and the batch size."""


_CLEAR_LIMIT = 2.0**100
"""Scores of a head that is sure of wrong answers grow with the square of its weights: in the clear nothing but float32
bounds them. Inside a secure sum 2^33 does: a thousand images of 2^23 each, in as many words as 2^23 needed."""


def _named_weights(settings: Mapping[str, Scalar]) -> list[str]:
    """Return the names of the parameters that a request is about, from its setting "names"."""
    return str(settings["names"]).split("\n")


def _count_weights(network: Network, settings: Mapping[str, Scalar]) -> int:
    names = set(_named_weights(settings))
    return sum(p.numel() for name, p in network.named_parameters() if name in names)


def _require_known_weights(request: Request, algorithm: Algorithm, context: ClientContext) -> None:
    """Refuse names of weights that this network does not have, and names that come twice."""
    known = {name for name, _ in context.network.named_parameters()}
    names = _named_weights(request.settings)
    if len(set(names)) != len(names):
        raise Refused("the request names a weight twice", "request")
    if not set(names) <= known:
        raise Refused("the request names a weight that this network does not have", "request")


def _require_known_estimator(request: Request, algorithm: Algorithm, context: ClientContext) -> None:
    """Refuse unknown estimators and unknown weights."""
    _require_known_weights(request, algorithm, context)
    if request.settings["estimator"] not in ESTIMATORS:
        raise Refused("the request names an estimator that does not exist", "request")


def _rows_in_share(request: Request, context: ClientContext) -> int:
    """Return how many training rows a client scores: the request's `share` of its rows, at least one.

    Where scores are those of a single batch it is not more than the request's `batch`.
    """
    rows = len(context.rows(request.client))
    count = max(1, round(float(request.settings["share"]) * rows))
    if request.settings.get("estimator") == "single_batch_abs":  # rows are drawn, not the first of a sorted data set
        count = min(count, int(request.settings["batch"]))
    return count


def _canonical_share(request: Request, context: ClientContext) -> dict[str, Scalar]:
    """Return the settings so that requests about the same weights and the same rows have the same.

    The ledger counts such requests as one question (`Action.canonical`). A share counts as the number of rows that it
    gives; of all rows there is one draw only, whatever its number.
    """
    settings = {name: value for name, value in request.settings.items() if name != "sums"}
    settings["names"] = "\n".join(sorted(set(_named_weights(request.settings))))
    settings["share"] = _rows_in_share(request, context)
    if settings["share"] == len(context.rows(request.client)):
        settings["draw"] = 0
    return settings


def _draw_share(request: Request, context: ClientContext, purpose: str) -> tuple[Tensor, torch.Generator]:
    """Return a random share of the client's training rows, sorted, and the generator it was drawn with.

    The share and the number of the draw are settings of the request; `purpose` names the random stream.
    """
    rows = context.rows(request.client)
    generator = torch_stream(context.seed, purpose, str(request.settings["draw"]), request.client)
    drawn = rows[torch.randperm(len(rows), generator=generator)[: _rows_in_share(request, context)]]
    return drawn.sort().values, generator


# ---- Fisher scores


def score_weights(request: Request, context: ClientContext) -> Scores:
    """Return the Fisher scores of the weights named in the request, on a random share of this client's training images.

    The model that the request carries (all weights of the network) is loaded for it; afterwards the network has its own
    weights again, bit for bit.
    """
    settings = request.settings
    network = context.network
    batch_size = int(settings["batch"])
    rows, generator = _draw_share(request, context, "fisher_scores")
    all_weights = select(network, lambda name: True, buffers=False)
    before = all_weights.gather(network)
    context.forget_binding()
    all_weights.scatter(model_vector(request), network)
    device = Device.of(network)
    batches = []
    for batch_rows in rows.split(batch_size):
        inputs = inputs_on(device, context.examples, batch_rows)
        labels = device.put(context.examples.labels[batch_rows])
        batches.append((inputs, labels, context.examples.entry))
    estimate = ESTIMATORS[str(settings["estimator"])]
    scores = estimate(cast(nn.Module, network), batches, str(settings["labels"]), _named_weights(settings), generator)
    all_weights.scatter(before, network)
    return scores


def fisher_scores(request: Request, context: ClientContext) -> dict[str, Tensor]:
    """Return {"scores": (weights + 1,)}: squared gradients summed over a share of this client's images.

    The last entry is the number of those images.
    """
    return {"scores": score_weights(request, context).vector()}


def _fisher_summands(network: Network, settings: Mapping[str, Scalar]) -> dict[str, Summand]:
    size = _count_weights(network, settings) + 1  # the last entry counts examples
    return {"scores": Summand((size,), torch.float32, 2.0**33, 2.0**-40, _CLEAR_LIMIT)}


def _fisher_implausible(response: Response) -> str:
    """Return what cannot be true of the scores: negative sums, or more images than the client has; "" if nothing."""
    scores = response.sums["scores"]
    if not 0 < float(scores[-1]) <= response.examples or not bool((scores >= 0).all()):
        return "its scores are not sums of squares over so many examples"
    return ""


# ---- gradients


def gradient(request: Request, context: ClientContext) -> dict[str, Tensor]:
    """Return {"gradient": (weights,)}: the loss gradient of the named weights, summed over some of the client's images.

    The images are a random share. The gradient is taken at the model that the request carries; afterwards the network
    has its own weights again, bit for bit.
    """
    network = context.network
    names = set(_named_weights(request.settings))
    rows, _ = _draw_share(request, context, "gradient")
    all_weights = select(network, lambda name: True, buffers=False)
    before = all_weights.gather(network)
    context.forget_binding()
    all_weights.scatter(model_vector(request), network)
    bound = select(network, lambda name: name in names, buffers=False).bind(network)
    network.eval()
    device = Device.of(network)
    total = torch.zeros(bound.trained, device=device.torch_device)
    for batch_rows in rows.split(64):
        inputs = inputs_on(device, context.examples, batch_rows)
        labels = device.put(context.examples.labels[batch_rows])
        logits = network(inputs, context.examples.entry)
        loss_sum(logits, labels).backward()
        total += bound.gradient()
    all_weights.scatter(before, network)
    return {"gradient": fetch(total)}


def _gradient_summands(network: Network, settings: Mapping[str, Scalar]) -> dict[str, Summand]:
    size = _count_weights(network, settings)
    return {"gradient": Summand((size,), torch.float32, 2.0**33, 2.0**-30, _CLEAR_LIMIT)}


# ---- a mask of the client's own


@runtime_checkable
class ChoosesMask(Protocol):
    """A trainable kind whose clients can choose coordinates by scores of their own."""

    def calibrated(self, network: Network, scores: Callable[[int], Mapping[str, Tensor]]) -> Calibration:
        """Return the mask that these scores give.

        `scores(round)` returns the scores of each weight in a calibration round.
        """
        ...


def own_mask(
    request: Request, algorithm: Algorithm, context: ClientContext, memory: ClientMemory
) -> tuple[Response, ClientMemory]:
    """Calibrate a sparse mask on this client's own examples, starting from the request's model.

    Return the response, whose evidence is {"mask": the mask as packed bits}, and the memory as it was. The network's
    weights are put back.
    """
    trainable = algorithm.trainable
    if not isinstance(trainable, ChoosesMask):
        raise FedgraftError(
            "E-CLIENT-NO-MASK",
            f"client {request.client} was asked for a mask, and {trainable.kind} has none",
            client=request.client,
            kind=trainable.kind,
        )
    network = context.network
    all_weights = select(network, lambda name: True, buffers=False)
    before = all_weights.gather(network)
    all_weights.scatter(model_vector(request), network)

    def score(round: int) -> Mapping[str, Tensor]:
        """Return the mean scores of the network's present weights on the rows drawn for this calibration round."""
        settings = {**request.settings, "draw": round}
        round_request = replace(request, vector=all_weights.gather(network), settings=settings)
        return score_weights(round_request, context).mean()

    mask = trainable.calibrated(network, score).mask
    all_weights.scatter(before, network)
    return replace(empty_response(request, context), evidence={"mask": mask.bits()}), memory


ACTIONS = [
    sum_action(
        "fisher_scores",
        fisher_scores,
        _fisher_summands,
        phase=RunPhase.CALIBRATION,
        progress_label="mask calibration: scores",
        settings=_SCORE_SETTINGS,
        model="all_weights",
        validate=_require_known_estimator,
        implausible=_fisher_implausible,
        canonical=_canonical_share,
    ),
    sum_action(
        "gradient",
        gradient,
        _gradient_summands,
        phase=RunPhase.CALIBRATION,
        progress_label="low-rank factors: summed gradients",
        settings=_SHARE_SETTINGS,
        model="all_weights",
        validate=_require_known_weights,
        canonical=_canonical_share,
    ),
    Action(
        "own_mask",
        RunPhase.CALIBRATION,
        "mask calibration: masks of the clients",
        own_mask,
        settings=_SCORE_SETTINGS,
        model="all_weights",
        validate=_require_known_estimator,
        shown_alone=True,
        canonical=_canonical_share,
    ),
]
