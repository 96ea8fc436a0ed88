"""The two slots in which clients' updates meet: how much each counts, and how they become one model or one each.

An `Aggregator` makes one update and lets the server rule step; a `Mixing` makes one model per client from the rows of a
similarity matrix. Both `advance` the server's state, so a round need not know which of them it has. What they can and
cannot do are flags.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, ClassVar, Protocol, runtime_checkable

import torch
from torch import Tensor

from fedgraft.aggregate.mean import count_normalised, sum_unweighted, weighted_mean
from fedgraft.aggregate.mixing import blended, mix, mixing_matrix
from fedgraft.aggregate.server_rules import RoundInfo, ServerRule
from fedgraft.core.state import EVERYONE, Federation, ServerState


@dataclass(frozen=True)
class Answers:
    """The accepted replies of one round, decoded, in client order."""

    clients: tuple[int, ...]
    examples: Tensor
    """float64 (m,)."""
    updates: Sequence[Tensor]
    """m vectors over the edit space."""
    scalars: Sequence[Mapping[str, float]] = ()
    evidence: Sequence[Mapping[str, Tensor]] = ()
    active: Sequence[Tensor] = ()
    """With partly active spaces: which coordinates each client could move, bool (k,)."""
    start: Tensor | None = None
    """The common model the round began with."""
    round: int = 0
    dropped: int = 0
    """Clients whose reply was refused: attackers that need not be withstood any more."""
    sums: Sequence[Mapping[str, Tensor]] = ()
    """Auxiliary vectors by client; they are summed without weights."""
    trained: int = 0
    """Coordinates that train; statistics of normalisation lie behind them. 0: all."""
    layers: Sequence[tuple[int, int, int]] = ()
    """With alignment: (layer, begin, end), by which observed layer the drift of these coordinates is seen."""


@dataclass(frozen=True)
class Observe:
    """Something a client reports after training: numbers, or tensors of a known shape.

    `name` is the entry in the client's table; shapes may use the names `width` and `classes` of the network
    and `trained`, the coordinates that train.
    """

    name: str
    scalars: tuple[str, ...] = ()
    evidence: Mapping[str, tuple[int | str, ...]] = field(default_factory=dict)
    options: Mapping[str, Any] = field(default_factory=dict)
    needs_probe: bool = False
    """It looks at images that every client has, row by row."""
    largest: float = 1.0 + 1e-4
    """Largest value of each scalar; none is negative. Scores are at most 1, but for rounding."""


@dataclass(frozen=True)
class Weighting:
    """How much each client counts: `weights(answers)` -> float64 (m,), not necessarily normalised."""

    name: str
    weights: Callable[[Answers], Tensor]
    wants: tuple[Observe, ...] = ()
    own: Callable[[float, Mapping[str, float], float], float] | None = None
    """`own(examples, scalars, largest)`: the weight a client gives itself, in [0, 1], where it can know it; `largest`
    is the most examples anybody may have. Secure aggregation then carries the weight inside."""
    judged: tuple[str, ...] = ()
    """Scalars that the server computes from the updates itself, so that nobody can lie about them."""
    uniform: bool = False
    """Every client counts the same, which an account of differential privacy needs."""
    instead: str = "algorithm.weighting='examples'"
    """What to set for weights that a client knows by itself."""
    needs_moving_body: bool = False
    options: Mapping[str, Any] = field(default_factory=dict)
    """What the server needs to know to compute `judged`: layers, directions, the size of its secret probe."""


def by_examples() -> Weighting:
    """Weights in proportion to the number of examples, normalised over those who answered."""
    return Weighting("examples", lambda answers: answers.examples, own=lambda n, scalars, largest: n / largest)


def uniform() -> Weighting:
    """Every client counts the same."""
    return Weighting(
        "uniform", lambda answers: torch.ones_like(answers.examples), own=lambda n, scalars, largest: 1.0, uniform=True
    )


@dataclass(frozen=True)
class Step:
    """Where the server stands when the updates are in: the state, its rule, the round's learning rate."""

    federation: Federation
    state: ServerState
    rule: ServerRule
    lr: float

    def server_step(self, update: Tensor, info: RoundInfo) -> ServerState:
        """The state after one common update."""
        vector, rule = self.rule.step(self.state.vector, update, dict(self.state.rule), info)
        return replace(self.state, round=self.state.round + 1, vector=vector, rule=rule)

    def info(self, answers: Answers, weights: Tensor) -> RoundInfo:
        """What the server rule may know of these answers."""
        share = weights / weights.sum()
        names, sums = answers.scalars[0].keys(), answers.sums[0].keys() if answers.sums else ()
        seen = self.rule.inspect(answers.updates, weights) if self.rule.inspect else {}
        return RoundInfo(
            clients_total=self.federation.clients,
            clients_answered=len(answers.clients),
            lr=self.lr,
            sums={**{name: sum_unweighted([s[name] for s in answers.sums]) for name in sums}, **seen},
            scalars={name: weighted(share, [s[name] for s in answers.scalars]) for name in names},
        )


