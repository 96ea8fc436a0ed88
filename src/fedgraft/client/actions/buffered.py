"""Training ahead of a secure sum, for buffered rounds: train now, add the update to a sum once enough clients are done.

With a buffer nobody knows beforehand with whom a client will be summed. So it trains on `train_ahead` and answers that
it is done, with nothing of its work. The update stays in its memory until a secure sum of `held_update` over the
clients that are done. An update is in one sum only: in two sums over different clients, their difference would show it.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

import torch
from torch import Tensor

from fedgraft.aggregate.buffering import BufferedRounds
from fedgraft.algorithms.algorithm import Algorithm
from fedgraft.client.action import Action, RunPhase
from fedgraft.client.actions.training import layout_of_update, require_ahead, summand_of_update, validate_training
from fedgraft.client.context import ClientContext, empty_response
from fedgraft.client.train import train_locally
from fedgraft.core.client_memory import SUMMED, ClientMemory
from fedgraft.core.errors import Refused
from fedgraft.core.messages import Request, Response

HELD = "held/"
"""Begins the names of memory entries with the update that waits for its sum."""
_UPDATE = HELD + "update"
_ROUND = HELD + "round"
_SCALAR = HELD + "scalar/"
_FIELDS = {"sums", "largest", "buffer"}
"""The settings of a sum of held updates; `buffer` is its number, so that no two sums have the same request."""


def train_ahead(
    request: Request, algorithm: Algorithm, context: ClientContext, memory: ClientMemory
) -> tuple[Response, ClientMemory]:
    """Train locally; return a response without content, and the memory with the update, which waits for its sum.

    A model that does not follow from the run's history is refused, as in a synchronous round.
    """
    history = context.history
    if history is not None:
        history.check(request, algorithm, context)
    outcome = train_locally(request, algorithm, context, memory)
    if history is not None:
        history.record(request, algorithm, float(torch.linalg.vector_norm(outcome.update.double())))
    new_memory = {}
    for name, tensor in outcome.memory.items():
        if not name.startswith(HELD):
            new_memory[name] = tensor
    new_memory[_UPDATE] = outcome.update
    new_memory[_ROUND] = torch.tensor([request.round])
    for name in algorithm.reports:
        new_memory[_SCALAR + name] = torch.tensor([outcome.scalars[name]], dtype=torch.float64)
    return replace(empty_response(request, context), examples=0), new_memory


def held_update(
    request: Request, algorithm: Algorithm, context: ClientContext, memory: ClientMemory
) -> tuple[Mapping[str, Tensor], ClientMemory]:
    """Return the summand of the update that this client holds, discounted by its staleness, and the new memory.

    The staleness follows from the number of the sum and the round that the update began with. An update that was in a
    sum of another number is refused.
    """
    if _UPDATE not in memory:
        raise Refused("there is no update that waits for a sum", "sums")
    began = int(memory[_ROUND])
    if not began <= request.round:
        raise Refused("the update that waits for a sum began later than this sum", "sums")
    if SUMMED in memory:
        last_began, last_sum = memory[SUMMED].tolist()
        if began <= last_began and request.round != last_sum:
            raise Refused("the update was in a secure sum before", "sums")
    update = memory[_UPDATE]
    if isinstance(algorithm.rounds, BufferedRounds) and began < request.round:
        update = update * algorithm.rounds.discount(request.round - began)
    scalars = {name: float(memory[_SCALAR + name]) for name in algorithm.reports}
    summand = summand_of_update(request, algorithm, context, update, scalars, {})
    new_memory = dict(memory)
    new_memory[SUMMED] = torch.tensor([began, request.round])
    if not context.replays:  # a resumed server may ask a node for the same sum again
        for name in memory:
            if name.startswith(HELD):
                del new_memory[name]
    return summand, new_memory


def _work_alone(
    request: Request, algorithm: Algorithm, context: ClientContext, memory: ClientMemory
) -> tuple[Response, ClientMemory]:
    """Refuse to show a held update in the clear."""
    raise Refused("a held update is only given inside a secure sum", "secure")


def _validate_ahead(request: Request, algorithm: Algorithm, context: ClientContext) -> None:
    """Refuse training ahead where the run has no sums of held updates, or what no training may carry."""
    require_ahead(algorithm)
    validate_training(request, algorithm, context)


def _validate_sum(request: Request, algorithm: Algorithm, context: ClientContext) -> None:
    """Refuse a sum of held updates that carries anything that it does not read, or is for another edit space."""
    require_ahead(algorithm)
    tensors = [name for name in request.auxiliary if name != "plan" and not name.startswith("data:")]
    if tensors or request.vector is not None or set(request.settings) != _FIELDS:
        raise Refused("a sum of held updates carries other fields than it reads", "request")
    if request.settings["buffer"] != request.round:
        raise Refused("a sum of held updates has two numbers", "request")
    if request.space != context.space.digest:
        raise Refused("the request is for another edit space", "request")


ACTIONS = [
    Action(
        "train_ahead",
        RunPhase.TRAINING,
        "local training",
        train_ahead,
        settings={"lr": float},
        model="edit_space",
        validate=_validate_ahead,
        shown_alone=True,
    ),
    Action(
        "held_update",
        RunPhase.TRAINING,
        "secure sum of a buffer",
        _work_alone,
        settings={"largest": float, "buffer": float},
        validate=_validate_sum,
        layout=layout_of_update,
        summed=held_update,
    ),
]
