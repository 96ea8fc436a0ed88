"""Exchanging the requests of a round for responses: each update, validated, or only their secure sum.

Everything that arrives is hostile until it is checked. `Collected` is what a round goes on with.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Protocol

import torch
from torch import Tensor

from fedgraft.aggregate.buffering import BufferedRounds
from fedgraft.aggregate.mean import drift_report
from fedgraft.aggregate.slots import Advanced, Aggregator, Answers, Weighting, weighted
from fedgraft.algorithms.algorithm import Algorithm, secure_segments
from fedgraft.core.capabilities import Capability
from fedgraft.core.messages import Request, Response, unpack_bits, wire_size
from fedgraft.core.state import Federation, ServerState
from fedgraft.privacy.protection import NOTHING_OPENED, OpenedMean
from fedgraft.server.example_counts import ExampleCounts
from fedgraft.server.secure_sum import SecureRound, secure_sum
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

__all__ = [
    "Arrival",
    "Collected",
    "Engine",
    "ServerContext",
    "collect",
    "describe_clients",
    "expectation",
    "relative_drift",
]
log = logging.getLogger("fedgraft")
EVIDENCE = 1e9
"""Largest absolute value in a tensor that a client reports by itself: products of larger ones overflow."""


class Engine(Protocol):
    """Where requests are carried out: in this process, in workers, or on other machines.

    Responses may be missing, late, doubled or hostile, in any order.
    """

    def exchange(self, requests: Sequence[Request]) -> Iterable[Arrival]:
        """Deliver the requests and return what arrives; (client, sentence) says why a client sent no response."""
        ...


@dataclass(frozen=True)
class ServerContext:
    """What the server knows of the run's edit space, and what it can compute for itself; made by `runs/open_run.py`."""

    space: str
    """Digest of the edit space."""
    length: int
    """Coordinates of an update."""
    trained: int
    """Coordinates that train; the others of an update are buffers."""
    width: int
    """Features that go into the head."""
    classes: int
    active: Callable[[ServerState], Mapping[int, Tensor]] | None = None
    """Returns the coordinates that train in the coming round as bit masks by client; None: always all."""
    origin: Tensor | None = None
    """The model the run began with, which every client can make again."""
    align: Callable[[Answers], Tensor] | None = None
    """With server-side alignment: scores (m, layers) of the submitted updates on the server's secret probe."""
    example_counts: ExampleCounts = field(default_factory=ExampleCounts)
    """Numbers of images that clients claim; where the server dealt the data, the numbers it knows."""
    layers: tuple[tuple[int, int, int], ...] = ()
    """(layer, begin, end): the observed layer in which a change of these coordinates shows first."""
    aggregate: Aggregator | None = None
    """How updates are combined where what trains brings a rule of its own; None: the algorithm's."""
    rate_factor: float = 1.0
    """Factor on the learning rate, from update-norm matching."""
    arrivals: Callable[[int], Sequence[tuple[int, bool]]] | None = None
    """With buffered rounds that are repeated: returns the recorded buffer of a round, in order of arrival.

    Each client comes with whether its update went into the step."""

    def learning_rate(self, federation: Federation, state: ServerState) -> float:
        """Return the learning rate of the coming round."""
        return self.rate_factor * federation.rate(state)

    def with_server_scores(self, weighting: Weighting, answers: Answers) -> Answers:
        """Return the answers with alignment scores that the server computes itself, where the weighting needs them."""
        if not weighting.server_scored:
            return answers
        assert self.align is not None
        scalars = []
        for reported, row in zip(answers.scalars, self.align(answers).tolist(), strict=True):
            computed = dict(zip(weighting.server_scored, row, strict=True))
            scalars.append({**reported, **computed})
        return replace(answers, scalars=scalars)


