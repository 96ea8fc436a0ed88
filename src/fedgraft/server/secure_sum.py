"""Sums whose summands the server never sees: the stages of the secure sum as orders and replies of an engine.

A round's updates, the statistics of head initialisation and the scores of a mask all go this way. The server keeps the
sum over those who stay. `Sums` asks for sums outside the rounds, hidden or in the clear.
"""

from __future__ import annotations

import logging
import re
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, Protocol

import torch
from torch import Tensor

from fedgraft.algorithms.algorithm import Algorithm, secure_segments
from fedgraft.core.errors import FedgraftError
from fedgraft.core.messages import HEADER_BYTES, BadMessage, Request, Response, Scalar, unpack, wire_size
from fedgraft.core.protocols import Network
from fedgraft.core.state import Federation
from fedgraft.privacy.protection import Privacy
from fedgraft.privacy.secagg.binding import request_digest
from fedgraft.privacy.secagg.keys import OF
from fedgraft.privacy.secagg.plan import Data
from fedgraft.privacy.secagg.ring import Segment, Summand, segments_of
from fedgraft.privacy.secagg.secure_sum import (
    Plan,
    SecureAbort,
    SecureServer,
    SumResult,
    cut_by,
    drive,
    series,
    weighted_mean,
)
from fedgraft.privacy.secagg.server import Outbox
from fedgraft.server.example_counts import ExampleCounts
from fedgraft.server.validate import Accepted, Expectation, Field, Rejection, validate_responses

log = logging.getLogger("fedgraft")

Exchange = Callable[[Sequence[Request]], Iterable[object]]
ANSWERS: Mapping[str, set[str]] = {
    "keys": {"advert", "drawn"},
    "shares": {"boxes", "commitment"},
    "masked": {"masked"},
    "consistency": {"signature"},
    "unmask": {"shares"},
}
"""The tensors of a reply by stage. No two are alike, so an answer to an earlier stage is not taken for one to this."""
_CONTINUED = 8  # clients asked at once where the sum is kept as it grows
_SENDER = re.compile(rf"\bshare box {OF}(\d+)\b")
_GROUP, _HELD = 4, 1 << 30  # clients asked at once where all answers together would be over so many bytes


@dataclass
class HiddenSum:
    """What a secure round gives: the mean update, sums and scalars of the survivors; and what it cost."""

    update: Tensor | None = None
    sums: Mapping[str, Tensor] = field(default_factory=dict)
    scalars: Mapping[str, float] = field(default_factory=dict)
    survivors: tuple[int, ...] = ()
    lost: Mapping[int, str] = field(default_factory=dict)
    """Who is not in it, or fell silent, and how."""
    bytes_up: int = 0
    bytes_down: int = 0
    asked: bool = False
    cut: int = 0
    """How many clients had to cut numbers that the sum cannot hold."""


