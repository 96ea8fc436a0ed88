"""The two server-side slots of an algorithm: the weighting of clients, and the aggregation of their updates.

An `Aggregator` combines the updates into one and lets the server rule step; a `Mixing` computes one model per client
from the rows of a similarity matrix. Both `advance` the server's state, so a round need not know which of them it has.
What each of them requires of the other slots, and provides for them: `core/capabilities.py`.
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
from fedgraft.core.capabilities import NOTHING, Capabilities, Capability, required_by
from fedgraft.core.state import EVERYONE, Federation, ServerState


@dataclass(frozen=True)
class Answers:
    """The accepted responses of one round, decoded, in client order; `server.collect.read_answers` makes it."""

    clients: tuple[int, ...]
    examples: Tensor
    """float64 (m,)."""
    updates: Sequence[Tensor]
    """m vectors over the edit space."""
    scalars: Sequence[Mapping[str, float]] = ()
    """Named numbers that each client reports."""
    evidence: Sequence[Mapping[str, Tensor]] = ()
    """Named tensors that each client reports of itself, such as representations."""
    active: Sequence[Tensor] = ()
    """With partly active spaces: which coordinates each client could change, bool (k,)."""
    start: Tensor | None = None
    """The common model the round began with."""
    round: int = 0
    dropped: int = 0
    """Number of clients whose response was refused; that many attackers fewer are left among the updates."""
    sums: Sequence[Mapping[str, Tensor]] = ()
    """Auxiliary vectors of each client; they are summed without weights."""
    trained: int = 0
    """Number of trained coordinates; normalisation statistics follow them. 0: all are trained."""
    layers: Sequence[tuple[int, int, int]] = ()
    """With alignment: (layer, begin, end), the observed layer whose score weights these coordinates."""


_ABOUT_CLASSES = ("labels", "discrepancy")  # observations of how many images a client has of each class


@dataclass(frozen=True)
class Observe:
    """An observation that a client reports after training: numbers, or tensors of a known shape.

    `name` is the entry in `client.observe.OBSERVATIONS`; shapes may use the names `width` and `classes` of the
    network and `trained`, the number of trained coordinates.
    """

    name: str
    scalars: tuple[str, ...] = ()
    evidence: Mapping[str, tuple[int | str, ...]] = field(default_factory=dict)
    options: Mapping[str, Any] = field(default_factory=dict)
    needs_probe: bool = False
    """It uses the probe images, the same for every client, row by row."""
    largest: float = 1.0 + 1e-4
    """Largest value of each scalar; none is negative. Scores are at most 1 up to rounding."""

    @property
    def requires(self) -> Capabilities:
        """What clients must be allowed to report; the trained network of each client must exist by itself."""
        required = {Capability.SEPARATE_CLIENTS}
        if self.name in _ABOUT_CLASSES:
            required.add(Capability.ONE_CLASS)
        if self.scalars:
            required.add(Capability.CLIENT_NUMBERS)
        if self.evidence:
            required.add(Capability.CLIENT_TENSORS)
        return frozenset(required)


@dataclass(frozen=True)
class Weighting:
    """The weights of the clients: `weights(answers)` -> float64 (m,), not necessarily normalised."""

    name: str
    weights: Callable[[Answers], Tensor]
    wants: tuple[Observe, ...] = ()
    own: Callable[[float, Mapping[str, float], float], float] | None = None
    """`own(examples, scalars, largest)`: the weight in [0, 1] that a client computes for itself, where it can;
    `largest` is the upper limit of examples per client. Secure aggregation applies the weight on the client."""
    server_scored: tuple[str, ...] = ()
    """Scalars that the server computes itself from the updates, so that no client can report a wrong one."""
    instead: str = "algorithm.weighting='examples'"
    """The setting for weights that a client can compute for itself."""
    options: Mapping[str, Any] = field(default_factory=dict)
    """Options for computing `server_scored`: layers, directions, the size of the server's secret probe."""
    needs: Capabilities = frozenset({Capability.CLIENT_WEIGHTS})
    """What it requires beyond that which follows from the other fields."""
    provides: ClassVar[Capabilities] = NOTHING

    @property
    def requires(self) -> Capabilities:
        """`needs`, what its observations need, and each update if only the server can compute the weights."""
        required = self.needs | required_by(self.wants)
        if self.own is None:
            required |= {Capability.EACH_UPDATE}
        if self.server_scored:  # the server scores the present model moved by the update
            required |= {Capability.SAME_START}
        return required


