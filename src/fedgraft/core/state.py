"""The federation, the server's state between rounds, and the conversion of that state to named tensors.

`to_tensors` and `from_tensors` are the only serialisation of a state: checkpoints, centralized training and the resume
law use them. With the clients' memories this is the whole state of a run.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

from torch import Tensor

EVERYONE = -1
"""Stands for all clients as a key of `ServerState.active`."""
Schedule = Callable[[int, int, Sequence[float]], float]
"""(round, rounds in all, validation losses so far) -> learning rate."""
Memories = Mapping[int, Mapping[str, Tensor]]
"""The memories of the clients, by client and name."""


@dataclass(frozen=True)
class Federation:
    """The participants of a run, how they are sampled, and the learning-rate schedule."""

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
    """Upper limit of the examples of a client; the unit of weights inside secure aggregation."""
    without: frozenset[int] = frozenset()
    """Excluded clients, which contribute to no model; the numbers and random streams of the others do not change."""
    evaluate_only: frozenset[int] = frozenset()
    """Excluded clients that still evaluate models."""
    joins: Mapping[int, int] = field(default_factory=dict)
    """First round, counted from 1, of clients that join later; they contribute to nothing before it."""
    leaves: Mapping[int, int] = field(default_factory=dict)
    """Last round, counted from 1, of clients that leave."""
    secret: bytes = b""
    """The key from which secret cohorts are drawn; empty: they are drawn from the seed and can be reproduced."""
    keeps_contributions: bool = False
    """Whether the state stores each client's contribution, so that it can be subtracted (`unlearn --fast`)."""
    durations: Sequence[float] = ()
    """Time that each client needs for a local training by the virtual clock; empty: 1 for everyone."""
    norm_factor: float = 30.0
    """Updates whose norm exceeds this multiple of the usual norm are refused; 0: no limit."""

    @property
    def members(self) -> list[int]:
        """The clients that contribute to the model."""
        return [k for k in range(self.clients) if k not in self.without]

    @property
    def founders(self) -> list[int]:
        """The members present before the first round; the initial head, the mask and class counts come from them."""
        return [k for k in self.members if self.takes_part(k, 0)]

    @property
    def evaluated(self) -> list[int]:
        """The clients that evaluate models on their own images."""
        return sorted({*self.members, *self.evaluate_only})

    def takes_part(self, client: int, round: int) -> bool:
        """Return whether a client takes part in this round, counted from 1; 0 is before the first."""
        return self.joins.get(client, 0) <= round <= self.leaves.get(client, round)

    def duration(self, client: int) -> float:
        """Return the time that this client needs for a local training by the virtual clock."""
        if not self.durations:
            return 1.0
        return self.durations[client]

    def takes_part_always(self, client: int) -> bool:
        """Return whether a client is there before the first round and until the last one."""
        return self.takes_part(client, 0) and self.takes_part(client, self.rounds)

    def rate(self, state: ServerState) -> float:
        """Return the learning rate of the coming round."""
        return self.schedule(state.round, self.rounds, state.losses)


@dataclass(frozen=True)
class InFlight:
    """A training request that a client works on, where the server does not wait for it (buffered rounds)."""

    version: int
    """The round whose model it began with."""
    vector: Tensor
    """That model."""
    losses: int
    """Number of validation losses that were known then; the learning rate may follow from them."""
    due: float
    """When the client will be done, by the virtual clock of a simulation."""


