"""What a federation is and what its server knows between rounds; and that knowledge as named tensors, once for all.

`to_tensors` and `from_tensors` are the only place that writes a state down: checkpoints, centralised training and the
resume law use them. With the clients' memories this is the whole of a run.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Literal

from torch import Tensor

EVERYONE = -1
Schedule = Callable[[int, int, Sequence[float]], float]
"""(round, rounds in all, validation losses so far) -> learning rate."""
Memories = Mapping[int, Mapping[str, Tensor]]
"""What each client keeps to itself, by client and name."""


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
    """Most examples a client may count for; the unit of weights inside secure aggregation."""
    without: frozenset[int] = frozenset()
    """Clients that nothing is made from; the numbers and streams of the others stay as they are."""
    evaluate_only: frozenset[int] = frozenset()
    """Those of them that test models all the same."""
    joins: Mapping[int, int] = field(default_factory=dict)
    """First rounds, counted from 1, of clients that come later; nothing before the first round is made from them."""
    leaves: Mapping[int, int] = field(default_factory=dict)
    """Last rounds, counted from 1, of clients that go for good."""
    secret: bytes = b""
    """What cohorts are drawn from where nobody may know them; empty: the seed, so that they can be repeated."""
    keeps_contributions: bool = False
    """Whether the state holds what each client added, so that it can be subtracted (`unlearn --fast`)."""
    norm_factor: float = 30.0
    """Updates longer than so many times the usual length are refused; 0: none for their length."""

    @property
    def members(self) -> list[int]:
        """The clients that a model is made from."""
        return [k for k in range(self.clients) if k not in self.without]

    @property
    def founders(self) -> list[int]:
        """Those of them that are there before the first round: a head, a mask and counts are made from these."""
        return [k for k in self.members if self.there(k, 0)]

    @property
    def evaluated(self) -> list[int]:
        """The clients that test models on images of their own."""
        return sorted({*self.members, *self.evaluate_only})

    def there(self, client: int, round: int) -> bool:
        """Whether a client has joined and not left in this round, counted from 1; 0 is before the first."""
        return self.joins.get(client, 0) <= round <= self.leaves.get(client, round)

    def rate(self, state: ServerState) -> float:
        """The learning rate of the coming round."""
        return self.schedule(state.round, self.rounds, state.losses)


@dataclass(frozen=True)
class ServerState:
    """All the server knows between rounds."""

    round: int
    vector: Tensor
    """The common model on the edit space, float32."""
    rule: Mapping[str, Tensor] = field(default_factory=dict)
    """State of the server rule: moments, control variate."""
    personal: Mapping[int, Tensor] = field(default_factory=dict)
    """With mixing: the model of every client that has one of its own."""
    active: Mapping[int, Tensor] = field(default_factory=dict)
    """Which coordinates may move this round, as packed bits: by client, or for `EVERYONE`. Empty: all of them."""
    drifts: tuple[float, ...] = ()
    """Mean drift of the clients relative to their update, by round, for adaptive sparsity."""
    clip: float = 0.0
    """Under differential privacy: the bound on the norm of an update in the coming round."""
    losses: tuple[float, ...] = ()
    """Validation losses so far, for the plateau schedule."""
    norms: tuple[float, ...] = ()
    """Median length of the accepted updates over the learning rate, of the last few rounds."""
    contributions: Mapping[int, Tensor] = field(default_factory=dict)
    """By client: how much farther the model went than the others' updates alone would have taken it, where kept."""

    def model_of(self, client: int) -> Tensor:
        """The vector this client starts from: its own where it has one, else the common one."""
        return self.personal.get(client, self.vector)

    def active_of(self, client: int) -> Tensor | None:
        """Which coordinates this client may move, as packed bits; None: all of them."""
        return self.active.get(client, self.active.get(EVERYONE))


def to_tensors(state: ServerState, memories: Memories) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """The state and the clients' memories as named tensors and plain numbers.

    Personal models that are kept in files of their own say so by being no plain dict, and are left out.
    """
    tensors = {"vector": state.vector, **{f"rule/{name}": t for name, t in state.rule.items()}}
    if type(state.personal) is dict:
        tensors |= {f"personal/{client}": t for client, t in state.personal.items()}
    tensors |= {f"contribution/{client}": t for client, t in state.contributions.items()}
    for client, kept in memories.items():
        tensors |= {f"memory/{client}/{name}": t for name, t in kept.items()}
    return tensors, {
        "drifts": list(state.drifts),
        "clip": state.clip,
        "losses": list(state.losses),
        "norms": list(state.norms),
    }


def from_tensors(
    round: int, tensors: Mapping[str, Tensor], meta: Mapping[str, Any]
) -> tuple[ServerState, dict[int, dict[str, Tensor]]]:
    """The state and the memories that `to_tensors` wrote; other names are ignored."""
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
            client, _, what = key.partition("/")
            memories.setdefault(int(client), {})[what] = tensor
    state = ServerState(round, tensors["vector"], rule, personal, contributions=contributions)
    drifts, losses, norms = (tuple(meta[name]) for name in ("drifts", "losses", "norms"))
    return replace(state, clip=float(meta["clip"]), drifts=drifts, losses=losses, norms=norms), memories