@dataclass(frozen=True)
class Collected:
    """What the exchange of a round brought: responses by client or an opened secure sum, rejections, traffic."""

    answers: Answers
    accepted: Sequence[Accepted] = ()
    opened: OpenedMean = NOTHING_OPENED
    """What secure aggregation opened; empty where responses are in the clear."""
    rejections: tuple[Rejection, ...] = ()
    bytes_up: int = 0
    bytes_down: int = 0
    rounding: float | None = None
    """Size of a step of the secure sum's fixed-point numbers."""
    notes: Mapping[str, Any] = field(default_factory=dict)
    """What the record of the round says of a secure sum: who is in it, or that it was aborted."""

    @property
    def count(self) -> int:
        """Number of clients whose updates go into the step."""
        return len(self.used)

    @property
    def used(self) -> set[int]:
        """The clients whose updates go into the step."""
        in_the_clear = {item.response.client for item in self.accepted}
        return in_the_clear.union(self.opened.survivors)  # one of the two is empty

    def clipped_updates(self) -> tuple[list[Tensor], float]:
        """Return the updates in the clear, and how many were within the clipping bound of differential privacy."""
        within = sum(item.response.scalars.get("within", 0.0) for item in self.accepted)
        return list(self.answers.updates), within

    def opened_mean(self) -> OpenedMean:
        """Return the mean that secure aggregation opened."""
        return self.opened


def collect(
    algorithm: Algorithm,
    federation: Federation,
    state: ServerState,
    requests: list[Request],
    engine: Engine,
    context: ServerContext,
) -> Collected:
    """Send a round's requests and return what arrived, validated: updates, or with secure aggregation their sum.

    The claims of accepted clients are noted in `context.example_counts`.
    """
    if algorithm.privacy.collects_sum:
        return _collect_sum(algorithm, federation, requests, engine, context)
    arrivals = list(engine.exchange(requests)) if requests else []
    return read_updates(algorithm, federation, state, requests, arrivals, context)


def read_updates(
    algorithm: Algorithm,
    federation: Federation,
    state: ServerState,
    requests: Sequence[Request],
    arrivals: Sequence[Arrival],
    context: ServerContext,
) -> Collected:
    """Return the updates in what arrived for these requests, validated.

    With buffered rounds the requests may be of earlier rounds; then updates are discounted by their staleness. The
    claims of accepted clients are noted in `context.example_counts`.
    """
    cohort = [request.client for request in requests]
    expected = expectation(algorithm, federation, state, cohort, context)
    expected = replace(expected, rounds={request.client: request.round for request in requests})
    accepted, rejections = validate_responses(arrivals, expected)
    if algorithm.privacy.drops_outliers:

        def steps_of(response: Response) -> int:
            """Return how many local steps a client of so many examples takes."""
            examples = int(context.example_counts.counted(response.examples))
            return algorithm.local.of(response.client).steps_for(examples)

        learning_rate = context.learning_rate(federation, state)
        accepted, outliers = without_outliers(accepted, federation, state, learning_rate, steps_of)
        rejections += outliers
    if isinstance(algorithm.rounds, BufferedRounds):
        accepted = discounted(accepted, algorithm.rounds, state.round)
    refused = {rejection.client for rejection in rejections if not rejection.silent}
    refused -= {item.response.client for item in accepted}
    answers = replace(read_answers(accepted, state, context), dropped=len(refused))
    return Collected(
        answers,
        accepted,
        rejections=tuple(rejections),
        bytes_up=sum(response_bytes(arrival) for arrival in arrivals),
        bytes_down=sum(wire_size(request) for request in requests),
    )


def discounted(accepted: Sequence[Accepted], rounds: BufferedRounds, present: int) -> list[Accepted]:
    """Return the responses with updates that count less the longer ago their model was the present one.

    `present` is the round of the coming step. An update that began with the present model keeps its bits.
    """
    weighed = []
    for item in accepted:
        staleness = present - item.response.round
        if staleness > 0 and item.update is not None:
            item = replace(item, update=item.update * rounds.discount(staleness))
        weighed.append(item)
    return weighed


