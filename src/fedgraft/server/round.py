"""One round, from sampling to the next state. Read this first: it is the only place that knows the order of things."""

from __future__ import annotations

import statistics
import time
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor

from fedgraft.aggregate.buffering import BufferedRounds
from fedgraft.aggregate.robust import TooFew
from fedgraft.aggregate.server_rules import plain_tail
from fedgraft.aggregate.slots import Step
from fedgraft.algorithms.algorithm import Algorithm
from fedgraft.core.capabilities import Capability
from fedgraft.core.client_memory import ClientMemory, Remembering
from fedgraft.core.messages import Response, message_digest
from fedgraft.core.state import Federation, ServerState
from fedgraft.server import sample as server
from fedgraft.server.buffered import FirstAnswers, collect_buffer, start_idle_clients
from fedgraft.server.collect import Collected, Engine, ServerContext, collect, describe_clients, relative_drift
from fedgraft.server.validate import LARGEST, Rejection, largest

__all__ = ["Engine", "RoundSummary", "ServerContext", "run_round"]


@dataclass(frozen=True)
class RoundSummary:
    """What one round was like: `record` is its line of metrics.jsonl; `run_round` makes it."""

    round: int
    cohort: tuple[int, ...]
    record: Mapping[str, Any]
    rejections: tuple[Rejection, ...] = ()
    extra: Mapping[str, Tensor] = field(default_factory=dict)
    """Matrices for figures: the similarity of clients and the mixing matrix that follows from it, alignment scores."""
    digests: Mapping[int, str] = field(default_factory=dict)
    """Digest of each accepted response's bytes by client; empty where who took part is hidden or private."""


Outcome = tuple[ServerState, dict[str, Any], Mapping[str, Tensor]]
"""The next state, the record of the round, and matrices for figures."""

NORM_HISTORY = 5
"""Number of past rounds whose median update norms are remembered, to tell what is usual."""


def run_round(
    algorithm: Algorithm, federation: Federation, state: ServerState, engine: Engine, context: ServerContext
) -> tuple[ServerState, RoundSummary]:
    """Run one round: sample, instruct, exchange, validate, weigh, aggregate, step. Return the next state and a summary.

    With buffered rounds it begins with the answers that are there first, whichever model they began with.

    Clients whose updates were not used get the memory they had before the round (`Remembering` engines). A round with
    too few responses, or whose step is not finite, is skipped: the model stays.
    """
    began = time.perf_counter()
    if context.active is not None:
        state = replace(state, active=context.active(state))
    order: list[tuple[int, int]] | None = None
    if isinstance(algorithm.rounds, BufferedRounds):
        state = start_idle_clients(federation, state)
        memories_before = _memories(engine, list(state.in_flight))
        collected, state, order = collect_buffer(algorithm, federation, state, engine, context)
        cohort = sorted(client for client, _ in order)
        memories_before = {client: memory for client, memory in memories_before.items() if client in cohort}
    else:
        cohort = server.sample(federation, state.round)
        requests = server.instruct(
            algorithm, federation, state, cohort, context.space, context.origin, context.rate_factor
        )
        memories_before = _memories(engine, cohort)
        collected = collect(algorithm, federation, state, requests, engine, context)
        durations = [federation.duration(client) for client in cohort]
        state = replace(state, clock=state.clock + max(durations, default=0.0))
    exchanged = time.perf_counter()
    rule = algorithm.server
    if len(state.vector) > context.trained:
        # Statistics behind the trained coordinates (batch norm) take the plain mean, whatever the server rule.
        rule = plain_tail(algorithm.server, context.trained)
    step = Step(federation, state, rule, context.learning_rate(federation, state))
    recorded = collected.accepted if algorithm.privacy.records_clients else ()
    with ThreadPoolExecutor(1) as executor:  # hashing does not hold Python's lock, and combining only reads the answers
        digests = executor.submit(_digest_responses, [item.response for item in recorded])
        outcome = advance(algorithm, step, collected, context)
        new_state, record, extra = reject_nonfinite_step(step, outcome, collected)
    skipped = "skipped" in record
    used_clients = set() if skipped else collected.used
    _take_back_unused(engine, memories_before, used_clients)
    if not skipped:
        record["update_norm"] = float((new_state.vector - state.vector).norm())
    sends = Capability.EXCHANGE in algorithm.provides  # clients that train alone send nothing
    dropped = [{"client": rejection.client, "reason": rejection.reason} for rejection in collected.rejections]
    record |= {
        "bytes_up": collected.bytes_up if sends else 0,
        "bytes_down": collected.bytes_down if sends else 0,
        "round": state.round + 1,
        "lr": step.lr,
        "seconds": {"exchange": exchanged - began, "aggregate": time.perf_counter() - exchanged},
        "dropped": dropped,
    }
    if order is not None:
        record["arrivals"] = [[client, began, int(client in used_clients)] for client, began in order]
    if federation.durations and not isinstance(engine, FirstAnswers):
        record["clock"] = state.clock
    summary = RoundSummary(state.round, tuple(cohort), record, collected.rejections, extra, digests.result())
    return new_state, summary


