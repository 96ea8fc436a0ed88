"""Carrying the orders of a round out and taking in what comes back: each update, validated, or only their hidden sum.

Everything that arrives is hostile until it is checked. `Collected` is what a round goes on with.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Protocol

import torch
from torch import Tensor

from fedgraft.aggregate.mean import drift_report
from fedgraft.aggregate.slots import Advanced, Aggregator, Answers, Weighting, weighted
from fedgraft.algorithms.algorithm import Algorithm, secure_segments
from fedgraft.core.messages import Request, Response, unpack_bits, wire_size
from fedgraft.core.state import Federation, ServerState
from fedgraft.server.example_counts import ExampleCounts
from fedgraft.server.secure_sum import HiddenSum, secure_sum
from fedgraft.server.validate import (
    Accepted,
    Arrival,
    Expectation,
    Field,
    Range,
    Rejection,
    validate_responses,
    without_outliers,
)

__all__ = ["Arrival", "Collected", "Engine", "ServerContext", "collect", "describe", "expectation", "relative_drift"]
log = logging.getLogger("fedgraft")
EVIDENCE = 1e9
"""Largest absolute value in a tensor that a client shows by itself: products of larger ones overflow."""


class Engine(Protocol):
    """Where orders are carried out. Answers may be missing, late, doubled or hostile; their order does not matter."""

    def exchange(self, requests: Sequence[Request]) -> Iterable[Arrival]:
        """Deliver the orders and return what came back; (client, sentence) says why a client did not answer."""
        ...


@dataclass(frozen=True)
class ServerContext:
    """What the server knows of the open space, and what it can compute for itself."""

    space: str
    length: int
    trained: int
    width: int
    classes: int
    active: Callable[[ServerState], Mapping[int, Tensor]] | None = None
    """What may move in the coming round, where that changes from round to round."""
    origin: Tensor | None = None
    """The model the run began with, which every client can make again."""
    align: Callable[[Answers], Tensor] | None = None
    """With server-side alignment: scores (m, layers) of the submitted updates on the server's secret probe."""
    example_counts: ExampleCounts = field(default_factory=ExampleCounts)
    """What clients said of themselves; where the server dealt the data, what it knows of them."""
    layers: tuple[tuple[int, int, int], ...] = ()
    """(layer, begin, end): the observed layer in which a change of these coordinates shows first."""
    aggregate: Aggregator | None = None
    """How updates are combined where what trains brings a rule of its own; None: the algorithm's."""
    rate_factor: float = 1.0
    """Factor on the learning rate, from update-norm matching."""

    def learning_rate(self, federation: Federation, state: ServerState) -> float:
        """Return the learning rate of the coming round."""
        return self.rate_factor * federation.rate(state)

    def judged(self, weighting: Weighting, answers: Answers) -> Answers:
        """The answers with the scalars that the server computes itself, where the weighting asks for some."""
        if not weighting.judged:
            return answers
        assert self.align is not None
        told = zip(answers.scalars, self.align(answers).tolist(), strict=True)
        scalars = [{**said, **dict(zip(weighting.judged, row, strict=True))} for said, row in told]
        return replace(answers, scalars=scalars)


@dataclass(frozen=True)
class Collected:
    """What a round brought: the answers by client, or the hidden sum; who was rejected; what it cost."""

    answers: Answers
    accepted: Sequence[Accepted] = ()
    hidden: HiddenSum | None = None
    rejections: tuple[Rejection, ...] = ()
    bytes_up: int = 0
    bytes_down: int = 0
    rounding: float | None = None
    """Size of a step of the hidden sum's fixed-point numbers."""

    @property
    def count(self) -> int:
        """Clients whose update is in."""
        return len(self.accepted) if self.hidden is None else len(self.hidden.survivors)

    @property
    def used(self) -> set[int]:
        """The clients whose updates go into the step."""
        return {a.response.client for a in self.accepted} if self.hidden is None else set(self.hidden.survivors)

    def notes(self) -> dict[str, Any]:
        """What a hidden sum says for the record: who is in it, or that it was aborted."""
        if self.hidden is None:
            return {}
        asked_in_vain = self.hidden.asked and self.hidden.update is None
        if self.rounding is not None:  # under differential privacy the cohort is nobody's business
            return {"aborted": True} if asked_in_vain else {}
        if asked_in_vain:
            return {"aborted": True}
        cut = {"cut": self.hidden.cut} if self.hidden.cut else {}
        return {"clients": {"ids": list(self.hidden.survivors)}, **cut}

    def clipped_updates(self) -> tuple[list[Tensor], float]:
        """Return the updates in the clear, and how many were within the clipping bound."""
        within = sum(a.response.scalars.get("within", 0.0) for a in self.accepted)
        return list(self.answers.updates), within

    def opened_mean(self) -> tuple[Tensor | None, Mapping[str, float], int]:
        """Return the mean that the secure sum opened (None: aborted), its scalars, and how many clients are in it."""
        assert self.hidden is not None
        return self.hidden.update, self.hidden.scalars, self.count