def weighted(share: Tensor, values: Sequence[float]) -> float:
    """The mean of these numbers with these normalised weights."""
    return float((share * torch.tensor(values, dtype=torch.float64)).sum())


@dataclass(frozen=True)
class Advanced:
    """The next state, the mean update that clients are compared with, matrices for figures."""

    state: ServerState
    update: Tensor
    extra: Mapping[str, Tensor] = field(default_factory=dict)


@dataclass(frozen=True)
class Aggregator:
    """One model for all: `update(answers, weights)` -> one vector, then the server rule's step."""

    name: str
    update: Callable[[Answers, Tensor], Tensor]
    linear: bool = True
    """A weighted sum, which secure aggregation can carry; robust rules need each update by itself."""
    is_mean: bool = False
    """Exactly the weighted mean, which is what an account of differential privacy covers."""
    of_trainable: bool = False
    """The trainable kind's own way to combine its updates."""
    shares: bool = True
    """False: everything stays in one place, so nothing is counted as sent."""
    instead: str = "algorithm.name='fedavg'"
    """What to set for a mean."""
    personal = False
    several = False
    wants: tuple[Observe, ...] = ()
    reports: ClassVar[Mapping[str, float]] = {}

    def gives(self, state: ServerState) -> Mapping[str, Tensor]:
        """What orders carry beside the model."""
        return {}

    def advance(self, step: Step, answers: Answers, weights: Tensor) -> Advanced:
        """Combine the updates and step."""
        update = self.update(answers, weights)
        new = step.server_step(update, step.info(answers, weights))
        if EVERYONE in step.state.active:  # what rests this round does not move, whatever a server rule remembers of it
            new = replace(new, vector=torch.where(answers.active[0], new.vector, step.state.vector))
        return Advanced(new, update)


def mean() -> Aggregator:
    """The weighted mean of the updates."""
    return Aggregator("mean", lambda answers, weights: weighted_mean(answers.updates, weights), is_mean=True)


def count_mean() -> Aggregator:
    """Under per-client masks: each coordinate averaged over those clients that may move it."""

    def update(answers: Answers, weights: Tensor) -> Tensor:
        return count_normalised(answers.updates, answers.active, weights)

    return Aggregator("count_mean", update, linear=False, of_trainable=True)


@runtime_checkable
class PersonalModels(Protocol):
    """Personal models kept elsewhere than in memory: a mapping that makes the next one itself."""

    def renewed(
        self, round: int, clients: Sequence[int], pieces: Iterable[tuple[slice, Tensor]], keep: bool
    ) -> Mapping[int, Tensor]:
        """The models after this round (0: the start); `pieces` are columns of the clients', (m, k)."""
        ...


@dataclass(frozen=True)
class Mixing:
    """One model per client: rows of a similarity matrix say how the bodies are mixed."""

    name: str
    similarity: Callable[[Answers], Tensor]
    """(m, m), non-negative, diagonal 1."""
    wants: tuple[Observe, ...] = ()
    absent_keep: bool = True
    """Clients outside the cohort keep their model; else they fall back to the mean of the others."""
    shares: bool = True
    """False: nothing is shared (local training only), so nothing is counted as sent."""
    shows_mean: bool = False
    """Orders carry the mean of all models beside the client's own."""
    instead = Aggregator.instead
    linear = True
    is_mean = False
    of_trainable = False
    personal = True
    several = False
    reports: ClassVar[Mapping[str, float]] = {}

    def gives(self, state: ServerState) -> Mapping[str, Tensor]:
        """What orders carry beside the model."""
        return {"common": state.vector} if self.shows_mean else {}

    def advance(self, step: Step, answers: Answers, weights: Tensor) -> Advanced:
        """Each answering client's model becomes its row's mixture of all of them."""
        state = step.state
        matrix = mixing_matrix(self.similarity(answers), answers.examples)
        anchor, models = state.vector, [state.model_of(k) for k in answers.clients]

        def offsets(piece: slice) -> Tensor:  # (m, piece): made as they are needed, because all of them may be large
            found = torch.empty(len(models), piece.stop - piece.start)
            for row, model, update in zip(found, models, answers.updates, strict=True):
                torch.sub(model[piece], anchor[piece], out=row).add_(update[piece])
            return found

        common = torch.empty_like(anchor)
        personal: Mapping[int, Tensor]
        if isinstance(state.personal, PersonalModels):
            pieces = blended(anchor, offsets, matrix, (weights, common))
            personal = state.personal.renewed(state.round + 1, answers.clients, pieces, self.absent_keep)
        else:
            mixed = mix(anchor, offsets, matrix, (weights, common))
            kept = state.personal if self.absent_keep else {}
            personal = {**kept, **dict(zip(answers.clients, mixed, strict=True))}
        # The anchor follows the mean: who never took part starts from what the others have, not from the past.
        new = replace(state, round=state.round + 1, vector=common, personal=personal)
        return Advanced(new, common - anchor, {"mixing": matrix})