def _digest_responses(responses: Sequence[Response]) -> dict[int, str]:
    """Return the digest of each response's bytes by client."""
    return {response.client: message_digest(response) for response in responses}


def _memories(engine: Engine, cohort: Sequence[int]) -> dict[int, ClientMemory | None]:
    """Return each cohort client's memory before the round (None: it has none).

    {} for an engine that holds no memories.
    """
    if not isinstance(engine, Remembering):
        return {}
    return {client: engine.memory.get(client) for client in cohort}


def _take_back_unused(
    engine: Engine, memories_before: Mapping[int, ClientMemory | None], used_clients: set[int]
) -> None:
    """Give clients whose responses were not used the memory back that they had before the round; changes the engine."""
    if not isinstance(engine, Remembering):
        return
    for client, memory in memories_before.items():
        if client not in used_clients:
            engine.take_back(client, memory)


def advance(algorithm: Algorithm, step: Step, collected: Collected, context: ServerContext) -> Outcome:
    """Return the next state, the record of the round and matrices for figures.

    A privacy strategy that works on a sum makes the state itself; otherwise the updates are weighed and aggregated. A
    round with too few responses is skipped.
    """
    state_from_sum = algorithm.privacy.advance(step, collected)
    if state_from_sum is not None:  # with noise also when nobody answered: who took part is private
        return state_from_sum, dict(collected.notes), {}
    if collected.count < max(1, step.federation.minimum_answers):
        return server.skip(step.state), {**collected.notes, "skipped": True}, {}
    answers = context.with_server_scores(algorithm.weighting, collected.answers)
    weights = algorithm.weighting.weights(answers)
    aggregate = algorithm.aggregate if context.aggregate is None else context.aggregate
    try:
        advanced = aggregate.advance(step, answers, weights)
    except TooFew as error:
        if error.least > step.federation.per_round:  # even a full cohort would be too small
            raise
        return server.skip(step.state), {"skipped": True}, {}
    record = describe_clients(answers, collected, weights, advanced)
    median_norm = statistics.median(item.norm for item in collected.accepted)
    norm_per_rate = median_norm / step.lr if step.lr > 0 else 0.0
    norms = (*step.state.norms, norm_per_rate)[-NORM_HISTORY:]
    new_state = replace(advanced.state, norms=norms)
    if step.federation.keeps_contributions:
        contributions = accumulate_contributions(step, advanced.update, collected, weights)
        new_state = replace(new_state, contributions=contributions)
    if Capability.FIXED_COORDINATES not in algorithm.provides:
        drifts = (*step.state.drifts, relative_drift(record["clients"]))
        new_state = replace(new_state, drifts=drifts)
    return new_state, record, advanced.extra


def reject_nonfinite_step(step: Step, outcome: Outcome, collected: Collected) -> Outcome:
    """Return `outcome`, or a skipped round if the new model or server state has non-finite or out-of-range values."""
    new_state = outcome[0]
    models = [new_state.vector]
    for client in collected.answers.clients:
        if client in new_state.personal:
            models.append(new_state.model_of(client))
    models_usable = all(largest(model) <= LARGEST for model in models)  # False where one is not a number
    if models_usable and _is_finite_state(new_state):
        return outcome
    reason = "the server's step would leave numbers that no model can hold"
    norms = {item.response.client: item.norm for item in collected.accepted}
    if norms:
        longest = max(norms, key=lambda client: norms[client])
        reason += f"; the longest update is client {longest}'s"
    return server.skip(step.state), {**collected.notes, "skipped": True, "refused": reason}, {}


def _is_finite_state(state: ServerState) -> bool:
    """Return whether every floating-point tensor of the server rule's state is finite."""
    for tensor in state.rule.values():
        if tensor.is_floating_point() and not bool(torch.isfinite(tensor).all()):
            return False
    return True


def accumulate_contributions(step: Step, mean: Tensor, collected: Collected, weights: Tensor) -> dict[int, Tensor]:
    """Return each client's leave-one-out contribution to the model, summed over the rounds so far, by client.

    The contribution of client k with weight w is the mean minus the mean of the others: w / (1 - w) times (its update -
    the mean); of a client by itself, all of the step. Each goes through the server rule like an update. `mean` is the
    aggregated update, `weights` are the aggregation weights of the clients in `collected`.
    """
    contributions = dict(step.state.contributions)
    answers = collected.answers
    info = step.info(answers, weights)
    shares = weights / weights.sum()
    for client_id, update, share_tensor in zip(answers.clients, answers.updates, shares, strict=True):
        share = float(share_tensor)
        leave_one_out = mean if share >= 1 else share / (1 - share) * (update - mean)
        contribution, _ = step.rule.step(torch.zeros_like(mean), leave_one_out, dict(step.state.rule), info)
        previous = contributions.get(client_id)
        contributions[client_id] = contribution if previous is None else previous + contribution
    return contributions
