"""A client's side of secure aggregation: one stage per request, and nothing of its work leaves in the clear.

The plan binds what is summed: every client signs the plan's digest, the plan holds the digest of the request
(`request_digest`), and a client works only on the request that the plan holds. So all clients of a sum have the same
model and settings.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from dataclasses import fields

import numpy as np
import torch
from torch import Tensor

from fedgraft.algorithms.algorithm import Algorithm
from fedgraft.client.action import Action, RunPhase, SumScope
from fedgraft.client.actions import action_named
from fedgraft.client.authorize import allows_other_sets, check_question, policies_in_force, rows_of
from fedgraft.client.context import ClientContext, with_full_model
from fedgraft.client.ledger import DataLedger
from fedgraft.core.client_memory import SECURE, ClientMemory
from fedgraft.core.errors import FedgraftError, Refused
from fedgraft.core.messages import Request, Response, as_bytes
from fedgraft.core.rng import torch_stream
from fedgraft.privacy.dp import KEY_LENGTH, simulation_key
from fedgraft.privacy.protection import SharedNoise
from fedgraft.privacy.secagg.binding import request_digest
from fedgraft.privacy.secagg.client import as_tensor
from fedgraft.privacy.secagg.ring import Ring, Unfit, Words
from fedgraft.privacy.secagg.secure_sum import CUT, Identity, Plan, SecureClient, SecureRefusal, series

log = logging.getLogger("fedgraft")


def secure_stage(
    request: Request, algorithm: Algorithm, context: ClientContext, memory: ClientMemory
) -> tuple[Response, ClientMemory]:
    """Answer one stage of a secure sum: return the response and the client's new memory.

    At the stage "masked" the client carries out the action that is summed and sends the result masked. The state of the
    protocol lies in the memory under `secure/<sum>/<round>/`; it is dropped at the last stage, or with
    `context.replays` when later sums begin. A refusal carries the new memory too, so that the client stays out of this
    sum.
    """
    stage = request.action.partition(".")[2]
    action = action_named(str(request.settings["sums"]))
    slot = f"{SECURE}{action.name}/{request.round}/"
    ledger = DataLedger.of(memory)
    new_memory = dict(memory)
    try:
        secure_client = _client_at_stage(stage, slot, request, algorithm, context, memory, ledger)
        if stage == "keys":  # what earlier sums left has done its work
            for name in memory:
                if _is_outdated(name, slot, context.replays):
                    del new_memory[name]
        data = {}
        for key, tensor in request.auxiliary.items():
            if key.startswith("data:"):
                data[key.removeprefix("data:")] = tensor

        def masked_words() -> np.ndarray:
            """Carry out the action that is summed and return its result as words of the ring; update `new_memory`."""
            if request_digest(request) != secure_client.plan.binds:
                raise SecureRefusal("the request is not the one that the plan of the secure sum binds", "binding")
            assert action.summed is not None
            if not action.in_rounds:
                plan = secure_client.plan.digest
                question = check_question(request, action, algorithm, context, ledger, plan)
                ledger.hold_question(rows_of(request, action, context), question, plan, request.run)
            full_request = with_full_model(request, context)
            history = context.history
            trains = action.in_rounds and action.model != "none"  # a held update was trained, and checked, before
            if history is not None and trains:
                history.check(full_request, algorithm, context)
            if history is not None and action.phase is RunPhase.CALIBRATION and full_request.vector is not None:
                history.check_scored(full_request, algorithm, context)
            summand, memory_after = action.summed(full_request, algorithm, context, memory)
            if history is not None and trains:
                history.record(full_request, algorithm, update_length(summand))
            values = _with_cut_flag(secure_client.plan.ring, summand, request)
            for name, tensor in memory_after.items():
                if not name.startswith(SECURE):
                    new_memory[name] = tensor
            generator = torch_stream(context.seed, "secure rounding", request.round, request.client)
            words = secure_client.plan.ring.encode(values, generator)
            if action.in_rounds and algorithm.privacy.adds_noise_to_words:
                return _noised(words, secure_client, request, algorithm, context)
            return words

        try:
            evidence = secure_client.answer(stage, data, masked_words if stage == "masked" else None)
            if stage == "consistency":  # signed by enough clients, the sum over these can be opened
                _record_survivors(request, action, algorithm, context, ledger, secure_client)
        except SecureRefusal as secure_refusal:
            ledger.proven = max(ledger.proven, int(secure_refusal.fields.get("proven", 0)))
            raise
        finally:  # whoever refuses remembers it, and stays out of this sum
            new_memory.update(ledger.write(new_memory))
            new_memory["identity"] = as_tensor(secure_client.identity.to_bytes())
            if stage != "unmask" or context.replays:
                new_memory[slot + "state"] = as_tensor(secure_client.state())
                new_memory[slot + "plan"] = as_tensor(secure_client.plan.to_bytes())
            else:  # the keys have done their work
                for name in [name for name in new_memory if name.startswith(slot)]:
                    del new_memory[name]
    except (Refused, Unfit) as error:
        refusal = error if isinstance(error, Refused) else SecureRefusal(str(error), "numbers")
        refusal.memory = new_memory
        raise refusal from error
    return Response(request.run, request.round, request.client, request.space, 0, evidence=evidence), new_memory


def update_length(summand: Mapping[str, Tensor]) -> float:
    """Return the length of the update in a client's summand of a training round, without its weight."""
    weight = float(summand["weight"])
    if not weight:
        return 0.0
    return float(torch.linalg.vector_norm(summand["update"].double())) / weight


