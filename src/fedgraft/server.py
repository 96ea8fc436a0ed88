"""The server's pure functions: sample a cohort, write its orders, fold the combined change into the next state."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Literal

from torch import Tensor

from fedgraft.aggregate.server_rules import RoundInfo
from fedgraft.algorithm import Algorithm
from fedgraft.local.schedules import Schedule
from fedgraft.messages import Order, Scalar
from fedgraft.randomness import numpy_stream

EVERYONE = -1


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
    largest: int = 1
    """Most examples a client may count for; the unit of weights inside a secure sum."""


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
    active: Mapping[int, Tensor] = field(default_factory=dict)
    """Which coordinates may move this round, as packed bits: by client, or for `EVERYONE`. Empty: all of them."""
    drifts: tuple[float, ...] = ()
    """Mean drift of the clients relative to their change, by round, for adaptive sparsity."""
    clip: float = 0.0
    """Under privacy: the bound on the norm of a change in the coming round."""
    losses: tuple[float, ...] = ()
    """Validation losses so far, for the plateau schedule."""


def start(algorithm: Algorithm, vector: Tensor, trained: int) -> ServerState:
    """The state before round 0."""
    privacy = algorithm.privacy.dp
    return ServerState(0, vector.clone(), algorithm.server.init(len(vector)), clip=privacy.clip if privacy else 0.0)


def sample(federation: Federation, round: int) -> list[int]:
    """The clients of this round, sorted; drawn from (seed, round) alone. The cost is that of the cohort."""
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
    if algorithm.privacy.dp is not None:
        settings["clip"] = state.clip
    common = {name: state.rule[name] for name in algorithm.local.correction.receives}
    made = []
    for k in cohort:
        active = active_of(state, k)
        auxiliary = common if active is None else {**common, "active": active}
        made.append(Order(federation.run, state.round, k, "train", space, model_of(state, k), auxiliary, settings))
    return made


def active_of(state: ServerState, client: int) -> Tensor | None:
    """Which coordinates this client may move, as packed bits; None: all of them."""
    return state.active.get(client, state.active.get(EVERYONE))


def server_step(algorithm: Algorithm, state: ServerState, update: Tensor, info: RoundInfo) -> ServerState:
    """The state after one common change."""
    vector, rule = algorithm.server.step(state.vector, update, dict(state.rule), info)
    return replace(state, round=state.round + 1, vector=vector, rule=rule)


def skip(state: ServerState) -> ServerState:
    """The state after a round without enough answers: time passes, nothing trainable."""
    return replace(state, round=state.round + 1)
