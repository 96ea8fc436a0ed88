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
from fedgraft.core.messages import Order, Reply
from fedgraft.core.rng import torch_stream
from fedgraft.metrics.evaluate import counted
from fedgraft.privacy.secagg.secure_sum import STAGES

__all__ = ["ACTIONS", "ClientContext", "ClientMemory", "carry_out", "give_stream", "handle", "trained"]

log = logging.getLogger("fedgraft")


def handle(
    order: Order, algorithm: Algorithm, context: ClientContext, memory: ClientMemory
) -> tuple[Reply, ClientMemory]:
    """Carry out one order. Pure in (order, data, memory): the same input gives the same bytes anywhere."""
    action = ACTIONS.get(order.action)
    if action is None:
        told = f"client {order.client} was asked for {order.action[:40]!r}; it knows {sorted(ACTIONS)}"
        raise Refused(told, "actions")
    order = filled(order, context) if order.action == "train" else order
    memory = admit(order, algorithm, context, memory)
    what = str(order.settings.get("sums", order.action))  # a secure sum draws what the same work in the clear draws
    give_stream(context.network, torch_stream(context.seed, "layers", what, order.round, order.client))
    return action(order, algorithm, context, memory)


def carry_out(
    order: Order, algorithm: Algorithm, context: ClientContext, memory: ClientMemory
) -> tuple[Reply | str, ClientMemory]:
    """`handle` for engines: a refused order is answered with the sentence that names the rule and nothing else."""
    try:
        return handle(order, algorithm, context, memory)
    except Refused as refusal:
        log.warning("client %d refuses an order of round %d: %s", order.client, order.round, refusal)
        return refusal.told, memory if refusal.memory is None else refusal.memory


def _train(
    order: Order, algorithm: Algorithm, context: ClientContext, memory: ClientMemory
) -> tuple[Reply, ClientMemory]:
    """Answer with the encoded update."""
    done = outcome(order, algorithm, context, memory)
    result = done.result
    reply = trained(order, algorithm, context, done.update, done.scalars, (result.loss, result.steps), done.memory)
    return replace(reply, sums=result.closing.sums, evidence=done.evidence), done.memory


def trained(
    order: Order, algorithm: Algorithm, context: ClientContext, update: Tensor, scalars: Mapping[str, float],
    loss_and_steps: tuple[float, int], memory: dict[str, Tensor],
) -> Reply:  # fmt: skip
    """The answer to a training order: the update encoded, and what goes with it."""
    stream = torch_stream(context.seed, "encode", order.round, order.client)
    private, (loss, steps) = algorithm.privacy.dp is not None, loss_and_steps
    return replace(
        answer(order, context),
        examples=0 if private else len(context.rows(order.client)),
        update=algorithm.compression.encode(update, stream, memory),
        scalars=scalars,
        # Losses and numbers of examples are not part of the privacy account, so a private client keeps them to itself.
        metrics={} if private else {"loss": loss, "steps": float(steps)},
    )


def _evaluate(
    order: Order, algorithm: Algorithm, context: ClientContext, memory: ClientMemory
) -> tuple[Reply, ClientMemory]:
    """Measure the order's model, or the client's own, on the client's test rows, before and after fine-tuning."""
    if context.tests is None or context.test_rows is None:
        raise FedgraftError(f"client {order.client} has no test rows of its own to evaluate on")
    rows = context.test_rows(order.client)
    order, _ = with_chosen_model(order, algorithm, context)
    context.show(algorithm.client_state.own_model(vector_of(order), memory), memory.get("private"))
    wanted = bool(order.settings.get("scores"))
    before, sums = counted(context.network, context.tests, rows, scores=wanted)
    metrics = {"loss": before.loss, "accuracy": before.accuracy, "count": float(len(rows))}
    if order.settings.get("finetune_epochs"):
        after, more = finetuned(order, algorithm, context, rows)
        metrics |= {"finetuned_loss": after.loss, "finetuned_accuracy": after.accuracy}
        sums |= {f"finetuned/{name}": tensor for name, tensor in more.items()}
    return replace(answer(order, context), metrics=metrics, sums=sums), memory


def _summed(
    order: Order, algorithm: Algorithm, context: ClientContext, memory: ClientMemory
) -> tuple[Reply, ClientMemory]:
    """Answer with sums over the client's examples."""
    work = count if order.action == "count" else SUMS[order.action]
    return replace(answer(order, context), sums=work(order, context)), memory


ACTIONS: dict[str, Callable[[Order, Algorithm, ClientContext, ClientMemory], tuple[Reply, ClientMemory]]] = {
    "train": _train,
    "evaluate": _evaluate,
    **dict.fromkeys(("count", *SUMS), _summed),
    "own_mask": own_mask,
    **{f"secure.{stage}": secure_stage for stage in STAGES},
}