def _collect_sum(
    algorithm: Algorithm, federation: Federation, requests: list[Request], engine: Engine, context: ServerContext
) -> Collected:
    """Send the requests through the stages of a secure sum and return what was opened: the surviving clients' mean.

    Without requests, and after an abort, nothing is opened. New keys of clients, and clients that are barred from later
    sums, are written into `context.example_counts`. `rounding` is the step of the sum's fixed-point numbers, where
    noise must cover it.
    """
    outcome = SecureRound()
    if requests:
        outcome = secure_sum(
            algorithm,
            federation,
            requests,
            engine.exchange,
            context.length,
            context.trained,
            context.example_counts,
        )
    return collected_sum(algorithm, outcome, context)


def collected_sum(algorithm: Algorithm, outcome: SecureRound, context: ServerContext) -> Collected:
    """Return the outcome of a secure sum as what a round goes on with."""
    lost = [Rejection(client, reason) for client, reason in outcome.lost.items()]
    notes = algorithm.privacy.round_notes(outcome.opened.survivors, outcome.cut)
    if outcome.aborted:
        notes = {"aborted": True}
    no_answers = Answers((), torch.zeros(0, dtype=torch.float64), ())
    rounding = None
    # Also without requests: under differential privacy the segments do not depend on the settings of a request.
    if algorithm.privacy.noise is not None:
        segments = secure_segments(algorithm, context.length, context.trained, {})
        rounding = algorithm.privacy.rounding(segments)
    return Collected(
        no_answers,
        opened=outcome.opened,
        rejections=tuple(lost),
        bytes_up=outcome.bytes_up,
        bytes_down=outcome.bytes_down,
        rounding=rounding,
        notes=notes,
    )


def expectation(
    algorithm: Algorithm, federation: Federation, state: ServerState, cohort: Sequence[int], context: ServerContext
) -> Expectation:
    """Return what a well-formed response to a training request of this round looks like.

    `cohort` are the clients of the round; where they train different coordinates each has its own length of the update.
    """
    sizes = {"width": context.width, "classes": context.classes, "trained": context.trained}
    evidence: dict[str, Field] = {}
    scalars: list[str] = []
    ranges: dict[str, Range] = {}
    for observation in algorithm.wants:
        for name, shape in observation.evidence.items():
            known_shape = tuple(sizes[side] if isinstance(side, str) else side for side in shape)
            evidence[name] = Field(known_shape, limit=EVIDENCE)
        for name in observation.scalars:
            scalars.append(name)
            ranges[name] = Range(0.0, observation.largest)
    scalars += algorithm.reports
    for link in algorithm.update:
        for name, largest_value in link.scalars.items():
            ranges[name] = Range(0.0, largest_value, name in link.whole)
    lengths = {}
    for client in cohort:
        active_bits = state.active_of(client)
        if active_bits is not None:
            lengths[client] = int(unpack_bits(active_bits, context.trained).sum())
    example_counts: ExampleCounts | None = context.example_counts
    max_examples = None
    if not algorithm.privacy.weighs_examples:  # every client counts once, so nobody needs to know
        example_counts = None
        max_examples = 0
    elif federation.largest > 1 and context.example_counts.dealt:  # as inside a secure sum
        max_examples = federation.largest
    learning_rate = context.learning_rate(federation, state)
    return Expectation(
        run=federation.run,
        round=state.round,
        clients=frozenset(cohort),
        space=context.space,
        length=max(lengths.values(), default=context.length),
        lengths=lengths,
        codec=algorithm.compression,
        sums={name: Field((context.trained,)) for name in algorithm.local.correction.sends},
        scalars=scalars,
        evidence=evidence,
        norm_bound=federation.norm_bound,
        max_examples=max_examples,
        ranges=ranges,
        example_counts=example_counts,
        check=lambda response: implausible_steps(algorithm, response, learning_rate),
    )


def implausible_steps(algorithm: Algorithm, response: Response, learning_rate: float) -> str:
    """Return a sentence if a client reports effective steps that its examples cannot give (0, or too many), else "".

    FedNova scales everybody's step by these numbers.
    """
    names: list[str] = []
    for link in algorithm.update:
        if Capability.KNOWN_DISPLACEMENT in link.requires:
            names += link.scalars
    local = algorithm.local.of(response.client)
    effective_steps = local.optimizer.effective_steps
    if not names or effective_steps is None:
        return ""
    steps = local.steps_for(response.examples)
    largest_value = local.rate(learning_rate, response.examples) * effective_steps(steps) * (1 + 1e-6)
    for name in names:
        value = response.scalars[name]
        if not 0 < value <= largest_value:
            return f"scalar {name!r} is {value:.4g}, and its examples give at most {largest_value:.4g}"
    return ""


