"""What a client does with an order: the same function in this process and on a node far away.

`handle` looks the order's action up in a table. It returns the reply and the client's new memory; nothing else
of the client survives the call.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace

import numpy as np
from torch import Tensor

from fedgraft.algorithm import Algorithm, secure_segments
from fedgraft.context import ClientContext, ClientMemory, answer, give_stream, vector_of
from fedgraft.edit.space import Bound, EditSpace, select
from fedgraft.errors import FedgraftError
from fedgraft.local.corrections import Correction, proximal
from fedgraft.local.evaluate import Evaluation, evaluate
from fedgraft.local.train import LocalTraining, Trained, train
from fedgraft.messages import Order, Reply, as_bytes, unpack_bits
from fedgraft.observe import OBSERVATIONS, count, fisher_scores, head_gradient, own_mask, statistics, sum_segments
from fedgraft.privacy.secagg.client import as_tensor
from fedgraft.privacy.secagg.ring import Unfit
from fedgraft.privacy.secagg.secure_sum import (
    STAGES,
    Identity,
    Plan,
    SecureClient,
    SecureRefusal,
    series,
    weighted_input,
)
from fedgraft.randomness import torch_stream
from fedgraft.update.transforms import Sending, run_chain

log = logging.getLogger("fedgraft")

__all__ = ["ACTIONS", "ClientContext", "ClientMemory", "give_stream", "handle"]


def handle(
    order: Order, algorithm: Algorithm, context: ClientContext, memory: ClientMemory
) -> tuple[Reply, ClientMemory]:
    """Carry out one order. Pure in (order, data, memory): the same input gives the same bytes anywhere."""
    action = ACTIONS.get(order.action)
    if action is None:
        raise FedgraftError(f"client {order.client} was asked for {order.action!r}; it knows {sorted(ACTIONS)}")
    what = str(order.settings.get("sums", order.action))  # a secure sum draws what the same work in the clear draws
    give_stream(context.network, torch_stream(context.seed, "layers", what, order.round, order.client))
    return action(order, algorithm, context, memory)


def _fit(
    order: Order, algorithm: Algorithm, context: ClientContext, bound: Bound, memory: ClientMemory, purpose: str
) -> Trained:
    """Train what is bound on this client's rows, with generators that belong to (round, client, purpose)."""
    where = (purpose, order.round, order.client)
    lr = float(order.settings["lr"])
    return train(
        context.network, bound, context.examples, context.rows(order.client), algorithm.local, lambda step: lr,
        torch_stream(context.seed, "shuffle", *where), torch_stream(context.seed, "augment", *where),
        algorithm.loss, order.auxiliary, memory, _optimizer_state(algorithm, memory),
    )  # fmt: skip


def _optimizer_state(algorithm: Algorithm, memory: ClientMemory) -> dict[str, Tensor] | None:
    """The optimizer's state of the round before, where clients keep it; a copy, because steps change it in place."""
    if not algorithm.client_state.optimizer:
        return None
    return {n.removeprefix("optimizer/"): t.clone() for n, t in memory.items() if n.startswith("optimizer/")}


@dataclass(frozen=True)
class Outcome:
    """What local training gives, before it is encoded in one way or the other."""

    update: Tensor
    result: Trained
    scalars: Mapping[str, float]
    evidence: Mapping[str, Tensor]
    memory: dict[str, Tensor]


def _outcome(order: Order, algorithm: Algorithm, context: ClientContext, memory: ClientMemory) -> Outcome:
    """Train locally from the order's vector and make the observations that were asked for."""
    start = vector_of(order)
    kept = dict(memory)
    if context.private is not None:
        values, result = _train_with_private_part(order, algorithm, context, kept)
        update = values - start
    elif "active" in order.auxiliary:
        update, result = _train_active(order, algorithm, context, memory)
    else:
        bound = context.bind(context.space)
        bound.load(start)
        result = _fit(order, algorithm, context, bound, memory, "train")
        update = (bound.values.cpu() - start)[: context.sent]
    kept |= result.closing.memory
    if algorithm.client_state.optimizer:
        kept |= {f"optimizer/{name}": tensor.cpu() for name, tensor in result.state.items()}
    scalars: dict[str, float] = {}
    evidence: dict[str, Tensor] = {}
    for wanted in algorithm.wants:
        numbers, tensors = OBSERVATIONS[wanted.name](wanted, order, context)
        scalars |= numbers
        evidence |= tensors
    if algorithm.client_state.second_model is not None:
        kept["personal"] = _train_personal(order, algorithm, context, memory)
    sending = Sending(result.effective_steps, order.settings, context.space.trained)
    update, reported = run_chain(algorithm.update, update, sending)
    return Outcome(update, result, scalars | reported, evidence, kept)


