"""What a client does with an order: the same function in this process and on a node far away.

`handle` looks the order's action up in a table. It returns the reply and the client's new memory; nothing else
of the client survives the call.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from dataclasses import replace

from torch import Tensor

from fedgraft.algorithms.algorithm import Algorithm
from fedgraft.client.authorize import admit
from fedgraft.client.context import ClientContext, ClientMemory, answer, filled, give_stream, vector_of
from fedgraft.client.observe import own_mask
from fedgraft.client.secure import secure_stage
from fedgraft.client.sums import SUMS, count
from fedgraft.client.train import finetuned, outcome, with_chosen_model
from fedgraft.core.errors import FedgraftError, Refused
from fedgraft.core.messages import Request, Response
from fedgraft.core.rng import torch_stream
from fedgraft.metrics.evaluate import counted
from fedgraft.privacy.secagg.secure_sum import STAGES

__all__ = ["ACTIONS", "ClientContext", "ClientMemory", "carry_out", "give_stream", "handle", "trained"]

log = logging.getLogger("fedgraft")


def handle(
    request: Request, algorithm: Algorithm, context: ClientContext, memory: ClientMemory
) -> tuple[Response, ClientMemory]:
    """Carry out one order. Pure in (order, data, memory): the same input gives the same bytes anywhere."""
    action = ACTIONS.get(request.action)
    if action is None:
        told = f"client {request.client} was asked for {request.action[:40]!r}; it knows {sorted(ACTIONS)}"
        raise Refused(told, "actions")
    request = filled(request, context) if request.action == "train" else request
    memory = admit(request, algorithm, context, memory)
    what = str(request.settings.get("sums", request.action))  # a secure sum draws what the same work in the clear draws
    give_stream(context.network, torch_stream(context.seed, "layers", what, request.round, request.client))
    return action(request, algorithm, context, memory)


def carry_out(
    request: Request, algorithm: Algorithm, context: ClientContext, memory: ClientMemory
) -> tuple[Response | str, ClientMemory]:
    """`handle` for engines: a refused order is answered with the sentence that names the rule and nothing else."""
    try:
        return handle(request, algorithm, context, memory)
    except Refused as refusal:
        log.warning("client %d refuses an order of round %d: %s", request.client, request.round, refusal)
        return refusal.told, memory if refusal.memory is None else refusal.memory


def _train(
    request: Request, algorithm: Algorithm, context: ClientContext, memory: ClientMemory
) -> tuple[Response, ClientMemory]:
    """Answer with the encoded update."""
    done = outcome(request, algorithm, context, memory)
    result = done.result
    response = trained(request, algorithm, context, done.update, done.scalars, (result.loss, result.steps), done.memory)
    return replace(response, sums=result.closing.sums, evidence=done.evidence), done.memory


def trained(
    request: Request,
    algorithm: Algorithm,
    context: ClientContext,
    update: Tensor,
    scalars: Mapping[str, float],
    loss_and_steps: tuple[float, int],
    memory: dict[str, Tensor],
) -> Response:
    """The answer to a training order: the update encoded, and what goes with it."""
    stream = torch_stream(context.seed, "encode", request.round, request.client)
    private, (loss, steps) = algorithm.privacy.dp is not None, loss_and_steps
    return replace(
        answer(request, context),
        examples=0 if private else len(context.rows(request.client)),
        update=algorithm.compression.encode(update, stream, memory),
        scalars=scalars,
        # Losses and numbers of examples are not part of the privacy account, so a private client keeps them to itself.
        metrics={} if private else {"loss": loss, "steps": float(steps)},
    )


def _evaluate(
    request: Request, algorithm: Algorithm, context: ClientContext, memory: ClientMemory
) -> tuple[Response, ClientMemory]:
    """Measure the order's model, or the client's own, on the client's test rows, before and after fine-tuning."""
    if context.tests is None or context.test_rows is None:
        raise FedgraftError(f"client {request.client} has no test rows of its own to evaluate on")
    rows = context.test_rows(request.client)
    request, _ = with_chosen_model(request, algorithm, context)
    context.show(algorithm.client_state.own_model(vector_of(request), memory), memory.get("private"))
    wanted = bool(request.settings.get("scores"))
    before, sums = counted(context.network, context.tests, rows, scores=wanted)
    metrics = {"loss": before.loss, "accuracy": before.accuracy, "count": float(len(rows))}
    if request.settings.get("finetune_epochs"):
        after, more = finetuned(request, algorithm, context, rows)
        metrics |= {"finetuned_loss": after.loss, "finetuned_accuracy": after.accuracy}
        sums |= {f"finetuned/{name}": tensor for name, tensor in more.items()}
    return replace(answer(request, context), metrics=metrics, sums=sums), memory


def _summed(
    request: Request, algorithm: Algorithm, context: ClientContext, memory: ClientMemory
) -> tuple[Response, ClientMemory]:
    """Answer with sums over the client's examples."""
    work = count if request.action == "count" else SUMS[request.action]
    return replace(answer(request, context), sums=work(request, context)), memory


ACTIONS: dict[str, Callable[[Request, Algorithm, ClientContext, ClientMemory], tuple[Response, ClientMemory]]] = {
    "train": _train,
    "evaluate": _evaluate,
    **dict.fromkeys(("count", *SUMS), _summed),
    "own_mask": own_mask,
    **{f"secure.{stage}": secure_stage for stage in STAGES},
}
