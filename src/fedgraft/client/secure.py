"""A client's side of secure aggregation: one stage an order, and nothing of its work leaves in the clear.

The plan binds what is summed: every client signs the plan's digest, the plan holds the digest of the order (`binding`),
and a client works only on the order that the plan holds. So all clients of a sum have the same model and settings.
"""

from __future__ import annotations

import hashlib
import json

import numpy as np
from torch import Tensor

from fedgraft.algorithms.algorithm import Algorithm, secure_segments
from fedgraft.client.context import ClientContext, ClientMemory, filled
from fedgraft.client.sums import SUMS, sum_segments
from fedgraft.client.train import outcome
from fedgraft.core.errors import FedgraftError, Refused
from fedgraft.core.messages import Request, Response, as_bytes
from fedgraft.core.rng import torch_stream
from fedgraft.privacy.secagg.client import as_tensor, digest_of
from fedgraft.privacy.secagg.ring import Unfit
from fedgraft.privacy.secagg.secure_sum import Identity, Plan, SecureClient, SecureRefusal, series, weighted_input

SECURE = "secure/"
"""Begins the names under which a client's memory holds sums that are under way."""


def binding(request: Request) -> str:
    """Digest of everything that an order of a sum asks for: action, space, all settings, the model, further vectors.

    Run, number and clients are in the plan itself. What a stage adds (`plan`, `data:...`) is not part of the order.
    """
    plain = json.dumps([request.space, sorted(request.settings.items())], separators=(",", ":"))
    own = {name: t for name, t in request.auxiliary.items() if name != "plan" and not name.startswith("data:")}
    vectors = own if request.vector is None else {**own, "": request.vector}
    return hashlib.sha256(f"{plain}\x1e{digest_of(vectors)}".encode()).hexdigest()


def secure_stage(
    request: Request, algorithm: Algorithm, context: ClientContext, memory: ClientMemory
) -> tuple[Response, ClientMemory]:
    """One stage of the secure sum. The work is done when it is time to mask; nothing of it leaves in the clear."""
    stage, slot = request.action.partition(".")[2], f"{SECURE}{request.settings['sums']}/{request.round}/"
    kept = dict(memory)
    try:
        peer = _peer(stage, slot, request, algorithm, context, memory)
        if stage == "keys":  # what earlier sums left has done its work
            kept = {name: t for name, t in memory.items() if not _over(name, slot, context.replays)}
        data = {key.removeprefix("data:"): t for key, t in request.auxiliary.items() if key.startswith("data:")}

        def masked_words() -> np.ndarray:
            if binding(request) != peer.plan.binds:
                raise SecureRefusal("the order is not the one that the plan of the secure sum binds", "binding")
            values, after = _summand(filled(request, context), algorithm, context, memory)
            kept.update({name: t for name, t in after.items() if not name.startswith(SECURE)})
            stream = torch_stream(context.seed, "secure rounding", request.round, request.client)
            return peer.plan.ring.encode(values, stream)

        try:
            evidence = peer.answer(stage, data, masked_words if stage == "masked" else None)
        finally:  # whoever refuses remembers it, and stays out of this sum
            kept["identity"] = as_tensor(peer.identity.to_bytes())
            if stage != "unmask" or context.replays:
                found = {"state": peer.state(), "plan": peer.plan.to_bytes()}
                kept |= {slot + name: as_tensor(data) for name, data in found.items()}
            else:  # the keys have done their work
                kept = {name: t for name, t in kept.items() if not name.startswith(slot)}
    except (Refused, Unfit) as error:
        refusal = error if isinstance(error, Refused) else SecureRefusal(str(error), "numbers")
        refusal.memory = kept
        raise refusal from error
    return Response(request.run, request.round, request.client, request.space, 0, evidence=evidence), kept


def _over(name: str, slot: str, replays: bool) -> bool:
    """Whether what a sum left can go when the sum of this slot begins: a resumed server may ask for all of those
    before the first round again, and for the latest round."""
    if not name.startswith(SECURE) or name.startswith(slot):
        return False
    training = f"{SECURE}train/"
    return not replays or slot.startswith(training) or name.startswith(training)


def _peer(
    stage: str, slot: str, request: Request, algorithm: Algorithm, context: ClientContext, memory: ClientMemory
) -> SecureClient:
    """This client as it stands at the beginning of a stage."""
    identity = Identity.from_bytes(as_bytes(memory["identity"])) if "identity" in memory else Identity.fresh()
    most = min(policy.most_clients for policy in context.rules(algorithm))
    begun = slot + "state" in memory
    if stage == "keys":
        data = as_bytes(request.auxiliary["plan"]) if "plan" in request.auxiliary else b""
        if not begun or data != as_bytes(memory[slot + "plan"]):
            try:
                plan = Plan.from_bytes(data, most)
            except Refused:
                raise
            except FedgraftError as error:
                raise SecureRefusal(str(error), "plan") from error
            check_plan(plan, request, algorithm, context)
            return SecureClient(plan, request.client, identity, ground=context.ground)
    elif not begun:
        raise SecureRefusal(f"the stage {stage!r} of a secure sum was asked for before it began")
    plan = Plan.from_bytes(as_bytes(memory[slot + "plan"]), most)
    if plan.run != series(request.run, str(request.settings["sums"])):
        raise SecureRefusal("the secure sum under way is another run's", "plan")
    return SecureClient.resume(plan, request.client, identity, as_bytes(memory[slot + "state"]), context.ground)


def _summand(
    request: Request, algorithm: Algorithm, context: ClientContext, memory: ClientMemory
) -> tuple[dict[str, Tensor], ClientMemory]:
    """What this client adds to the secure sum: its weighted update, or the sums that the order asks for."""
    action = str(request.settings["sums"])
    if action != "train":
        return SUMS[action](request, context), memory
    done = outcome(request, algorithm, context, memory)
    assert algorithm.weighting.own is not None
    largest = float(request.settings["largest"])
    held = min(largest, float(len(context.rows(request.client))))
    weight = min(1.0, max(0.0, algorithm.weighting.own(held, done.scalars, largest)))
    sent = {name: done.scalars[name] for name in algorithm.reports}
    return weighted_input(done.update, weight, done.result.closing.sums, sent), done.memory


def check_plan(plan: Plan, request: Request, algorithm: Algorithm, context: ClientContext) -> None:
    """A client takes part only in the sum that its own order describes, and in none that is not made for hiding."""
    action = str(request.settings["sums"])
    if action == "train":
        segments = secure_segments(algorithm, context.sent, context.space.trained)
    else:
        segments = sum_segments(action, context.network, request.settings)
    if (plan.run, plan.round, plan.segments) != (series(request.run, action), request.round, segments):
        raise SecureRefusal(
            f"client {request.client}: the plan of the secure sum is not that of round {request.round}", "plan"
        )
    dp = algorithm.privacy.dp if action == "train" else None
    if plan.room != (None if dp is None else dp.mechanism.population):
        raise SecureRefusal("the plan of the secure sum has room for another number of clients", "plan")
    for policy in context.rules(algorithm):
        policy.check_plan(plan)