def by_examples() -> Weighting:
    """Return weights in proportion to the number of examples, over the clients that responded."""
    return Weighting("examples", lambda answers: answers.examples, own=lambda n, scalars, largest: n / largest)


def uniform() -> Weighting:
    """Return the same weight for every client."""
    return Weighting(
        "uniform",
        lambda answers: torch.ones_like(answers.examples),
        own=lambda n, scalars, largest: 1.0,
        needs=NOTHING,
    )


@dataclass(frozen=True)
class Step:
    """The server before its step: the federation, the state, the server rule, the learning rate of the round."""

    federation: Federation
    state: ServerState
    rule: ServerRule
    lr: float

    def server_step(self, update: Tensor, info: RoundInfo) -> ServerState:
        """Return the state after the server rule's step by one common update; `self.state` stays as it is."""
        vector, rule = self.rule.step(self.state.vector, update, dict(self.state.rule), info)
        return replace(self.state, round=self.state.round + 1, vector=vector, rule=rule)

    def info(self, answers: Answers, weights: Tensor) -> RoundInfo:
        """Return what the server rule reads besides the mean update: summed auxiliary vectors and mean scalars."""
        share = weights / weights.sum()
        sums: dict[str, Tensor] = {}
        if answers.sums:
            for name in answers.sums[0]:
                sums[name] = sum_unweighted([vectors[name] for vectors in answers.sums])
        if self.rule.inspect:
            sums |= self.rule.inspect(answers.updates, weights)
        scalars = {}
        for name in answers.scalars[0]:
            scalars[name] = weighted(share, [numbers[name] for numbers in answers.scalars])
        return RoundInfo(
            clients_total=self.federation.clients,
            clients_answered=len(answers.clients),
            lr=self.lr,
            sums=sums,
            scalars=scalars,
        )


def weighted(share: Tensor, values: Sequence[float]) -> float:
    """Return the mean of the values with normalised weights `share`."""
    return float((share * torch.tensor(values, dtype=torch.float64)).sum())


@dataclass(frozen=True)
class Advanced:
    """The next state, the combined update that clients are compared with, and matrices for figures.

    `update` is what the aggregation makes of the updates, before the server rule; under `Mixing` it is the change of
    the common vector.
    """

    state: ServerState
    update: Tensor
    extra: Mapping[str, Tensor] = field(default_factory=dict)


@dataclass(frozen=True)
class Aggregator:
    """One common model: `update(answers, weights)` -> one vector, then the step of the server rule."""

    name: str
    update: Callable[[Answers, Tensor], Tensor]
    instead: str = "algorithm.name='fedavg'"
    """The setting that gives a plain mean instead."""
    wants: tuple[Observe, ...] = ()
    needs: Capabilities = frozenset({Capability.EACH_UPDATE, Capability.AVERAGED_UPDATES})
    """What it requires beyond its observations; only the weighted mean, which a secure sum can compute, needs less."""
    provides: Capabilities = frozenset({Capability.COMMON_MODEL, Capability.STABLE_MODEL, Capability.EXCHANGE})
    """Without `EXCHANGE` training is centralized, and no traffic is counted."""
    reports: ClassVar[Mapping[str, float]] = {}

    @property
    def requires(self) -> Capabilities:
        """`needs`, and what its observations need."""
        return self.needs | required_by(self.wants)

    def request_tensors(self, state: ServerState) -> Mapping[str, Tensor]:
        """Return the tensors that requests to clients carry beside the model: none."""
        return {}

    def advance(self, step: Step, answers: Answers, weights: Tensor) -> Advanced:
        """Return the state after combining the updates and taking the step of the server rule.

        Coordinates that no client could train in this round keep their value.
        """
        update = self.update(answers, weights)
        new_state = step.server_step(update, step.info(answers, weights))
        if EVERYONE in step.state.active:  # inactive coordinates do not move, whatever momentum the server rule has
            vector = torch.where(answers.active[0], new_state.vector, step.state.vector)
            new_state = replace(new_state, vector=vector)
        return Advanced(new_state, update)