def _train(
    order: Order, algorithm: Algorithm, context: ClientContext, memory: ClientMemory
) -> tuple[Reply, ClientMemory]:
    """Answer with the encoded change."""
    done = _outcome(order, algorithm, context, memory)
    stream = torch_stream(context.seed, "encode", order.round, order.client)
    reply = replace(
        answer(order, context),
        update=algorithm.compression.encode(done.update, stream, done.memory),
        sums=done.result.closing.sums,
        scalars=done.scalars,
        evidence=done.evidence,
        # Losses are not part of the privacy account, so a private client keeps them to itself.
        metrics={}
        if algorithm.privacy.dp is not None
        else {"loss": done.result.loss, "steps": float(done.result.steps)},
    )
    return reply, done.memory


def _secure(
    order: Order, algorithm: Algorithm, context: ClientContext, memory: ClientMemory
) -> tuple[Reply, ClientMemory]:
    """One stage of the secure sum. The work is done when it is time to mask; nothing of it leaves in the clear."""
    stage = order.action.partition(".")[2]
    kept = {name: t for name, t in memory.items() if name not in {"secure.state", "secure.plan"}}
    evidence: dict[str, Tensor] = {}
    try:
        peer = _peer(stage, order, algorithm, context, memory)
        data = {key.removeprefix("data:"): t for key, t in order.auxiliary.items() if key.startswith("data:")}

        def masked_words() -> np.ndarray:
            values, after = _summand(order, algorithm, context, memory)
            kept.update({name: t for name, t in after.items() if name not in {"secure.state", "secure.plan"}})
            stream = torch_stream(context.seed, "secure rounding", order.round, order.client)
            return peer.plan.ring.encode(values, stream)

        try:
            evidence = peer.answer(stage, data, masked_words if stage == "masked" else None)
        finally:  # whoever refuses remembers it, and stays out of this sum
            kept["identity"] = as_tensor(peer.identity.to_bytes())
            if stage != "unmask":  # after that the round's keys have done their work
                kept |= {"secure.state": as_tensor(peer.state()), "secure.plan": as_tensor(peer.plan.to_bytes())}
    except (SecureRefusal, Unfit) as refusal:  # an empty answer: to the server this client is lost
        log.warning("client %d leaves the secure sum: %s", order.client, refusal)
    return Reply(order.run, order.round, order.client, order.space, 0, evidence=evidence), kept


def _peer(stage: str, order: Order, algorithm: Algorithm, context: ClientContext, memory: ClientMemory) -> SecureClient:
    """This client as it stands at the beginning of a stage."""
    identity = Identity.from_bytes(as_bytes(memory["identity"])) if "identity" in memory else Identity.fresh()
    if stage == "keys":
        plan = Plan.from_bytes(as_bytes(order.auxiliary["plan"]))
        check_plan(plan, order, algorithm, context)
        return SecureClient(plan, order.client, identity)
    if "secure.state" not in memory:
        raise SecureRefusal(f"the stage {stage!r} of a secure sum was asked for before it began")
    plan = Plan.from_bytes(as_bytes(memory["secure.plan"]))
    return SecureClient.resume(plan, order.client, identity, as_bytes(memory["secure.state"]))


def _summand(
    order: Order, algorithm: Algorithm, context: ClientContext, memory: ClientMemory
) -> tuple[dict[str, Tensor], ClientMemory]:
    """What this client adds to the secure sum: its weighted change, or the sums that the order asks for."""
    action = str(order.settings["sums"])
    if action != "train":
        reply, after = ACTIONS[action](replace(order, action=action), algorithm, context, memory)
        return dict(reply.sums), after
    done = _outcome(order, algorithm, context, memory)
    assert algorithm.weighting.own is not None
    share = min(1.0, len(context.rows(order.client)) / float(order.settings["largest"]))
    weight = min(1.0, max(0.0, algorithm.weighting.own(share, done.scalars)))
    sent = {name: done.scalars[name] for name in algorithm.reports}
    return weighted_input(done.update, weight, done.result.closing.sums, sent), done.memory


def check_plan(plan: Plan, order: Order, algorithm: Algorithm, context: ClientContext) -> None:
    """A client takes part only in the sum that its own order describes, and in none that is not made for hiding."""
    action = str(order.settings["sums"])
    if action == "train":
        segments = secure_segments(algorithm, context.sent, context.space.trained)
    else:
        segments = sum_segments(action, context.network, order.settings)
    if (plan.run, plan.round, plan.segments) != (series(order.run, action), order.round, segments):
        raise SecureRefusal(f"client {order.client}: the plan of the secure sum is not that of round {order.round}")


def _train_active(
    order: Order, algorithm: Algorithm, context: ClientContext, memory: ClientMemory
) -> tuple[Tensor, Trained]:
    """Train only the coordinates that the order marks as active; the change covers just these."""
    active = unpack_bits(order.auxiliary["active"], context.space.trained)
    context.release()
    context.space.scatter(vector_of(order), context.network)
    bound = context.bind(context.space.restrict(active))
    start = bound.values.clone()
    result = _fit(order, algorithm, context, bound, memory, "train")
    return (bound.values - start).cpu(), result