@dataclass(frozen=True)
class ServerState:
    """The server's state between rounds."""

    round: int
    vector: Tensor
    """The common model on the edit space, float32."""
    rule: Mapping[str, Tensor] = field(default_factory=dict)
    """State of the server rule: moments, control variate."""
    personal: Mapping[int, Tensor] = field(default_factory=dict)
    """With mixing: the personal model of each client that has one."""
    active: Mapping[int, Tensor] = field(default_factory=dict)
    """The coordinates that may change this round, as packed bits: by client, or for `EVERYONE`. Empty: all."""
    drifts: tuple[float, ...] = ()
    """Mean drift of the clients relative to their update, by round, for adaptive sparsity."""
    clip: float = 0.0
    """Under differential privacy: the bound on the norm of an update in the coming round."""
    losses: tuple[float, ...] = ()
    """Validation losses so far, for the plateau schedule."""
    norms: tuple[float, ...] = ()
    """Median norm of the accepted updates divided by the learning rate, of the last few rounds."""
    contributions: Mapping[int, Tensor] = field(default_factory=dict)
    """Leave-one-out contribution of each client to the model, summed over rounds, if it is stored."""

    in_flight: Mapping[int, InFlight] = field(default_factory=dict)
    """With buffered rounds: what each busy client works on."""
    clock: float = 0.0
    """Time of the last step by the virtual clock, in units of `partition.speed`."""

    def model_of(self, client: int) -> Tensor:
        """Return the vector this client starts from: its personal model if it has one, else the common one."""
        return self.personal.get(client, self.vector)

    def active_of(self, client: int) -> Tensor | None:
        """Return the coordinates this client may change, as packed bits; None: all."""
        return self.active.get(client, self.active.get(EVERYONE))


def to_tensors(state: ServerState, memories: Memories) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """Return the state and the clients' memories as named tensors and plain numbers.

    Personal models that are stored in their own files are not a plain dict, and are left out.
    """
    tensors = {"vector": state.vector}
    for name, tensor in state.rule.items():
        tensors[f"rule/{name}"] = tensor
    if type(state.personal) is dict:
        for client, tensor in state.personal.items():
            tensors[f"personal/{client}"] = tensor
    for client, tensor in state.contributions.items():
        tensors[f"contribution/{client}"] = tensor
    for client, memory in memories.items():
        for name, tensor in memory.items():
            tensors[f"memory/{client}/{name}"] = tensor
    in_flight = {}
    for client, work in state.in_flight.items():
        tensors[f"in_flight/{work.version}"] = work.vector  # clients that began together share it
        in_flight[str(client)] = [work.version, work.losses, work.due]
    numbers: dict[str, Any] = {
        "clock": state.clock,
        "drifts": list(state.drifts),
        "clip": state.clip,
        "losses": list(state.losses),
        "norms": list(state.norms),
    }
    if in_flight:
        numbers["in_flight"] = in_flight
    return tensors, numbers


def from_tensors(
    round: int, tensors: Mapping[str, Tensor], meta: Mapping[str, Any]
) -> tuple[ServerState, dict[int, dict[str, Tensor]]]:
    """Return the state and the memories that `to_tensors` wrote; other names are ignored.

    `round` is that of the state, `meta` has the plain numbers.
    """
    rule: dict[str, Tensor] = {}
    personal: dict[int, Tensor] = {}
    contributions: dict[int, Tensor] = {}
    memories: dict[int, dict[str, Tensor]] = {}
    for name, tensor in tensors.items():
        group, _, key = name.partition("/")
        if group == "rule":
            rule[key] = tensor
        elif group == "personal":
            personal[int(key)] = tensor
        elif group == "contribution":
            contributions[int(key)] = tensor
        elif group == "memory":
            client, _, entry = key.partition("/")
            memories.setdefault(int(client), {})[entry] = tensor
    in_flight = {}
    for name, (version, losses, due) in meta.get("in_flight", {}).items():
        in_flight[int(name)] = InFlight(version, tensors[f"in_flight/{version}"], losses, due)
    state = ServerState(
        round,
        tensors["vector"],
        rule,
        personal,
        drifts=tuple(meta["drifts"]),
        clip=float(meta["clip"]),
        losses=tuple(meta["losses"]),
        norms=tuple(meta["norms"]),
        contributions=contributions,
        in_flight=in_flight,
        clock=float(meta.get("clock", 0.0)),
    )
    return state, memories