def mean() -> Aggregator:
    """Return the weighted mean of the updates."""
    return Aggregator("mean", lambda answers, weights: weighted_mean(answers.updates, weights), needs=NOTHING)


def count_mean() -> Aggregator:
    """Return the mean under per-client masks: each coordinate averaged over the clients whose mask contains it."""

    def update(answers: Answers, weights: Tensor) -> Tensor:
        return count_normalised(answers.updates, answers.active, weights)

    return Aggregator("count_mean", update, needs=frozenset({Capability.EACH_UPDATE}))


@runtime_checkable
class PersonalModels(Protocol):
    """Personal models stored outside memory: a mapping that can produce its own successor."""

    def renewed(
        self, round: int, clients: Sequence[int], pieces: Iterable[tuple[slice, Tensor]], keep: bool
    ) -> Mapping[int, Tensor]:
        """Return the models after this round (0: the start) by client, of which new ones are stored.

        `pieces` are columns of these clients' new models (m, k). `keep`: others keep theirs, else they have none.
        """
        ...


@dataclass(frozen=True)
class Mixing:
    """One model per client: each row of a similarity matrix gives the weights of its mixture."""

    name: str
    similarity: Callable[[Answers], Tensor]
    """(m, m), non-negative, diagonal 1."""
    wants: tuple[Observe, ...] = ()
    absent_keep: bool = True
    """Clients outside the cohort keep their model; otherwise they fall back to the mean of the others."""
    sends_mean: bool = False
    """Requests carry the common vector beside the client's own model (see `request_tensors`)."""
    provides: Capabilities = frozenset({Capability.STABLE_MODEL, Capability.PERSONAL_MODELS, Capability.EXCHANGE})
    """Without `EXCHANGE` clients train alone, and no traffic is counted."""
    instead: ClassVar[str] = Aggregator.instead
    reports: ClassVar[Mapping[str, float]] = {}

    @property
    def requires(self) -> Capabilities:
        """What mixing and its observations need.

        Hiding each update would be no use: a server that knows the matrix could solve the mixtures for every model.
        """
        mixed = {Capability.EACH_UPDATE, Capability.FIXED_COORDINATES, Capability.AVERAGED_UPDATES}
        return required_by(self.wants) | mixed

    def request_tensors(self, state: ServerState) -> Mapping[str, Tensor]:
        """Return the tensors that requests to clients carry beside the model: the common vector, or none.

        It is the weighted mean of the models of the clients that responded last (see `advance`).
        """
        if not self.sends_mean:
            return {}
        return {"common": state.vector}

    def advance(self, step: Step, answers: Answers, weights: Tensor) -> Advanced:
        """Return the state in which the model of each responding client is its row's mixture of all their models.

        The common vector (`anchor`) becomes their weighted mean. Personal models are written to the store where the
        state has one.
        """
        state = step.state
        similarity = self.similarity(answers)
        matrix = mixing_matrix(similarity, answers.examples)
        anchor = state.vector
        models = [state.model_of(k) for k in answers.clients]

        def offsets(piece: slice) -> Tensor:  # (m, piece): computed piece by piece, because all of them may be large
            """Return the clients' new models minus the anchor, (m, piece), for a piece of the coordinates."""
            rows = torch.empty(len(models), piece.stop - piece.start)
            for row, model, update in zip(rows, models, answers.updates, strict=True):
                torch.sub(model[piece], anchor[piece], out=row).add_(update[piece])
            return rows

        common = torch.empty_like(anchor)
        personal: Mapping[int, Tensor]
        if isinstance(state.personal, PersonalModels):
            pieces = blended(anchor, offsets, matrix, (weights, common))
            personal = state.personal.renewed(state.round + 1, answers.clients, pieces, self.absent_keep)
        else:
            mixed = mix(anchor, offsets, matrix, (weights, common))
            personal = dict(zip(answers.clients, mixed, strict=True))
            if self.absent_keep:
                personal = {**state.personal, **personal}
        # The anchor follows the mean: a client that joins late starts from the present models, not from old ones.
        new_state = replace(state, round=state.round + 1, vector=common, personal=personal)
        return Advanced(new_state, common - anchor, {"mixing": matrix, "similarity": similarity})