def collect(
    algorithm: Algorithm,
    federation: Federation,
    state: ServerState,
    requests: list[Request],
    engine: Engine,
    context: ServerContext,
) -> Collected:
    """Exchange the orders for what the run's protection lets the server see."""
    if algorithm.privacy.collects_sum:
        return _collect_hidden(algorithm, federation, requests, engine, context)
    responses = list(engine.exchange(requests)) if requests else []
    cohort = [request.client for request in requests]
    accepted, rejections = validate_responses(responses, expectation(algorithm, federation, state, cohort, context))
    if algorithm.privacy.drops_outliers:
        local = algorithm.local
        accepted, outliers = without_outliers(
            accepted,
            federation,
            state,
            context.learning_rate(federation, state),
            lambda r: local.of(r.client).steps_for(int(context.example_counts.counted(r.examples))),
        )
        rejections += outliers
    refused = {one.client for one in rejections if not one.silent} - {a.response.client for a in accepted}
    answers = replace(read(accepted, state, context), dropped=len(refused))
    return Collected(
        answers,
        accepted,
        rejections=tuple(rejections),
        bytes_up=sum(map(size_of, responses)),
        bytes_down=sum(map(wire_size, requests)),
    )


def _collect_hidden(
    algorithm: Algorithm, federation: Federation, requests: list[Request], engine: Engine, context: ServerContext
) -> Collected:
    """Five stages instead of one; the server sees only the sum over those who stay."""
    parts = (engine.exchange, context.length, context.trained, context.example_counts)
    done = secure_sum(algorithm, federation, requests, *parts) if requests else HiddenSum()
    lost = tuple(Rejection(client, why) for client, why in done.lost.items())
    nobody = Answers((), torch.zeros(0, dtype=torch.float64), ())
    rounding = None
    if algorithm.privacy.noise is not None:  # also where nobody was asked: no link depends on settings under privacy
        segments = secure_segments(algorithm, context.length, context.trained, {})
        rounding = algorithm.privacy.rounding(segments)
    return Collected(nobody, (), done, lost, done.bytes_up, done.bytes_down, rounding)


def expectation(
    algorithm: Algorithm, federation: Federation, state: ServerState, cohort: Sequence[int], context: ServerContext
) -> Expectation:
    """What a well-formed training reply of this round looks like."""
    sizes = {"width": context.width, "classes": context.classes, "trained": context.trained}
    evidence = {
        name: Field(tuple(sizes[n] if isinstance(n, str) else n for n in shape), limit=EVIDENCE)
        for wanted in algorithm.wants
        for name, shape in wanted.evidence.items()
    }
    private = not algorithm.privacy.weighs_examples
    ranges = {name: Range(0.0, one.largest) for one in algorithm.wants for name in one.scalars}
    for link in algorithm.update:
        ranges |= {name: Range(0.0, most, name in link.whole) for name, most in link.scalars.items()}
    bits = {k: state.active_of(k) for k in cohort}
    lengths = {k: int(unpack_bits(b, context.trained).sum()) for k, b in bits.items() if b is not None}
    return Expectation(
        run=federation.run,
        round=state.round,
        clients=frozenset(cohort),
        space=context.space,
        length=max(lengths.values(), default=context.length),
        lengths=lengths,
        codec=algorithm.compression,
        sums={name: Field((context.trained,)) for name in algorithm.local.correction.sends},
        scalars=[*(name for wanted in algorithm.wants for name in wanted.scalars), *algorithm.reports],
        evidence=evidence,
        norm_bound=federation.norm_bound,
        # Under privacy every client counts once, so nobody needs to know; else as inside a secure sum.
        max_examples=0
        if private
        else federation.largest
        if federation.largest > 1 and context.example_counts.dealt
        else None,
        ranges=ranges,
        example_counts=None if private else context.example_counts,
        check=lambda response: _steps_lie(algorithm, response, context.learning_rate(federation, state)),
    )