class SecureSession:
    """Carries the stages of one secure sum over an engine, and counts the bytes."""

    def __init__(
        self,
        privacy: Privacy,
        requests: Sequence[Request],
        exchange: Exchange,
        example_counts: ExampleCounts | None = None,
    ) -> None:
        self.privacy, self.exchange, self.example_counts = privacy, exchange, example_counts or ExampleCounts()
        self.requests = {
            request.client: request for request in requests if request.client not in self.example_counts.barred
        }
        self.lost: dict[int, str] = {k: why for k, why in self.example_counts.barred.items() if k not in self.requests}
        self.said: dict[int, str] = {}
        """What clients say that do not answer a stage."""
        self.up = self.down = 0

    def total(self, segments: tuple[Segment, ...]) -> SumResult:
        """The sum of what the orders ask for; raises `SecureAbort` when too few clients are left."""
        first, clients = next(iter(self.requests.values())), tuple(sorted(self.requests))
        degree = self.privacy.sum_options.degree_among(len(clients))
        name = series(first.run, str(first.settings["sums"]))
        in_rounds = first.settings["sums"] == "train"
        room = self.privacy.sum_capacity() if in_rounds else None
        threshold, bound = self.privacy.sum_options.threshold, request_digest(first)
        plan = Plan(name, first.round, clients, segments, degree, threshold, room, bound)
        server = SecureServer(plan, self.example_counts.identities)
        try:
            return drive(server, partial(self._ask, server))
        finally:
            found = {k: server.rejections.get(k) or self.said.get(k, "") for k in server.lost}
            self.lost |= {
                k: f"lost at stage {stage!r} of the secure sum" + (f": {found[k]}" if found[k] else "")
                for k, stage in server.lost.items()
            }
            self._bar(server.shared)

    def _bar(self, peers: Sequence[int]) -> None:
        """Whoever sent boxes that most peers could not open spoiled this sum, and is in no other one."""
        told = Counter(int(found[1]) for said in self.said.values() if (found := _SENDER.search(said)))
        for client, count in told.items():
            if client in peers and 2 * count > len(peers) - 1:
                self.example_counts.barred[client] = (
                    f"{count} of {len(peers) - 1} peers could not open what it sent them"
                )
                log.warning("client %d is in no further secure sum: %s", client, self.example_counts.barred[client])

    def _ask(self, server: SecureServer, stage: str, outbox: Outbox) -> Iterator[tuple[int, Data]]:
        """The first answer of each client to this stage, as they come."""
        asked = [stage_request(self.requests[k], stage, data) for k, data in sorted(outbox.items())]
        self.down += sum(map(wire_size, asked))
        size, seen = server.largest(stage), set[int]()
        group = max(_GROUP, _HELD // size)  # an engine may hold all answers until the last is there
        for begin in range(0, len(asked), group):
            for arrival in self.exchange(asked[begin : begin + group]):
                response = self._read(stage, arrival, size + HEADER_BYTES)
                if response is not None and response.client in outbox and response.client not in seen:
                    seen.add(response.client)
                    self.up += wire_size(response)
                    yield response.client, dict(response.evidence)

    def _read(self, stage: str, arrival: object, limit: int) -> Response | None:
        """An arrival as an answer to this stage of this sum; None for what is late, foreign, or not even a message."""
        sender, response = arrival if isinstance(arrival, tuple) else (None, arrival)
        if isinstance(response, str) and sender is not None:
            self.said[sender] = response
        if isinstance(response, bytes | bytearray):
            try:
                response = unpack(Response, response, limit)
            except BadMessage:
                return None
        request = (
            self.requests.get(response.client)
            if isinstance(response, Response) and type(response.client) is int
            else None
        )
        if request is None or (sender is not None and sender != request.client):
            return None
        same = (response.run, response.round, response.space) == (request.run, request.round, request.space)
        return response if same and set(response.evidence) == ANSWERS[stage] else None


def stage_request(request: Request, stage: str, data: Data) -> Request:
    """An order as one stage of a secure sum; the model travels only when it is time to work on it."""
    own = dict(request.auxiliary) if stage == "masked" else {}
    tensors: dict[str, Tensor] = {("plan" if key == "plan" else f"data:{key}"): t for key, t in data.items()}
    vector = request.vector if stage == "masked" else None
    return replace(request, action=f"secure.{stage}", vector=vector, auxiliary={**own, **tensors})


def secure_sum(
    algorithm: Algorithm,
    federation: Federation,
    requests: Sequence[Request],
    exchange: Exchange,
    length: int,
    trained: int,
    example_counts: ExampleCounts | None = None,
) -> HiddenSum:
    """Carry the training orders through the five stages; a round with too few clients gives no update."""
    told: dict[str, Scalar] = {"sums": "train", "largest": federation.largest}
    asked = [replace(request, settings={**request.settings, **told}) for request in requests]
    session = SecureSession(algorithm.privacy, asked, exchange, example_counts)
    if len(session.requests) < 2:  # one client cannot hide in a sum of its own, so it is not asked
        return HiddenSum(lost=session.lost)
    try:
        result = session.total(secure_segments(algorithm, length, trained, asked[0].settings))
        update, sums, scalars = weighted_mean(result)
    except SecureAbort as error:
        log.warning("round %d: the secure sum was aborted, nothing of it is used: %s", requests[0].round, error)
        return HiddenSum(lost=session.lost, bytes_up=session.up, bytes_down=session.down, asked=True)
    cut = cut_by(result)
    if cut:
        log.warning(
            "round %d: %d of %d clients had numbers beyond what the secure sum holds, which were cut, so this is not "
            "the mean of the updates; raise privacy.limit (now %g) or lower local.lr.",
            requests[0].round + 1,
            cut,
            len(result.survivors),
            algorithm.privacy.sum_options.limit,
        )
    return HiddenSum(update, sums, scalars, result.survivors, session.lost, session.up, session.down, True, cut)


class Begun(Protocol):
    """Where a long sum is kept while it grows, so that it goes on after a stop."""

    def load(self) -> tuple[int, dict[str, Tensor]]:
        """How many clients are in, and the sums over them; (0, {}) at the start."""
        ...

    def save(self, count: int, sums: Mapping[str, Tensor]) -> None:
        """The sums over the first so many clients."""
        ...


class SummedAction(Protocol):
    """What the server needs to know of a client action whose answers are added up."""

    @property
    def name(self) -> str: ...
    @property
    def summands(self) -> Callable[[Network, Mapping[str, Scalar]], Mapping[str, Summand]]:
        """Shape, type and range of each named sum."""
        ...

    @property
    def implausible(self) -> Callable[[Response], str]:
        """Say what cannot be true of an answer; empty: nothing."""
        ...


class Sums:
    """Asks all clients for sums outside the rounds: through the secure sum where the run has one, else in the clear.

    A client that does not answer, or answers nonsense, is named, left out of this sum, and not asked again.
    """

    def __init__(
        self, exchange: Exchange, run: str, clients: Iterable[int], network: Network, privacy: Privacy
    ) -> None:
        self.exchange = exchange
        self.run = run
        self.network = network
        self.privacy = privacy
        self.clients = tuple(clients)
        self.example_counts: ExampleCounts | None = None
        self.lost: dict[int, str] = {}
        self.sums_requested = 0
        self.up = 0
        self.down = 0

    def ask(
        self,
        action: SummedAction,
        vector: Tensor | None = None,
        settings: Mapping[str, Scalar] | None = None,
        begun: Begun | None = None,
        **auxiliary: Tensor,
    ) -> dict[str, Tensor]:
        """Return the answers of all clients to this action, added up by name, float64.

        `begun` lets a sum in the clear go on where an earlier process stopped.
        """
        requested = dict(settings or {})
        number = -1
        space = ""
        if self.privacy.collects_sum:
            # Sums outside the rounds are counted where they are hidden: clients serve each number once.
            requested["sums"] = action.name
            number = self.sums_requested
            space = action.name
        requests = []
        for client in self.clients:
            requests.append(Request(self.run, number, client, action.name, space, vector, auxiliary, requested))
        self.sums_requested += 1
        if self.privacy.collects_sum:
            total, lost = self._sum_hidden(action, requests)
        else:
            total, lost = self._sum_in_the_clear(action, requests, begun)
        self._leave_out(action, lost)
        return total

    def _sum_hidden(
        self, action: SummedAction, requests: Sequence[Request]
    ) -> tuple[dict[str, Tensor], dict[int, str]]:
        """Return the secure sum by name, and who is not in it with the reason."""
        if len(requests) < 2:
            raise FedgraftError(
                f"a secure sum of {action.name} needs at least two clients, and {len(requests)} is there."
            )
        summands = action.summands(self.network, requests[0].settings)
        session = SecureSession(self.privacy, requests, self.exchange, self.example_counts)
        try:
            result = session.total(segments_of(summands))
        except SecureAbort as error:
            raise FedgraftError(
                f"the secure sum of {action.name} was aborted and nothing was revealed: {error}"
            ) from error
        self.up += session.up
        self.down += session.down
        sums = {name: result.sums[name].view(summand.shape) for name, summand in summands.items()}
        # Whoever fell silent after its summand was in stays in the sum, and may be there again next time.
        lost = {client: reason for client, reason in session.lost.items() if client not in result.survivors}
        return sums, lost

    def _sum_in_the_clear(
        self, action: SummedAction, requests: Sequence[Request], begun: Begun | None
    ) -> tuple[dict[str, Tensor], dict[int, str]]:
        """Return the sum by name, and who is not in it with the reason."""
        fields = self._fields(action, requests)
        total: dict[str, Tensor] = {}
        answered: set[int] = set()
        reasons: dict[int, str] = {}
        answer_bytes = Expectation(self.run, -1, frozenset(), sums=fields).limit
        group = max(_GROUP, _HELD // max(1, answer_bytes))
        first = 0
        if begun is not None and all(f.dtype == torch.float32 for f in fields.values()):  # added one by one
            first, total = begun.load()
            group = min(group, _CONTINUED)
            answered = {request.client for request in requests[:first]}
        for begin in range(first, len(requests), group):
            asked = requests[begin : begin + group]
            accepted, rejections = self._exchange(action, asked, fields)
            if accepted:
                for name in fields:
                    total[name] = _added([a.response.sums[name] for a in accepted], total.get(name))
            answered |= {a.response.client for a in accepted}
            reasons |= {rejection.client: rejection.reason for rejection in rejections}
            if begun is not None and len(answered) == begin + len(asked):  # nobody is missing so far
                begun.save(len(answered), total)
        if not answered:
            raise FedgraftError(_nobody_answered(action, reasons, "sum"))
        lost = {}
        for client in self.clients:
            if client not in answered:
                lost[client] = reasons.get(client, "did not answer")
        return total, lost

    def each(self, action: SummedAction) -> list[Response]:
        """Return every client's own answer in the clear, in client order; who lies or is silent is left out."""
        requests = [Request(self.run, -1, client, action.name) for client in self.clients]
        accepted, rejections = self._exchange(action, requests, self._fields(action, requests))
        reasons = {rejection.client: rejection.reason for rejection in rejections}
        self._leave_out(action, reasons)
        if not accepted:
            raise FedgraftError(_nobody_answered(action, reasons, "make a head from"))
        return [item.response for item in accepted]

    def _fields(self, action: SummedAction, requests: Sequence[Request]) -> dict[str, Field]:
        """Return what each tensor of an answer must look like."""
        fields: dict[str, Field] = {}
        if requests:
            for name, summand in action.summands(self.network, requests[0].settings).items():
                fields[name] = Field(summand.shape, summand.dtype, summand.limit)
        return fields

    def _exchange(
        self, action: SummedAction, asked: Sequence[Request], fields: Mapping[str, Field]
    ) -> tuple[list[Accepted], list[Rejection]]:
        """Send the requests and validate what comes back."""
        clients = frozenset(request.client for request in asked)
        expected = Expectation(
            self.run, -1, clients, sums=fields, example_counts=self.example_counts, check=action.implausible
        )
        arrivals: Iterable[Any] = self.exchange(asked)
        accepted, rejections = validate_responses(arrivals, expected)
        self.down += sum(wire_size(request) for request in asked)
        self.up += sum(wire_size(item.response) for item in accepted)
        return accepted, rejections

    def _leave_out(self, action: SummedAction, lost: Mapping[int, str]) -> None:
        for client, reason in lost.items():
            log.warning("client %d is left out of the sums of %s: %s", client, action.name, reason)
        self.lost |= lost
        self.clients = tuple(client for client in self.clients if client not in lost)


def _nobody_answered(action: SummedAction, reasons: Mapping[int, str], purpose: str) -> str:
    """Return the sentence for a sum that nobody is in, with the first reason that a client was left out for."""
    sentence = f"no client answered the request {action.name!r}, so there is nothing to {purpose}"
    if not reasons:
        return f"{sentence}."
    client, reason = next(iter(reasons.items()))
    return f"{sentence}; client {client}: {reason}."


def _added(parts: Sequence[Tensor], before: Tensor | None) -> Tensor:
    """Return the sum in client order, float64. Long float32 vectors are added one by one: a stack would double them."""
    if parts[0].dtype == torch.float64:
        total = torch.stack(list(parts)).sum(0)
        return total if before is None else before + total
    if before is None:
        total = parts[0].double()
        remaining = parts[1:]
    else:
        total = before
        remaining = parts
    for part in remaining:
        total.add_(part)
    return total