def _train_with_private_part(
    order: Order, algorithm: Algorithm, context: ClientContext, kept: dict[str, Tensor]
) -> tuple[Tensor, Trained]:
    """FedPer trains the shared and the private part together; FedRep the private part first, then the shared one."""
    assert context.private is not None
    context.space.scatter(vector_of(order), context.network)
    own = kept.get("private", context.private_start)
    assert own is not None
    context.private.scatter(own, context.network)
    if algorithm.client_state.alternate:
        bound = context.bind(context.private)
        bound.load(own)
        _fit(order, algorithm, context, bound, {}, "private")
        kept["private"] = bound.values.clone().cpu()
        bound = context.bind(context.space)
        bound.load(vector_of(order))
        result = _fit(order, algorithm, context, bound, kept, "train")
        return bound.values.cpu(), result
    joint = EditSpace(
        (*context.space.parts, *context.private.parts), (*context.space.buffers, *context.private.buffers)
    )
    values = joint.gather(context.network)
    bound = context.bind(joint)
    bound.load(values)
    result = _fit(order, algorithm, context, bound, kept, "train")
    kept["private"] = context.private.gather(context.network)
    return context.space.gather(context.network), result


def _train_personal(order: Order, algorithm: Algorithm, context: ClientContext, memory: ClientMemory) -> Tensor:
    """Ditto: a second model of one's own, pulled towards the common one with strength λ."""
    common = vector_of(order)
    bound = context.bind(context.space)
    bound.load(memory.get("personal", common))
    rule = replace(
        algorithm.local, correction=proximal_to(common[: bound.trained], algorithm.client_state.second_model or 0.0)
    )
    _fit(order, replace(algorithm, local=rule), context, bound, {}, "personal")
    return bound.values.clone().cpu()


def proximal_to(anchor: Tensor, pull: float) -> Correction:
    """The proximal correction with a given anchor instead of the starting point."""
    correction = proximal(pull)
    return replace(correction, prepare=lambda start, auxiliary, memory: {"start": anchor})


def _evaluate(
    order: Order, algorithm: Algorithm, context: ClientContext, memory: ClientMemory
) -> tuple[Reply, ClientMemory]:
    """Measure the order's model, or the client's own, on the client's test rows, before and after fine-tuning."""
    if context.tests is None or context.test_rows is None:
        raise FedgraftError(f"client {order.client} has no test rows of its own to evaluate on")
    rows = context.test_rows(order.client)
    vector = vector_of(order)
    if algorithm.client_state.second_model is not None:
        vector = memory.get("personal", vector)
    context.show(vector, memory.get("private"))
    before = evaluate(context.network, context.tests, rows)
    metrics = {"loss": before.loss, "accuracy": before.accuracy, "count": float(len(rows))}
    if order.settings.get("finetune_epochs"):
        after = _finetuned(order, algorithm, context, rows)
        metrics |= {"finetuned_loss": after.loss, "finetuned_accuracy": after.accuracy}
    return replace(answer(order, context), metrics=metrics), memory


def _finetuned(order: Order, algorithm: Algorithm, context: ClientContext, rows: Tensor) -> Evaluation:
    """Fine-tune a copy of the present model on the client's data, measure, and put everything back bit for bit."""
    part = str(order.settings.get("finetune_part", "both"))
    network = context.network
    wanted = {
        "head": lambda name: network.block_of(name) > network.depth,
        "body": lambda name: network.block_of(name) <= network.depth,
        "both": lambda name: True,
    }
    space = select(network, wanted[part])
    saved = space.gather(network)
    bound = context.bind(space)
    epochs, batch = int(order.settings["finetune_epochs"]), int(order.settings.get("finetune_batch", 50))
    plain = Algorithm("finetune", loss=algorithm.loss, local=LocalTraining(epochs=epochs, batch_size=batch))
    order = replace(order, settings={**order.settings, "lr": order.settings.get("finetune_lr", 1e-3)}, auxiliary={})
    _fit(order, plain, context, bound, {}, "finetune")
    assert context.tests is not None
    result = evaluate(network, context.tests, rows)
    space.scatter(saved, network)
    return result


ACTIONS: dict[str, Callable[[Order, Algorithm, ClientContext, ClientMemory], tuple[Reply, ClientMemory]]] = {
    "train": _train,
    "evaluate": _evaluate,
    "statistics": statistics,
    "head_gradient": head_gradient,
    "count": count,
    "fisher_scores": fisher_scores,
    "own_mask": own_mask,
    **{f"secure.{stage}": _secure for stage in STAGES},
}