def _steps_lie(algorithm: Algorithm, response: Response, lr: float) -> str:
    """Effective steps that these examples do not give; they scale everybody's step (FedNova)."""
    rule, told = (
        algorithm.local.of(response.client),
        [name for link in algorithm.update if link.needs_effective_steps for name in link.scalars],
    )
    if not told or rule.optimizer.effective_steps is None:
        return ""
    steps = rule.steps_for(response.examples)
    most = rule.rate(lr, response.examples) * rule.optimizer.effective_steps(steps) * (1 + 1e-6)
    lies = [name for name in told if not 0 < response.scalars[name] <= most]
    return (
        f"scalar {lies[0]!r} is {response.scalars[lies[0]]:.4g}, and its examples give at most {most:.4g}"
        if lies
        else ""
    )


def read(accepted: Sequence[Accepted], state: ServerState, context: ServerContext) -> Answers:
    """The accepted replies as the weighting and the aggregator see them, updates spread over the whole space."""
    bits = [state.active_of(a.response.client) for a in accepted]
    active = [unpack_bits(b, context.trained) for b in bits if b is not None]
    updates = [a.update for a in accepted if a.update is not None]
    if active:
        updates = [spread(update, where) for update, where in zip(updates, active, strict=True)]
    return Answers(
        tuple(a.response.client for a in accepted),
        torch.tensor([context.example_counts.counted(a.response.examples) for a in accepted], dtype=torch.float64),
        updates,
        [a.response.scalars for a in accepted],
        [a.response.evidence for a in accepted],
        active,
        state.vector,
        state.round,
        sums=[a.response.sums for a in accepted],
        trained=context.trained,
        layers=context.layers,
    )


def spread(update: Tensor, active: Tensor) -> Tensor:
    """An update of the active coordinates as one of all coordinates, zero elsewhere."""
    full = torch.zeros(len(active))
    full[active] = update
    return full


def describe(answers: Answers, collected: Collected, weights: Tensor, done: Advanced) -> dict[str, Any]:
    """The numbers of a round by client: loss, update norm, drift, cosine to the mean."""
    share = weights / weights.sum()
    report = drift_report(answers.updates, done.update[: len(answers.updates[0])])
    losses = [float(a.response.metrics.get("loss", float("nan"))) for a in collected.accepted]
    layers = [name for name in answers.scalars[0] if name.startswith("alignment:")]
    alignment = {name.partition(":")[2]: [s[name] for s in answers.scalars] for name in layers}
    return {
        "train_loss": weighted(share, losses),
        "clients": {
            "ids": list(answers.clients),
            "loss": losses,
            "norm": [a.norm for a in collected.accepted],
            "drift": report.drifts.tolist(),
            "cosine": report.cosines.tolist(),
            "weight": share.tolist(),
        },
        **({"alignment": alignment} if alignment else {}),
    }


def relative_drift(clients: Mapping[str, list[float]]) -> float:
    """Mean over clients of their distance to the mean update, in units of their own update."""
    pairs = [(d, n) for d, n in zip(clients["drift"], clients["norm"], strict=True) if n > 0]
    return sum(d / n for d, n in pairs) / len(pairs) if pairs else 0.0


def size_of(response: Arrival) -> int:
    """Bytes of one answer on the wire."""
    message = response[1] if isinstance(response, tuple) else response
    if not isinstance(message, Response):
        return len(message) if isinstance(message, bytes | bytearray) else 0
    try:
        return wire_size(message)
    except (AttributeError, KeyError, TypeError):  # a malformed object has no wire form; validation has dropped it
        return 0