def read_answers(accepted: Sequence[Accepted], state: ServerState, context: ServerContext) -> Answers:
    """Return the accepted responses as weighting and aggregation see them.

    Updates of active coordinates only are spread over the whole space, with zeros elsewhere. Numbers of examples are
    those that count (`ExampleCounts.counted`), not those claimed.
    """
    active = []
    for item in accepted:
        active_bits = state.active_of(item.response.client)
        if active_bits is not None:
            active.append(unpack_bits(active_bits, context.trained))
    updates = [item.update for item in accepted if item.update is not None]
    if active:
        updates = [spread_update(update, coordinates) for update, coordinates in zip(updates, active, strict=True)]
    example_counts = [context.example_counts.counted(item.response.examples) for item in accepted]
    return Answers(
        tuple(item.response.client for item in accepted),
        torch.tensor(example_counts, dtype=torch.float64),
        updates,
        [item.response.scalars for item in accepted],
        [item.response.evidence for item in accepted],
        active,
        state.vector,
        state.round,
        sums=[item.response.sums for item in accepted],
        trained=context.trained,
        layers=context.layers,
    )


def spread_update(update: Tensor, active: Tensor) -> Tensor:
    """Return an update of the active coordinates as one of all coordinates, zero elsewhere.

    `active` is a boolean vector over all coordinates.
    """
    full = torch.zeros(len(active))
    full[active] = update
    return full


def describe_clients(answers: Answers, collected: Collected, weights: Tensor, advanced: Advanced) -> dict[str, Any]:
    """Return a round's record by client: loss, update norm, distance and cosine to the combined update, weight.

    Alignment scores are added where clients report them. It goes into metrics.jsonl. `weights` are the aggregation
    weights (clients,), of any sum.
    """
    shares = weights / weights.sum()
    drift = drift_report(answers.updates, advanced.update[: len(answers.updates[0])])
    losses = [float(item.response.metrics.get("loss", float("nan"))) for item in collected.accepted]
    record: dict[str, Any] = {
        "train_loss": weighted(shares, losses),
        "clients": {
            "ids": list(answers.clients),
            "loss": losses,
            "norm": [item.norm for item in collected.accepted],
            "drift": drift.drifts.tolist(),
            "cosine": drift.cosines.tolist(),
            "weight": shares.tolist(),
        },
    }
    for name in ("nonfinite", "retried"):  # steps of mixed precision or of a loss that went astray
        numbers = [float(item.response.metrics.get(name, 0.0)) for item in collected.accepted]
        if any(numbers):
            record["clients"][name] = numbers
    alignment = {}
    for name in answers.scalars[0]:
        if name.startswith("alignment:"):
            layer = name.partition(":")[2]
            alignment[layer] = [scalars[name] for scalars in answers.scalars]
    if alignment:
        record["alignment"] = alignment
    return record


def relative_drift(clients: Mapping[str, list[float]]) -> float:
    """Return the mean over clients of drift / norm: an update's distance to the combined one, by its own length.

    `clients` is the table of `describe_clients`. Clients with an update of zero are left out.
    """
    ratios = []
    for drift, norm in zip(clients["drift"], clients["norm"], strict=True):
        if norm > 0:
            ratios.append(drift / norm)
    return sum(ratios) / len(ratios) if ratios else 0.0


def response_bytes(arrival: Arrival) -> int:
    """Return the bytes of one arrival on the wire.

    0 for a sentence and for a malformed object, which have no wire form.
    """
    message = arrival[1] if isinstance(arrival, tuple) else arrival
    if isinstance(message, bytes | bytearray):
        return len(message)
    if not isinstance(message, Response):
        return 0
    try:
        return wire_size(message)
    except (AttributeError, KeyError, TypeError):  # a malformed object has no wire form; validation has dropped it
        return 0