def _record_survivors(
    request: Request,
    action: Action,
    algorithm: Algorithm,
    context: ClientContext,
    ledger: DataLedger,
    secure_client: SecureClient,
) -> None:
    """Record in the ledger over which clients this sum will be opened; refuse other clients than those before."""
    alive = secure_client.progress.alive
    if action.in_rounds:
        ledger.record_round(secure_client.plan, alive)
        return
    rows = rows_of(request, action, context)
    if not allows_other_sets(algorithm, context):
        ledger.require_same_set(rows, alive, whole=True)
    ledger.record_set(rows, alive)
    ledger.record_held_question(rows, secure_client.plan.digest)


def _is_outdated(name: str, slot: str, replays: bool) -> bool:
    """Return whether the memory entry `name` of an earlier secure sum can be dropped when the sum of `slot` begins.

    `slot` is the prefix of the new sum's entries. With `replays` a resumed server may ask again for the latest training
    round, and for the sums before the first round; the latter go when training begins.
    """
    if not name.startswith(SECURE) or name.startswith(slot):
        return False
    training = f"{SECURE}train/"
    return not replays or slot.startswith(training) or name.startswith(training)


def _client_at_stage(
    stage: str,
    slot: str,
    request: Request,
    algorithm: Algorithm,
    context: ClientContext,
    memory: ClientMemory,
    ledger: DataLedger,
) -> SecureClient:
    """Return this client's `SecureClient` as it stands at the beginning of a stage.

    At the stage "keys" it is made from the plan in the request, which is checked first; later it is resumed from the
    memory entries under the prefix `slot`. What the `ledger` of the data does not allow is refused. If `memory` holds
    no identity key, the result has a new one, which the caller stores: nothing is written here.
    """
    if "identity" in memory:
        identity = Identity.from_bytes(as_bytes(memory["identity"]))
    else:
        identity = Identity.fresh()
    policies = policies_in_force(algorithm, context)
    most_clients = min(policy.most_clients for policy in policies)
    cohort = max(policy.cohort for policy in policies)
    has_begun = slot + "state" in memory
    if stage == "keys":
        plan_bytes = as_bytes(request.auxiliary["plan"]) if "plan" in request.auxiliary else b""
        if not has_begun or plan_bytes != as_bytes(memory[slot + "plan"]):
            try:
                plan = Plan.from_bytes(plan_bytes, most_clients)
            except Refused:
                raise
            except FedgraftError as error:
                raise SecureRefusal(str(error), "plan") from error
            check_plan(plan, request, algorithm, context)
            action = action_named(str(request.settings["sums"]))
            if not action.in_rounds and not allows_other_sets(algorithm, context):
                ledger.require_same_set(rows_of(request, action, context), plan.clients, whole=False)
            ledger.counter += 1  # every sum that begins counts, so that its advert shows a new number
            return SecureClient(
                plan,
                request.client,
                identity,
                run_fingerprint=context.run_fingerprint,
                cohort=cohort,
                counter=ledger.counter,
            )
    elif not has_begun:
        raise SecureRefusal(f"the stage {stage!r} of a secure sum was asked for before it began")
    plan = Plan.from_bytes(as_bytes(memory[slot + "plan"]), most_clients)
    if plan.run != series(request.run, str(request.settings["sums"])):
        raise SecureRefusal("the secure sum under way is another run's", "plan")
    state = as_bytes(memory[slot + "state"])
    return SecureClient.resume(plan, request.client, identity, state, context.run_fingerprint, cohort)


