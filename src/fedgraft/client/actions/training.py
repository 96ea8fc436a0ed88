"""Local training: the update in the clear, encoded, or weighted inside a secure sum."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

import torch
from torch import Tensor

from fedgraft.aggregate.buffering import BufferedRounds
from fedgraft.algorithms.algorithm import Algorithm, secure_segments
from fedgraft.client.action import Action, RunPhase, SumScope
from fedgraft.client.context import ClientContext, empty_response
from fedgraft.client.request_checks import is_secure_stage, require_settings, require_tensor
from fedgraft.client.train import train_locally
from fedgraft.core.client_memory import ClientMemory
from fedgraft.core.errors import Refused
from fedgraft.core.messages import Request, Response
from fedgraft.core.rng import torch_stream
from fedgraft.privacy.secagg.ring import Segment
from fedgraft.privacy.secagg.secure_sum import TAIL, weighted_input


def train_client(
    request: Request, algorithm: Algorithm, context: ClientContext, memory: ClientMemory
) -> tuple[Response, ClientMemory]:
    """Train locally and return the response with the encoded update, and the client's new memory.

    The response also carries the vectors that a correction sends (`sums`) and the observations (`evidence`).
    """
    outcome = train_locally(request, algorithm, context, memory)
    trained = outcome.trained
    response = update_response(
        request, algorithm, context, outcome.update, outcome.scalars, trained.metrics, outcome.memory
    )
    return replace(response, sums=trained.closing.sums, evidence=outcome.evidence), outcome.memory


def update_response(
    request: Request,
    algorithm: Algorithm,
    context: ClientContext,
    update: Tensor,
    scalars: Mapping[str, float],
    metrics: Mapping[str, float],
    memory: dict[str, Tensor],
) -> Response:
    """Return the response to a training request, with the update encoded by the algorithm's codec.

    Args:
        update: the update, float32 (coordinates sent,).
        scalars: named numbers that weighting and aggregation use.
        metrics: mean training loss and number of steps, for the record.
        memory: the client's new memory; a codec with error feedback stores in it, in place, what it did not send.
    """
    generator = torch_stream(context.seed, "encode", request.round, request.client)
    encoded = algorithm.compression.encode(update, generator, memory)
    response = replace(empty_response(request, context), update=encoded, scalars=scalars)
    if not algorithm.privacy.weighs_examples:
        # Losses and numbers of examples are not part of the privacy account: a private client keeps them to itself.
        return replace(response, examples=0, metrics={})
    if algorithm.privacy.records is not None:  # no noise covers the losses; numbers of images are known to all
        metrics = {}
    return replace(response, examples=len(context.rows(request.client)), metrics=metrics)


def weighted_update(
    request: Request, algorithm: Algorithm, context: ClientContext, memory: ClientMemory
) -> tuple[Mapping[str, Tensor], ClientMemory]:
    """Train locally and return this client's summand of a secure sum, and its new memory.

    The summand holds the update times the client's weight in 0..1, the weight itself, the vectors of a correction and
    the reported scalars, by segment. `settings["largest"]` is the number of examples above which clients count no more.
    """
    outcome = train_locally(request, algorithm, context, memory)
    sums = outcome.trained.closing.sums
    return summand_of_update(request, algorithm, context, outcome.update, outcome.scalars, sums), outcome.memory


def summand_of_update(
    request: Request,
    algorithm: Algorithm,
    context: ClientContext,
    update: Tensor,
    scalars: Mapping[str, float],
    sums: Mapping[str, Tensor],
) -> Mapping[str, Tensor]:
    """Return an update with its weight, its reported scalars and its auxiliary vectors as a summand, by segment."""
    assert algorithm.weighting.own is not None
    largest = float(request.settings["largest"])
    examples = min(largest, float(len(context.rows(request.client))))
    weight = algorithm.weighting.own(examples, scalars, largest)
    weight = min(1.0, max(0.0, weight))
    reported = {name: scalars[name] for name in algorithm.reports}
    segments = secure_segments(algorithm, context.sent, context.space.trained, request.settings)
    tail_length = sum(segment.length for segment in segments if segment.name == TAIL)
    return weighted_input(update, weight, sums, reported, tail_length)


def layout_of_update(scope: SumScope) -> tuple[Segment, ...]:
    """Return the segments of a secure sum of updates."""
    assert scope.algorithm is not None
    return secure_segments(scope.algorithm, scope.length, scope.trained, scope.settings)


def _trains_ahead(algorithm: Algorithm) -> bool:
    """Return whether clients train first and are summed when enough of them are done."""
    return isinstance(algorithm.rounds, BufferedRounds) and algorithm.privacy.collects_sum


def require_ahead(algorithm: Algorithm) -> None:
    """Refuse what only belongs to buffered rounds under secure aggregation, where a run has not both."""
    if not _trains_ahead(algorithm):
        raise Refused("this run has no buffered secure rounds", "actions")


def validate_training(request: Request, algorithm: Algorithm, context: ClientContext) -> None:
    """Refuse a training request whose settings or tensors do not have the names, types and shapes of this run.

    The tensors are the vectors of a correction, the mean model `common`, the cluster models, and the bit mask `active`.
    """
    if request.action != "train_ahead" and _trains_ahead(algorithm):
        raise Refused("clients train ahead of the sum here: in two sums the same update could be told", "request")
    settings: dict[str, type] = {}
    if algorithm.privacy.needs_clip:
        settings["clip"] = float
    if is_secure_stage(request):
        settings["largest"] = float
    if "head_lr" in request.settings:
        settings["head_lr"] = float
    require_settings(request, settings)
    if request.space != context.space.digest:
        raise Refused("the request is for another edit space", "request")
    trained = context.space.trained
    size = context.space.size
    for name in algorithm.local.correction.receives:
        tensor = request.auxiliary.get(name)
        covers_buffers = tensor is not None and tensor.numel() == size
        require_tensor(name, tensor, (size if covers_buffers else trained,))
    common = request.auxiliary.get("common")
    if common is not None:
        require_tensor("the mean of all models", common, (size,))
    clusters = request.auxiliary.get("clusters")
    if clusters is not None:
        require_tensor("the clusters", clusters, (*clusters.shape[:1], size))
    active = request.auxiliary.get("active")
    mask_bytes = -(-trained // 8)
    if active is not None and (active.dtype != torch.uint8 or tuple(active.shape) != (mask_bytes,)):
        raise Refused(f"'active' must be a packed uint8 mask of {mask_bytes} bytes", "request")


ACTIONS = [
    Action(
        "train",
        RunPhase.TRAINING,
        "local training",
        train_client,
        settings={"lr": float},
        model="edit_space",
        validate=validate_training,
        layout=layout_of_update,
        summed=weighted_update,
    )
]
