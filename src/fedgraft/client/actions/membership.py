"""How well a model tells a client's training images from its test images: the sums of `metrics.membership`."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

import torch
from torch import Tensor

from fedgraft.algorithms.algorithm import Algorithm
from fedgraft.client.action import Action, RunPhase, SumScope
from fedgraft.client.context import ClientContext, empty_response, model_vector
from fedgraft.client.request_checks import require_tensor
from fedgraft.core.client_memory import ClientMemory
from fedgraft.core.device import fetch
from fedgraft.core.errors import Refused
from fedgraft.core.messages import Request, Response, Scalar
from fedgraft.core.protocols import Network
from fedgraft.core.rng import torch_stream
from fedgraft.metrics import membership
from fedgraft.metrics.evaluate import logits_of
from fedgraft.privacy.secagg.ring import Segment, Summand, segments_of

RARE = "rare"
"""The tensor of a request that says which classes are rare, uint8 (C,)."""
SPLITS = ("train", "test")
"""A request is about one of them, so that the ledger of a data set knows which rows an answer is about."""
Side = tuple[Tensor, Tensor, Tensor]
MOST_MEMBERS = 4096
"""Training images of a client that are looked at; of more, a random draw."""


def member_rows(context: ClientContext, client: int) -> Tensor:
    """Return the training rows of a client that count as members: all, or a draw of `MOST_MEMBERS`, sorted."""
    rows = context.rows(client)
    if len(rows) <= MOST_MEMBERS:
        return rows
    generator = torch_stream(context.seed, "membership", client)
    return rows[torch.randperm(len(rows), generator=generator)[:MOST_MEMBERS]].sort().values


def side_of_network(network: Network, context: ClientContext, client: int, split: str, rare: Tensor) -> Side:
    """Return what the sums of one side are made of: bin of each loss, right answers, whether the class is rare.

    The side "train" are the client's training images, "test" its own test images. `rare` is bool (C,).
    """
    if split == "train":
        examples, rows = context.examples, member_rows(context, client)
    else:
        examples = context.examples if context.tests is None else context.tests
        no_rows = torch.empty(0, dtype=torch.int64)
        rows = no_rows if context.test_rows is None else context.test_rows(client)
    logits = logits_of(network, examples, rows)
    labels = fetch(examples.labels[rows])
    return (
        membership.loss_bins(logits, labels),
        membership.right_answers(logits, labels),
        membership.is_of_rare_class(labels, rare),
    )


def _sums(request: Request, algorithm: Algorithm, context: ClientContext) -> dict[str, Tensor]:
    """Return the sums of the request's model about the split that it names; the model stays loaded."""
    context.load_model(model_vector(request))
    rare = request.auxiliary[RARE].bool()
    side = side_of_network(context.network, context, request.client, _split(request), rare)
    return membership.side_sums(*side, algorithm.privacy.sum_options.smallest_group)


def _answer(
    request: Request, algorithm: Algorithm, context: ClientContext, memory: ClientMemory
) -> tuple[Response, ClientMemory]:
    """Return the response with the sums in the clear, and the client's memory as it was."""
    return replace(empty_response(request, context), sums=_sums(request, algorithm, context)), memory


def _hidden(
    request: Request, algorithm: Algorithm, context: ClientContext, memory: ClientMemory
) -> tuple[Mapping[str, Tensor], ClientMemory]:
    """Return the sums for a secure sum, and the client's memory as it was."""
    return _sums(request, algorithm, context), memory


def _split(request: Request) -> str:
    """Return which images a request is about, "train" or "test"."""
    return str(request.settings.get("split"))


def _images(request: Request, context: ClientContext) -> int:
    """Return how many images the answer would be about."""
    if _split(request) == "train":
        return len(context.rows(request.client))
    return 0 if context.test_rows is None else len(context.test_rows(request.client))


def _summands(network: Network, settings: Mapping[str, Scalar]) -> dict[str, Summand]:
    """Return shape and range of each sum, by name."""
    summands = {}
    for name, layout in membership.side_layouts().items():
        summands[name] = Summand(layout.shape, torch.float64, layout.limit, layout.step)
    return summands


def _layout(scope: SumScope) -> tuple[Segment, ...]:
    assert scope.network is not None
    return segments_of(_summands(scope.network, scope.settings))


def _validate(request: Request, algorithm: Algorithm, context: ClientContext) -> None:
    """Refuse a model of another size, a split that there is not, and rare classes that are not this network's."""
    require_tensor("the model", model_vector(request), (context.space.size,))
    if _split(request) not in SPLITS:
        raise Refused("the request names neither training nor test images", "request")
    rare = request.auxiliary.get(RARE)
    if rare is None or rare.dtype != torch.uint8 or tuple(rare.shape) != (context.network.classes,):
        raise Refused("the list of rare classes is missing or has another length than the classes here", "request")


def _implausible(response: Response) -> str:
    return membership.implausible_side(response.sums)


ACTIONS = [
    Action(
        "membership",
        RunPhase.EVALUATION,
        "losses of training and test images, counted",
        _answer,
        settings={"split": str},
        model="edit_space",
        tensor_names=(RARE,),
        validate=_validate,
        summands=_summands,
        layout=_layout,
        summed=_hidden,
        implausible=_implausible,
        split=_split,
        splits=SPLITS,
        images=_images,
    ),
]
