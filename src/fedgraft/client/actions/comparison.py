"""Comparing two models on the images that a client holds out or tests on: the sums of `metrics.comparison`."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

import torch
from torch import Tensor

from fedgraft.algorithms.algorithm import Algorithm
from fedgraft.client.action import Action, RunPhase, SumScope
from fedgraft.client.actions.evaluation import held_out_images, requested_split, split_of, validate_split
from fedgraft.client.context import ClientContext, empty_response, model_vector
from fedgraft.client.request_checks import require_tensor
from fedgraft.core.client_memory import ClientMemory
from fedgraft.core.device import fetch
from fedgraft.core.messages import Request, Response, Scalar
from fedgraft.core.protocols import Network
from fedgraft.metrics.comparison import comparison_sums, implausible_comparison, layouts
from fedgraft.metrics.evaluate import logits_of
from fedgraft.privacy.secagg.ring import Segment, Summand, segments_of

OTHER = "other"
"""The tensor of a request with the second model, as a vector of the same space as the first."""


def compare_models(request: Request, context: ClientContext, smallest: int) -> dict[str, Tensor]:
    """Return the sums of `metrics.comparison` of the request's model and its tensor `other`, on the split it names.

    Findings that are present or absent in fewer than `smallest` images are left out. The second model stays loaded in
    the client's network.
    """
    examples, rows = requested_split(request, context)
    both = []
    for vector in (model_vector(request), request.auxiliary[OTHER]):
        context.load_model(vector)
        both.append(logits_of(context.network, examples, rows))
    return comparison_sums(both[0], both[1], fetch(examples.labels[rows]), smallest)


def _answer(
    request: Request, algorithm: Algorithm, context: ClientContext, memory: ClientMemory
) -> tuple[Response, ClientMemory]:
    """Return the response with the sums in the clear, and the client's memory as it was."""
    smallest = algorithm.privacy.sum_options.smallest_group
    return replace(empty_response(request, context), sums=compare_models(request, context, smallest)), memory


def _hidden(
    request: Request, algorithm: Algorithm, context: ClientContext, memory: ClientMemory
) -> tuple[Mapping[str, Tensor], ClientMemory]:
    """Return the sums for a secure sum, which rounds them to its steps, and the client's memory as it was."""
    return compare_models(request, context, algorithm.privacy.sum_options.smallest_group), memory


def _summands(network: Network, settings: Mapping[str, Scalar]) -> dict[str, Summand]:
    """Return shape and range of each sum, by name."""
    summands = {}
    for name, layout in layouts(network.classes).items():
        summands[name] = Summand(layout.shape, torch.float64, layout.limit, layout.step)
    return summands


def _layout(scope: SumScope) -> tuple[Segment, ...]:
    assert scope.network is not None
    return segments_of(_summands(scope.network, scope.settings))


def _validate(request: Request, algorithm: Algorithm, context: ClientContext) -> None:
    """Refuse a second model that does not have the size of the first, and a split that does not exist."""
    validate_split(request, algorithm, context)
    require_tensor("the second model", request.auxiliary.get(OTHER), (context.space.size,))


def _implausible(response: Response) -> str:
    return implausible_comparison(response.sums)


ACTIONS = [
    Action(
        "comparison",
        RunPhase.EVALUATION,
        "comparison of two models at the clients",
        _answer,
        settings={"split": str},
        model="edit_space",
        tensor_names=(OTHER,),
        validate=_validate,
        summands=_summands,
        layout=_layout,
        summed=_hidden,
        implausible=_implausible,
        split=split_of,
        images=held_out_images,
    ),
]