def _noised(
    words: Words, secure_client: SecureClient, request: Request, algorithm: Algorithm, context: ClientContext
) -> Words:
    """Return the encoded input with this client's share of the noise.

    The noise follows from a key that the client drew for this sum and never shows. Only a simulation whose noise is not
    secret takes it from the seed, so that it can be repeated.
    """
    privacy = algorithm.privacy
    assert isinstance(privacy, SharedNoise)
    simulated = not (privacy.dp.bound_to_sum or context.noise_key or context.replays)
    key = simulation_key(context.seed) if simulated else bytes.fromhex(secure_client.progress.noise_key)
    if len(key) != KEY_LENGTH:
        raise SecureRefusal("this sum began without a key for the noise of this client", "noise")
    return privacy.noised_words(words, secure_client.plan, float(request.settings["clip"]), key, request.client)


def _with_cut_flag(ring: Ring, values: Mapping[str, Tensor], request: Request) -> dict[str, Tensor]:
    """Return the values with a flag (1 or 0) that says whether the ring clips some of them; warn if it does.

    The flag is added only where the sum has a segment for it.
    """
    cut_segments = ring.cut_segments(values)
    if cut_segments:
        log.warning(
            "client %d, round %d: numbers of %s lie beyond what the secure sum holds and are cut; raise privacy.limit.",
            request.client,
            request.round + 1,
            " and ".join(cut_segments),
        )
    flagged = dict(values)
    if any(segment.name == CUT.name for segment in ring.segments):
        flagged[CUT.name] = torch.tensor([float(bool(cut_segments))], dtype=torch.float64)
    return flagged


def check_plan(plan: Plan, request: Request, algorithm: Algorithm, context: ClientContext) -> None:
    """Refuse a plan that differs from the one that this client derives from the agreed config and the request.

    The server chooses who takes part and nothing else. Also refuse a plan that a policy in force finds too weak. Raises
    `SecureRefusal` or `Refused`.
    """
    action = action_named(str(request.settings["sums"]))
    assert action.layout is not None
    scope = SumScope(request.settings, context.network, algorithm, context.sent, context.space.trained)
    name = series(request.run, action.name)
    try:
        derived = algorithm.privacy.plan_of_sum(
            name, request.round, plan.clients, action.layout(scope), action.in_rounds, plan.binds
        )
    except FedgraftError as error:  # no plan of this config has these clients
        raise SecureRefusal(str(error), "plan", check=error.code) from error
    for field in fields(Plan):
        if getattr(plan, field.name) != getattr(derived, field.name):
            rule = field.name if field.name in ("threshold", "degree") else "plan"
            raise SecureRefusal(
                f"client {request.client}: the {field.name} in the plan of the secure sum is not the one that follows "
                f"from the config for round {request.round}",
                rule,
                check="derived plan",
                field=field.name,
            )
    for policy in policies_in_force(algorithm, context):
        policy.check_plan(plan)
