"""A client's side of secure aggregation: one stage an order, and nothing of its work leaves in the clear."""

from __future__ import annotations

import logging
from dataclasses import replace

import numpy as np
from torch import Tensor

from fedgraft.algorithm import Algorithm, secure_segments
from fedgraft.client_train import outcome
from fedgraft.context import ClientContext, ClientMemory
from fedgraft.messages import Order, Reply, as_bytes
from fedgraft.observe import SUMS, sum_segments
from fedgraft.privacy.secagg.client import as_tensor
from fedgraft.privacy.secagg.ring import Unfit
from fedgraft.privacy.secagg.secure_sum import Identity, Plan, SecureClient, SecureRefusal, series, weighted_input
from fedgraft.randomness import torch_stream

log = logging.getLogger("fedgraft")


def secure_stage(
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
        reply, after = SUMS[action](replace(order, action=action), algorithm, context, memory)
        return dict(reply.sums), after
    done = outcome(order, algorithm, context, memory)
    assert algorithm.weighting.own is not None
    largest = float(order.settings["largest"])
    held = min(largest, float(len(context.rows(order.client))))
    weight = min(1.0, max(0.0, algorithm.weighting.own(held, done.scalars, largest)))
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
