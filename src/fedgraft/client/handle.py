"""What a client does with a request: the same function in this process and on a node far away.

`handle` looks the request's action up in `ACTIONS`. It returns the response and the client's new memory; nothing else
of the client survives the call.
"""

from __future__ import annotations

import logging

from fedgraft.algorithms.algorithm import Algorithm
from fedgraft.client.actions import ACTIONS
from fedgraft.client.authorize import authorize
from fedgraft.client.context import ClientContext, seed_random_layers, with_full_model
from fedgraft.client.request_checks import is_secure_stage, requested_name
from fedgraft.client.secure import secure_stage
from fedgraft.core.client_memory import ClientMemory
from fedgraft.core.errors import Refused
from fedgraft.core.messages import Request, Response
from fedgraft.core.rng import torch_stream

log = logging.getLogger("fedgraft")


def handle(
    request: Request, algorithm: Algorithm, context: ClientContext, memory: ClientMemory
) -> tuple[Response, ClientMemory]:
    """Carry out one request and return the response and the client's new memory; raise `Refused` for a forbidden one.

    The same request, data and memory give the same bytes anywhere. The context's network is a workspace: its weights
    may be changed.
    """
    action = ACTIONS.get(request.action)
    if action is None and not is_secure_stage(request):
        known = ", ".join(sorted(ACTIONS))
        raise Refused(
            f"client {request.client} does not know the action {request.action[:40]!r}; it knows {known}", "actions"
        )
    if action is not None and action.in_rounds:
        request = with_full_model(request, context)
    memory = authorize(request, algorithm, context, memory)
    # A secure sum draws the same random numbers as the same work in the clear.
    generator = torch_stream(context.seed, "layers", requested_name(request), request.round, request.client)
    seed_random_layers(context.network, generator)
    if action is None:
        return secure_stage(request, algorithm, context, memory)
    return action.work(request, algorithm, context, memory)


def handle_or_refuse(
    request: Request, algorithm: Algorithm, context: ClientContext, memory: ClientMemory
) -> tuple[Response | str, ClientMemory]:
    """Carry out one request for an engine; return the response, or the public reason of a refusal, and the new memory.

    The reason names the broken rule and says nothing of the data. A refusal is logged.
    """
    try:
        return handle(request, algorithm, context, memory)
    except Refused as refusal:
        log.warning("client %d refuses a request of round %d: %s", request.client, request.round, refusal)
        memory_after = memory if refusal.memory is None else refusal.memory
        return refusal.public_reason, memory_after
