"""How well a model tells a client's training images from its test images: the sums of `metrics.membership`."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

import torch
from torch import Tensor

from fedgraft.algorithms.algorithm import Algorithm
from fedgraft.client.action import Action, RunPhase, SumScope
from fedgraft.client.actions.evaluation import held_out_images, requested_split
from fedgraft.client.context import ClientContext, empty_response, model_vector
from fedgraft.client.request_checks import require_tensor
from fedgraft.core.client_memory import ClientMemory
from fedgraft.core.device import fetch
from fedgraft.core.errors import Refused
from fedgraft.core.messages import Request, Response, Scalar
from fedgraft.core.protocols import Examples, Network
from fedgraft.core.rng import torch_stream
from fedgraft.metrics import membership
from fedgraft.metrics.evaluate import logits_of
from fedgraft.privacy.secagg.ring import Segment, Summand, segments_of

RARE = "rare"
"""The tensor of a request that says which classes are rare, uint8 (C,)."""
MOST_MEMBERS = 4096
"""Training images of a client that are looked at; of more, a random draw."""


def member_rows(context: ClientContext, client: int) -> Tensor:
    """Return the training rows of a client that count as members: all, or a draw of `MOST_MEMBERS`, sorted."""
    rows = context.rows(client)
    if len(rows) <= MOST_MEMBERS:
        return rows
    generator = torch_stream(context.seed, "membership", client)
    return rows[torch.randperm(len(rows), generator=generator)[:MOST_MEMBERS]].sort().values


def membership_of_client(request: Request, context: ClientContext, smallest: int) -> dict[str, Tensor]:
    """Return the sums of `metrics.membership` of the request's model: training images against own test images.

    Groups of classes with fewer than `smallest` images on one side are left out there. The model stays loaded in the
    client's network.
    """
    context.load_model(model_vector(request))
    return membership_of_network(context.network, context, request, smallest)


def membership_of_network(
    network: Network, context: ClientContext, request: Request, smallest: int
) -> dict[str, Tensor]:
    """Return the same sums of a network as it is; of the request only the client and the rare classes count."""
    rare = request.auxiliary[RARE].bool()
    tests, test_rows = requested_split(replace(request, settings={"split": "test"}), context)
    members = _side(network, context.examples, member_rows(context, request.client), rare)
    outsiders = _side(network, tests, test_rows, rare)
    return membership.histogram_sums(members, outsiders, smallest)


def _side(network: Network, examples: Examples, rows: Tensor, rare: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Return the bin of each image's loss, whether the answer is right, and whether the class is rare."""
    logits = logits_of(network, examples, rows)
    labels = fetch(examples.labels[rows])
    return (
        membership.loss_bins(logits, labels),
        membership.right_answers(logits, labels),
        membership.is_of_rare_class(labels, rare),
    )


def _answer(
    request: Request, algorithm: Algorithm, context: ClientContext, memory: ClientMemory
) -> tuple[Response, ClientMemory]:
    """Return the response with the sums in the clear, and the client's memory as it was."""
    smallest = algorithm.privacy.sum_options.smallest_group
    return replace(empty_response(request, context), sums=membership_of_client(request, context, smallest)), memory


def _hidden(
    request: Request, algorithm: Algorithm, context: ClientContext, memory: ClientMemory
) -> tuple[Mapping[str, Tensor], ClientMemory]:
    """Return the sums for a secure sum, and the client's memory as it was."""
    return membership_of_client(request, context, algorithm.privacy.sum_options.smallest_group), memory


def _summands(network: Network, settings: Mapping[str, Scalar]) -> dict[str, Summand]:
    """Return shape and range of each sum, by name."""
    summands = {}
    for name, layout in membership.membership_layouts().items():
        summands[name] = Summand(layout.shape, torch.float64, layout.limit, layout.step)
    return summands


def _layout(scope: SumScope) -> tuple[Segment, ...]:
    assert scope.network is not None
    return segments_of(_summands(scope.network, scope.settings))


def _validate(request: Request, algorithm: Algorithm, context: ClientContext) -> None:
    """Refuse a model of another size, and a list of rare classes that does not name this network's classes."""
    require_tensor("the model", model_vector(request), (context.space.size,))
    rare = request.auxiliary.get(RARE)
    if rare is None or rare.dtype != torch.uint8 or tuple(rare.shape) != (context.network.classes,):
        raise Refused("the list of rare classes is missing or has another length than the classes here", "request")


def _implausible(response: Response) -> str:
    return membership.implausible_membership(response.sums)


ACTIONS = [
    Action(
        "membership",
        RunPhase.EVALUATION,
        "losses of training and test images, counted",
        _answer,
        model="edit_space",
        tensor_names=(RARE,),
        validate=_validate,
        summands=_summands,
        layout=_layout,
        summed=_hidden,
        implausible=_implausible,
        images=held_out_images,
    ),
]
