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
from fedgraft.client.secure import binding
from fedgraft.client.sums import sum_segments, summands, sums_lie
from fedgraft.core.errors import FedgraftError
from fedgraft.core.messages import HEADER_BYTES, BadMessage, Order, Reply, Scalar, unpack, wire_size
from fedgraft.core.protocols import Network
from fedgraft.core.state import Federation
from fedgraft.privacy.protection import Protection
from fedgraft.privacy.secagg.keys import OF
from fedgraft.privacy.secagg.plan import Data
from fedgraft.privacy.secagg.ring import Segment
from fedgraft.privacy.secagg.secure_sum import Plan, SecureAbort, SecureServer, SumResult, drive, series, weighted_mean
from fedgraft.privacy.secagg.server import Outbox
from fedgraft.server.example_counts import Claims
from fedgraft.server.validate import Accepted, Expectation, Field, Rejection, validate_replies

log = logging.getLogger("fedgraft")

Exchange = Callable[[Sequence[Order]], Iterable[object]]
ANSWERS: Mapping[str, set[str]] = {
    "keys": {"advert", "drawn"}, "shares": {"boxes", "commitment"}, "masked": {"masked"}, "consistency": {"signature"},
    "unmask": {"shares"},
}  # fmt: skip
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


class SecureSession:
    """Carries the stages of one secure sum over an engine, and counts the bytes."""

    def __init__(
        self, privacy: Protection, orders: Sequence[Order], exchange: Exchange, claims: Claims | None = None
    ) -> None:
        self.privacy, self.exchange, self.claims = privacy, exchange, claims or Claims()
        self.orders = {order.client: order for order in orders if order.client not in self.claims.barred}
        self.lost: dict[int, str] = {k: why for k, why in self.claims.barred.items() if k not in self.orders}
        self.said: dict[int, str] = {}
        """What clients say that do not answer a stage."""
        self.up = self.down = 0

    def total(self, segments: tuple[Segment, ...]) -> SumResult:
        """The sum of what the orders ask for; raises `SecureAbort` when too few clients are left."""
        first, clients = next(iter(self.orders.values())), tuple(sorted(self.orders))
        degree = self.privacy.degree
        degree = None if degree is None or degree >= len(clients) - 1 else degree
        name = series(first.run, str(first.settings["sums"]))
        # Under privacy the step must not depend on who was sampled, or one client would move everybody's rounding.
        private = self.privacy.dp if first.settings["sums"] == "train" else None
        room = private.mechanism.population if private else None
        threshold, bound = self.privacy.threshold, binding(first)
        plan = Plan(name, first.round, clients, segments, degree, threshold, room, bound)
        server = SecureServer(plan, self.claims.identities)
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
                self.claims.barred[client] = f"{count} of {len(peers) - 1} peers could not open what it sent them"
                log.warning("client %d is in no further secure sum: %s", client, self.claims.barred[client])

    def _ask(self, server: SecureServer, stage: str, outbox: Outbox) -> Iterator[tuple[int, Data]]:
        """The first answer of each client to this stage, as they come."""
        asked = [stage_order(self.orders[k], stage, data) for k, data in sorted(outbox.items())]
        self.down += sum(map(wire_size, asked))
        size, seen = server.largest(stage), set[int]()
        group = max(_GROUP, _HELD // size)  # an engine may hold all answers until the last is there
        for begin in range(0, len(asked), group):
            for arrival in self.exchange(asked[begin : begin + group]):
                reply = self._read(stage, arrival, size + HEADER_BYTES)
                if reply is not None and reply.client in outbox and reply.client not in seen:
                    seen.add(reply.client)
                    self.up += wire_size(reply)
                    yield reply.client, dict(reply.evidence)

    def _read(self, stage: str, arrival: object, limit: int) -> Reply | None:
        """An arrival as an answer to this stage of this sum; None for what is late, foreign, or not even a message."""
        sender, reply = arrival if isinstance(arrival, tuple) else (None, arrival)
        if isinstance(reply, str) and sender is not None:
            self.said[sender] = reply
        if isinstance(reply, bytes | bytearray):
            try:
                reply = unpack(Reply, reply, limit)
            except BadMessage:
                return None
        order = self.orders.get(reply.client) if isinstance(reply, Reply) and type(reply.client) is int else None
        if order is None or (sender is not None and sender != order.client):
            return None
        same = (reply.run, reply.round, reply.space) == (order.run, order.round, order.space)
        return reply if same and set(reply.evidence) == ANSWERS[stage] else None


def stage_order(order: Order, stage: str, data: Data) -> Order:
    """An order as one stage of a secure sum; the model travels only when it is time to work on it."""
    own = dict(order.auxiliary) if stage == "masked" else {}
    tensors: dict[str, Tensor] = {("plan" if key == "plan" else f"data:{key}"): t for key, t in data.items()}
    vector = order.vector if stage == "masked" else None
    return replace(order, action=f"secure.{stage}", vector=vector, auxiliary={**own, **tensors})


def secure_sum(
    algorithm: Algorithm, federation: Federation, orders: Sequence[Order], exchange: Exchange, length: int,
    trained: int, claims: Claims | None = None,
) -> HiddenSum:  # fmt: skip
    """Carry the training orders through the five stages; a round with too few clients gives no update."""
    told: dict[str, Scalar] = {"sums": "train", "largest": federation.largest}
    asked = [replace(order, settings={**order.settings, **told}) for order in orders]
    session = SecureSession(algorithm.privacy, asked, exchange, claims)
    if len(session.orders) < 2:  # one client cannot hide in a sum of its own, so it is not asked
        return HiddenSum(lost=session.lost)
    try:
        result = session.total(secure_segments(algorithm, length, trained))
        update, sums, scalars = weighted_mean(result)
    except SecureAbort as error:
        log.warning("round %d: the secure sum was aborted, nothing of it is used: %s", orders[0].round, error)
        return HiddenSum(lost=session.lost, bytes_up=session.up, bytes_down=session.down, asked=True)
    return HiddenSum(update, sums, scalars, result.survivors, session.lost, session.up, session.down, True)


class Begun(Protocol):
    """Where a long sum is kept while it grows, so that it goes on after a stop."""

    def load(self) -> tuple[int, dict[str, Tensor]]:
        """How many clients are in, and the sums over them; (0, {}) at the start."""
        ...

    def save(self, count: int, sums: Mapping[str, Tensor]) -> None:
        """The sums over the first so many clients."""
        ...


class Sums:
    """Asks all clients for sums outside the rounds: through the secure sum where the run has one, else in the clear.

    A client that does not answer, or answers nonsense, is named, left out of this sum, and not asked again.
    """

    def __init__(self, exchange: Exchange, run: str, clients: Iterable[int], network: Network, privacy: Protection):
        self.exchange, self.run, self.network, self.privacy = exchange, run, network, privacy
        self.clients = tuple(clients)
        self.claims: Claims | None = None
        self.lost: dict[int, str] = {}
        self.asked = self.up = self.down = 0

    def ask(
        self,
        action: str,
        vector: Tensor | None = None,
        settings: Mapping[str, Scalar] | None = None,
        begun: Begun | None = None,
        **auxiliary: Tensor,
    ) -> dict[str, Tensor]:
        """The answers of all clients to this action, added up by name; float64. A sum in the clear may be begun."""
        hidden = self.privacy.hidden
        told: dict[str, Scalar] = {**(settings or {}), **({"sums": action} if hidden else {})}
        # Sums outside the rounds are counted where they are hidden: clients serve each number once.
        number, space = (self.asked, action) if hidden else (-1, "")
        orders = [Order(self.run, number, k, action, space, vector, auxiliary, told) for k in self.clients]
        self.asked += 1
        total, lost = self._hidden(action, orders) if hidden else self._clear(action, orders, begun)
        self._leave_out(action, lost)
        return total

    def _hidden(self, action: str, orders: Sequence[Order]) -> tuple[dict[str, Tensor], dict[int, str]]:
        if len(orders) < 2:
            raise FedgraftError(f"a secure sum of {action} needs at least two clients, and {len(orders)} is there.")
        session = SecureSession(self.privacy, orders, self.exchange, self.claims)
        try:
            result = session.total(sum_segments(action, self.network, orders[0].settings))
            self.up, self.down = self.up + session.up, self.down + session.down
        except SecureAbort as error:
            raise FedgraftError(f"the secure sum of {action} was aborted and nothing was revealed: {error}") from error
        shapes = {name: s.shape for name, s in summands(action, self.network, orders[0].settings).items()}
        # Whoever fell silent after its summand was in stays in the sum, and may be there again next time.
        lost = {k: why for k, why in session.lost.items() if k not in result.survivors}
        return {name: result.sums[name].view(shape) for name, shape in shapes.items()}, lost

    def _clear(
        self, action: str, orders: Sequence[Order], begun: Begun | None
    ) -> tuple[dict[str, Tensor], dict[int, str]]:
        fields = self._fields(action, orders)
        total, there, reasons = dict[str, Tensor](), set[int](), dict[int, str]()
        group = max(_GROUP, _HELD // max(1, Expectation(self.run, -1, frozenset(), sums=fields).limit))
        first = 0
        if begun is not None and all(f.dtype == torch.float32 for f in fields.values()):  # added one by one
            (first, total), group = begun.load(), min(group, _CONTINUED)
            there = {order.client for order in orders[:first]}
        for begin in range(first, len(orders), group):
            asked = orders[begin : begin + group]
            accepted, rejections = self._validated(action, asked, fields)
            for name in fields if accepted else ():
                total[name] = _added([a.reply.sums[name] for a in accepted], total.get(name))
            there |= {a.reply.client for a in accepted}
            reasons |= {o.client: o.reason for o in rejections}
            if begun is not None and len(there) == begin + len(asked):  # nobody is missing so far
                begun.save(len(there), total)
        if not there:
            raise FedgraftError(f"no client answered the order {action!r}, so there is nothing to sum.")
        return total, {k: reasons.get(k, "did not answer") for k in self.clients if k not in there}

    def each(self, action: str) -> list[Reply]:
        """Every client's own answer in the clear, in client order; who lies or is silent is named and left out."""
        orders = [Order(self.run, -1, k, action) for k in self.clients]
        accepted, rejections = self._validated(action, orders, self._fields(action, orders))
        self._leave_out(action, {r.client: r.reason for r in rejections})
        if not accepted:
            raise FedgraftError(f"no client answered the order {action!r}, so there is nothing to make a head from.")
        return [one.reply for one in accepted]

    def _fields(self, action: str, orders: Sequence[Order]) -> dict[str, Field]:
        wanted = summands(action, self.network, orders[0].settings) if orders else {}
        return {name: Field(s.shape, s.dtype, s.limit) for name, s in wanted.items()}

    def _validated(
        self, action: str, asked: Sequence[Order], fields: Mapping[str, Field]
    ) -> tuple[list[Accepted], list[Rejection]]:
        clients, lie = frozenset(order.client for order in asked), partial(sums_lie, action)
        expected = Expectation(self.run, -1, clients, sums=fields, claims=self.claims, check=lie)
        arrivals: Iterable[Any] = self.exchange(asked)
        accepted, rejections = validate_replies(arrivals, expected)
        self.down += sum(map(wire_size, asked))
        self.up += sum(wire_size(one.reply) for one in accepted)
        return accepted, rejections

    def _leave_out(self, action: str, lost: Mapping[int, str]) -> None:
        for client, reason in lost.items():
            log.warning("client %d is left out of the sums of %s: %s", client, action, reason)
        self.lost |= lost
        self.clients = tuple(k for k in self.clients if k not in lost)


def _added(parts: Sequence[Tensor], before: Tensor | None) -> Tensor:
    """The sum in client order, float64. Long float32 vectors are added one by one: a stack would double them all."""
    if parts[0].dtype == torch.float64:
        total = torch.stack(list(parts)).sum(0)
        return total if before is None else before + total
    total, rest = (parts[0].double(), parts[1:]) if before is None else (before, parts)
    for part in rest:
        total.add_(part)
    return total
