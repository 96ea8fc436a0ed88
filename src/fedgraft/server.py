"""The server's pure functions: sample a cohort, write its orders, fold the combined change into the next state."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Literal

from torch import Tensor

from fedgraft.algorithm import Algorithm
from fedgraft.combine.server_rules import RoundInfo
from fedgraft.local.schedules import Schedule
from fedgraft.messages import Order, Scalar
from fedgraft.randomness import numpy_stream


@dataclass(frozen=True)
class Federation:
    """Who takes part, how often, and at which learning rate."""

    run: str
    seed: int
    clients: int
    per_round: int
    rounds: int
    schedule: Schedule
    sampling: Literal["fixed", "poisson"] = "fixed"
    minimum_answers: int = 1
    norm_bound: float | None = None


@dataclass(frozen=True)
class ServerState:
    """All the server knows between rounds. With the clients' memories it is the whole checkpoint."""

    round: int
    vector: Tensor
    """The common model on the edit space, float32."""
    rule: Mapping[str, Tensor] = field(default_factory=dict)
    """State of the server rule: moments, control variate."""
    personal: Mapping[int, Tensor] = field(default_factory=dict)
    """With a mixture: the model of every client that has one of its own."""
    losses: tuple[float, ...] = ()
    """Validation losses so far, for the plateau schedule."""


def start(algorithm: Algorithm, vector: Tensor, trained: int) -> ServerState:
    """The state before round 0."""
    return ServerState(0, vector.clone(), algorithm.server.init(len(vector)))


def sample(federation: Federation, round: int) -> list[int]:
    """The clients of this round, sorted; drawn from (seed, round) alone. Costs do not grow with the number of clients."""
    stream = numpy_stream(federation.seed, "cohort", round)
    if federation.sampling == "poisson":
        count = int(stream.binomial(federation.clients, federation.per_round / federation.clients))
    else:
        count = federation.per_round
    if count >= federation.clients:
        return list(range(federation.clients))
    return sorted(int(i) for i in stream.choice(federation.clients, count, replace=False, shuffle=False))


def rate(federation: Federation, state: ServerState) -> float:
    """The learning rate of the coming round."""
    return federation.schedule(state.round, federation.rounds, state.losses)


def model_of(state: ServerState, client: int) -> Tensor:
    """The vector this client starts from: its own where it has one, else the common one."""
    return state.personal.get(client, state.vector)


def orders(
    algorithm: Algorithm, federation: Federation, state: ServerState, cohort: list[int], space: str
) -> list[Order]:
    """One training order per client of the cohort."""
    settings: dict[str, Scalar] = {"lr": rate(federation, state)}
    auxiliary = {name: state.rule[name] for name in algorithm.local.correction.receives}
    return [
        Order(federation.run, state.round, k, "train", space, model_of(state, k), auxiliary, settings) for k in cohort
    ]


def fold(algorithm: Algorithm, state: ServerState, change: Tensor, info: RoundInfo) -> ServerState:
    """The state after one common change."""
    vector, rule = algorithm.server.step(state.vector, change, dict(state.rule), info)
    return replace(state, round=state.round + 1, vector=vector, rule=rule)


def skip(state: ServerState) -> ServerState:
    """The state after a round without enough answers: time passes, nothing moves."""
    return replace(state, round=state.round + 1)
