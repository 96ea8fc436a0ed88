"""Buffered rounds (FedBuff): the server steps whenever enough answers are there, whoever gave them.

Every model has a cohort, drawn as in synchronous rounds. Its members that are idle begin with it at once; one that is
busy with an older model answers that first, and begins with the model of the next step whose cohort it is in. So a
client works on one request at a time, trains each model at most once, and has at most one answer in a buffer. With
equal speeds and a buffer as large as the cohort this is the synchronous round, bit for bit.

Who is done first: in a simulation the virtual clock says so (`Federation.durations`); with clients on other machines
their arrival does (`FirstAnswers`). Either way the record of the round lists the arrivals, and `ServerContext.arrivals`
repeats a recorded run.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Protocol, runtime_checkable

from fedgraft.aggregate.buffering import BufferedRounds
from fedgraft.algorithms.algorithm import Algorithm
from fedgraft.core.messages import Request, wire_size
from fedgraft.core.state import Federation, InFlight, ServerState
from fedgraft.server import sample as server
from fedgraft.server.collect import (
    Arrival,
    Collected,
    Engine,
    ServerContext,
    collected_sum,
    read_updates,
    response_bytes,
)
from fedgraft.server.secure_sum import SecureRound, secure_sum
from fedgraft.server.validate import Expectation, validate_responses

AHEAD = "train_ahead"
"""The client action that trains and keeps the update for a secure sum."""
HELD_SUM = "held_update"
"""The client action whose answers are these updates, inside a secure sum."""


@runtime_checkable
class FirstAnswers(Protocol):
    """An engine of clients that answer when they are done; the server does not wait for all of them."""

    def exchange_first(self, requests: Sequence[Request], count: int) -> Sequence[tuple[int, bytes | str]]:
        """Return what arrived, in order of arrival, once `count` clients have answered or nobody is left to answer.

        `requests` are all requests that are not answered yet. Those that are under way are not sent again.
        """
        ...


@dataclass(frozen=True)
class Delivery:
    """What came of the requests under way: who is done, in order of arrival, and their answers."""

    requests: Sequence[Request]
    """Of the clients that are done, in order of arrival."""
    arrivals: Sequence[Arrival]

    @property
    def clients(self) -> list[int]:
        """The clients that are done, in order of arrival."""
        return [request.client for request in self.requests]


def start_idle_clients(federation: Federation, state: ServerState) -> ServerState:
    """Return the state in which the idle clients of the coming round's cohort are at work on the present model.

    Clients that have left the federation, or are excluded from it, are at work on nothing.
    """
    in_flight = {}
    for client, work in state.in_flight.items():
        if client not in federation.without and federation.takes_part(client, state.round + 1):
            in_flight[client] = work
    for client in server.sample(federation, state.round):
        if client not in in_flight:
            due = state.clock + federation.duration(client)
            in_flight[client] = InFlight(state.round, state.vector, len(state.losses), due)
    return replace(state, in_flight=in_flight)


def requests_under_way(
    algorithm: Algorithm, federation: Federation, state: ServerState, context: ServerContext
) -> dict[int, Request]:
    """Return the training request that each busy client works on, by client, as it was when the client began."""
    clients_by_version: dict[int, list[int]] = {}
    for client, work in sorted(state.in_flight.items()):
        clients_by_version.setdefault(work.version, []).append(client)
    requests = {}
    for clients in clients_by_version.values():
        work = state.in_flight[clients[0]]
        earlier = replace(state, round=work.version, vector=work.vector, losses=state.losses[: work.losses])
        instructed = server.instruct(
            algorithm, federation, earlier, clients, context.space, context.origin, context.rate_factor
        )
        for request in instructed:
            if algorithm.privacy.collects_sum:
                request = replace(request, action=AHEAD)
            requests[request.client] = request
    return requests


def collect_buffer(
    algorithm: Algorithm, federation: Federation, state: ServerState, engine: Engine, context: ServerContext
) -> tuple[Collected, ServerState, list[tuple[int, int]]]:
    """Wait until the buffer is full and return its content, validated, and the state before the step.

    The state has the clients of the buffer idle and the clock at the last arrival. The third is the order of arrival:
    (client, round whose model it began with). Updates are discounted by their staleness.
    """
    rounds = algorithm.rounds
    assert isinstance(rounds, BufferedRounds)
    requests = requests_under_way(algorithm, federation, state, context)
    if context.arrivals is not None:
        recorded = [(client, used) for client, used in context.arrivals(state.round) if client in requests]
        answered = _ask(engine, [requests[client] for client, used in recorded if used])
        delivery = Delivery([requests[client] for client, _ in recorded], answered.arrivals)
    elif isinstance(engine, FirstAnswers):
        delivery = _first_answers(engine, requests, rounds.size)
    else:
        done = sorted(requests, key=lambda client: (state.in_flight[client].due, client))[: rounds.size]
        delivery = _ask(engine, [requests[client] for client in done])
    order = [(client, state.in_flight[client].version) for client in delivery.clients]
    if algorithm.privacy.collects_sum:
        collected = _sum_held_updates(algorithm, federation, state, engine, context, delivery)
    else:
        collected = read_updates(algorithm, federation, state, delivery.requests, delivery.arrivals, context)
    clock = max([state.clock, *(state.in_flight[client].due for client in delivery.clients)])
    still_busy = {client: work for client, work in state.in_flight.items() if client not in delivery.clients}
    return collected, replace(state, in_flight=still_busy, clock=clock), order


def _ask(engine: Engine, requests: Sequence[Request]) -> Delivery:
    """Return the answers to these requests, all of which are carried out now; `requests` are in order of arrival."""
    arrivals: list[Arrival] = []
    if requests:
        arrivals = list(engine.exchange(sorted(requests, key=lambda request: request.client)))
    return Delivery(requests, arrivals)


def _first_answers(engine: FirstAnswers, requests: dict[int, Request], count: int) -> Delivery:
    """Return the first `count` answers of clients on other machines, and every failure that came before them."""
    arrivals = list(engine.exchange_first(list(requests.values()), count))
    return Delivery([requests[client] for client, _ in arrivals], arrivals)


def _sum_held_updates(
    algorithm: Algorithm,
    federation: Federation,
    state: ServerState,
    engine: Engine,
    context: ServerContext,
    delivery: Delivery,
) -> Collected:
    """Return the secure sum over the clients that have trained, whose updates they still hold."""
    expected = Expectation(
        run=federation.run,
        round=state.round,
        clients=frozenset(delivery.clients),
        rounds={request.client: request.round for request in delivery.requests},
        space=context.space,
        max_examples=0,
        metrics={},
    )
    trained, rejections = validate_responses(delivery.arrivals, expected)
    sum_requests = []
    for item in trained:
        client = item.response.client
        settings = {"buffer": state.round}
        sum_requests.append(Request(federation.run, state.round, client, HELD_SUM, context.space, settings=settings))
    outcome = SecureRound()
    if sum_requests:
        outcome = secure_sum(
            algorithm,
            federation,
            sum_requests,
            engine.exchange,
            context.length,
            context.trained,
            context.example_counts,
            HELD_SUM,
        )
    collected = collected_sum(algorithm, outcome, context)
    return replace(
        collected,
        rejections=(*rejections, *collected.rejections),
        bytes_up=collected.bytes_up + sum(response_bytes(arrival) for arrival in delivery.arrivals),
        bytes_down=collected.bytes_down + sum(wire_size(request) for request in delivery.requests),
    )
