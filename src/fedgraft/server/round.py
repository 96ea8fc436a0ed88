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

from fedgraft.aggregate.robust import TooFew
from fedgraft.aggregate.server_rules import RoundInfo, plain_tail
from fedgraft.aggregate.slots import Step
from fedgraft.algorithms.algorithm import Algorithm
from fedgraft.core.client_memory import ClientMemory, Remembering
from fedgraft.core.messages import Response, message_digest
from fedgraft.core.state import Federation, ServerState
from fedgraft.server import sample as server
from fedgraft.server.collect import Collected, Engine, ServerContext, collect, describe, relative_drift
from fedgraft.server.validate import LARGEST, Rejection, largest

__all__ = ["Engine", "RoundSummary", "ServerContext", "run_round"]


@dataclass(frozen=True)
class RoundSummary:
    """What one round was like; a line of metrics.jsonl."""

    round: int
    cohort: tuple[int, ...]
    record: Mapping[str, Any]
    rejections: tuple[Rejection, ...] = ()
    extra: Mapping[str, Tensor] = field(default_factory=dict)
    """Matrices for figures: the mixing matrix, alignment scores."""
    digests: Mapping[int, str] = field(default_factory=dict)
    """Digest of each accepted reply's bytes by client; none where who took part is hidden or private."""


def digests_of(responses: Sequence[Response]) -> dict[int, str]:
    """Digest of each reply's bytes by client."""
    return {response.client: message_digest(response) for response in responses}


def run_round(
    algorithm: Algorithm, federation: Federation, state: ServerState, engine: Engine, context: ServerContext
) -> tuple[ServerState, RoundSummary]:
    """One round: sample, instruct, exchange, validate, weigh, aggregate, step."""
    began = time.perf_counter()
    if context.active is not None:
        state = replace(state, active=context.active(state))
    cohort = server.sample(federation, state.round)
    requests = server.instruct(algorithm, federation, state, cohort, context.space, context.origin, context.rate_factor)
    before = remembered(engine, cohort)
    collected = collect(algorithm, federation, state, requests, engine, context)
    exchanged = time.perf_counter()
    # Statistics behind the trained coordinates (batch norm) take the plain mean, whatever the server rule.
    rule = plain_tail(algorithm.server, context.trained) if len(state.vector) > context.trained else algorithm.server
    step = Step(federation, state, rule, context.learning_rate(federation, state))
    seen = collected.accepted if algorithm.privacy.records_clients else ()
    with ThreadPoolExecutor(1) as beside:  # hashing holds no lock of Python's, and combining only reads the answers
        digests = beside.submit(digests_of, [a.response for a in seen])
        new, record, extra = checked(step, advance(algorithm, step, collected, context), collected)
    used = set() if "skipped" in record else collected.used
    take_back(engine, {k: memory for k, memory in before.items() if k not in used})
    if "skipped" not in record:
        record["update_norm"] = float((new.vector - state.vector).norm())
    seconds = {"exchange": exchanged - began, "aggregate": time.perf_counter() - exchanged}
    counted = algorithm.aggregate.shares  # clients that train alone send nothing
    record |= {
        "bytes_up": collected.bytes_up if counted else 0,
        "bytes_down": collected.bytes_down if counted else 0,
        "round": state.round + 1,
        "lr": step.lr,
        "seconds": seconds,
        "dropped": [{"client": r.client, "reason": r.reason} for r in collected.rejections],
    }
    return new, RoundSummary(state.round, tuple(cohort), record, collected.rejections, extra, digests.result())


def remembered(engine: Engine, cohort: Sequence[int]) -> dict[int, ClientMemory | None]:
    """What the clients of a round remember before it; nothing where the engine does not know."""
    return {k: engine.memory.get(k) for k in cohort} if isinstance(engine, Remembering) else {}


def take_back(engine: Engine, before: Mapping[int, ClientMemory | None]) -> None:
    """Let clients whose answers were not used go on from what they remembered before this round."""
    if isinstance(engine, Remembering):
        for client, memory in before.items():
            engine.take_back(client, memory)


MEMORY = 5
"""Rounds whose median length of an update says what is usual."""
Outcome = tuple[ServerState, dict[str, Any], Mapping[str, Tensor]]


def checked(step: Step, outcome: Outcome, collected: Collected) -> Outcome:
    """The outcome, or a skipped round where the step would leave a model or a server's memory that nobody can use."""
    new = outcome[0]
    models = [new.vector, *(new.model_of(k) for k in collected.answers.clients if k in new.personal)]
    bad = not all(largest(model) <= LARGEST for model in models)  # also where it is not a number
    if not bad and all(bool(torch.isfinite(t).all()) for t in new.rule.values() if t.is_floating_point()):
        return outcome
    norms = {a.response.client: a.norm for a in collected.accepted}
    longest = f"; the longest update is client {max(norms, key=lambda k: norms[k])}'s" if norms else ""
    why = f"the server's step would leave numbers that no model can hold{longest}"
    return server.skip(step.state), {**collected.notes(), "skipped": True, "refused": why}, {}


def added(step: Step, mean: Tensor, collected: Collected, weights: Tensor) -> dict[int, Tensor]:
    """The contributions so far with this round's: of client k with weight w, the mean minus the mean of the others.

    That is w / (1 - w) times (its update - the mean); of a client by itself, all of the step.
    """
    kept, info = dict(step.state.contributions), step.info(collected.answers, weights)
    for k, update, w in zip(collected.answers.clients, collected.answers.updates, weights / weights.sum(), strict=True):
        share = float(w)
        more = mean if share >= 1 else share / (1 - share) * (update - mean)
        moved, _ = step.rule.step(torch.zeros_like(mean), more, dict(step.state.rule), info)
        kept[k] = kept[k] + moved if k in kept else moved
    return kept


def advance(algorithm: Algorithm, step: Step, collected: Collected, context: ServerContext) -> Outcome:
    """The next state from what came back: each update by itself, or the hidden sum of all."""
    released = algorithm.privacy.advance(step, collected)
    if released is not None:  # also when nobody answered: who was there is private
        return released, collected.notes(), {}
    hidden = collected.hidden
    count = collected.count
    if count < max(1, step.federation.minimum_answers) or (hidden is not None and hidden.update is None):
        return server.skip(step.state), {**collected.notes(), "skipped": True}, {}
    if hidden is not None and hidden.update is not None:  # the mean that secure aggregation opened
        info = RoundInfo(step.federation.clients, count, step.lr, hidden.sums, hidden.scalars)
        return step.server_step(hidden.update, info), collected.notes(), {}
    answers = context.judged(algorithm.weighting, collected.answers)
    weights = algorithm.weighting.weights(answers)
    try:
        aggregate = algorithm.aggregate if context.aggregate is None else context.aggregate
        done = aggregate.advance(step, answers, weights)
    except TooFew as error:
        if error.least > step.federation.per_round:  # even a full cohort would be too small
            raise
        return server.skip(step.state), {"skipped": True}, {}
    record = describe(answers, collected, weights, done)
    usual = statistics.median(a.norm for a in collected.accepted) / step.lr if step.lr > 0 else 0.0
    new = replace(done.state, norms=(*step.state.norms, usual)[-MEMORY:])
    if step.federation.keeps_contributions:
        new = replace(new, contributions=added(step, done.update, collected, weights))
    if algorithm.trainable.partial:
        new = replace(new, drifts=(*step.state.drifts, relative_drift(record["clients"])))
    return new, record, done.extra
