"""What a client does with an order: the same function in this process and on a node far away.

`handle` looks the order's action up in a table. It returns the reply and the client's new memory; nothing else
of the client survives the call.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from fedgraft.algorithm import Algorithm
from fedgraft.client_secure import secure_stage
from fedgraft.client_train import finetuned, outcome, with_chosen_model
from fedgraft.context import ClientContext, ClientMemory, answer, give_stream, vector_of
from fedgraft.errors import FedgraftError
from fedgraft.local.evaluate import counted
from fedgraft.messages import Order, Reply
from fedgraft.observe import SUMS, count, own_mask
from fedgraft.privacy.secagg.secure_sum import STAGES
from fedgraft.randomness import torch_stream

__all__ = ["ACTIONS", "ClientContext", "ClientMemory", "give_stream", "handle"]


def handle(
    order: Order, algorithm: Algorithm, context: ClientContext, memory: ClientMemory
) -> tuple[Reply, ClientMemory]:
    """Carry out one order. Pure in (order, data, memory): the same input gives the same bytes anywhere."""
    action = ACTIONS.get(order.action)
    if action is None:
        raise FedgraftError(f"client {order.client} was asked for {order.action!r}; it knows {sorted(ACTIONS)}")
    if "moved/indices" in order.auxiliary:
        order = filled(order, context)
    what = str(order.settings.get("sums", order.action))  # a secure sum draws what the same work in the clear draws
    give_stream(context.network, torch_stream(context.seed, "layers", what, order.round, order.client))
    return action(order, algorithm, context, memory)


def filled(order: Order, context: ClientContext) -> Order:
    """An order that carries what has moved, with the whole model: the rest is as the run began."""
    assert context.origin is not None
    rest = {name: t for name, t in order.auxiliary.items() if not name.startswith("moved/")}
    where, values = order.auxiliary["moved/indices"].long(), order.auxiliary["moved/values"]
    return replace(order, vector=context.origin.index_put((where,), values), auxiliary=rest)


def _train(
    order: Order, algorithm: Algorithm, context: ClientContext, memory: ClientMemory
) -> tuple[Reply, ClientMemory]:
    """Answer with the encoded change."""
    done = outcome(order, algorithm, context, memory)
    stream = torch_stream(context.seed, "encode", order.round, order.client)
    private = algorithm.privacy.dp is not None
    reply = replace(
        answer(order, context),
        examples=0 if private else len(context.rows(order.client)),
        update=algorithm.compression.encode(done.update, stream, done.memory),
        sums=done.result.closing.sums,
        scalars=done.scalars,
        evidence=done.evidence,
        # Losses and numbers of examples are not part of the privacy account, so a private client keeps them to itself.
        metrics={} if private else {"loss": done.result.loss, "steps": float(done.result.steps)},
    )
    return reply, done.memory


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


ACTIONS: dict[str, Callable[[Order, Algorithm, ClientContext, ClientMemory], tuple[Reply, ClientMemory]]] = {
    "train": _train,
    "evaluate": _evaluate,
    "count": count,
    **SUMS,
    "own_mask": own_mask,
    **{f"secure.{stage}": secure_stage for stage in STAGES},
}
