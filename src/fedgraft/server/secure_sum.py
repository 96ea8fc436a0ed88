"""Secure sums over an engine: each stage of the protocol as requests and responses.

A round's updates, the statistics of head initialisation and the scores of a mask all go this way; the server learns the
sum over the survivors. `Sums` requests sums outside the rounds, by secure aggregation or in the clear.
"""

from __future__ import annotations

import logging
import re
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
from fedgraft.privacy.protection import NOTHING_OPENED, OpenedMean, Privacy
from fedgraft.privacy.secagg.binding import request_digest
from fedgraft.privacy.secagg.client import as_rows
from fedgraft.privacy.secagg.keys import OF
from fedgraft.privacy.secagg.plan import DISPUTE, Data
from fedgraft.privacy.secagg.ring import Segment, Summand, segments_of
from fedgraft.privacy.secagg.secure_sum import (
    Plan,
    SecureAbort,
    SecureServer,
    SumResult,
    cut_by,
    drive,
    mean_of_sum,
    series,
)
from fedgraft.privacy.secagg.server import BAD_BOX, FALSE_COMPLAINT, Outbox
from fedgraft.server.example_counts import ExampleCounts
from fedgraft.server.validate import Accepted, Expectation, Field, Rejection, validate_responses

log = logging.getLogger("fedgraft")

Exchange = Callable[[Sequence[Request]], Iterable[object]]
STAGE_TENSORS: Mapping[str, set[str]] = {
    "keys": {"advert", "drawn"},
    "shares": {"boxes", "commitment"},
    "masked": {"masked"},
    "consistency": {"signature"},
    "unmask": {"shares"},
    DISPUTE: {"key"},
}
"""The tensors of a response by stage. No two are alike, so a late response is not mistaken for one to this stage."""
_RESUMABLE_GROUP = 8  # clients requested at once where the sum is stored as it grows
_GROUP = 4  # clients requested at once where all responses together would be over _HELD_BYTES
_HELD_BYTES = 1 << 30
_STRIKES = 2  # disputes of a run that a client may leave unanswered: its line may have broken
_SENDER = re.compile(rf"\bshare box {OF}(\d+)\b")  # finds, in a client's refusal, the peer it complains about


@dataclass(frozen=True)
class SecureRound:
    """The outcome of a round under secure aggregation: what was opened, who was lost, and the traffic."""

    opened: OpenedMean = NOTHING_OPENED
    lost: Mapping[int, str] = field(default_factory=dict)
    """Clients that are not in the sum, or fell silent, with the reason."""
    bytes_up: int = 0
    bytes_down: int = 0
    aborted: bool = False
    """The sum began and could not be opened."""
    cut: int = 0
    """Number of clients that had to cut numbers beyond what the sum holds."""


class SecureSession:
    """Carries one secure sum through its stages over an engine, counts the bytes and notes the lost clients.

    Args:
        requests: one per client, alike but for the client; barred clients are left out.
        exchange: sends requests and returns what arrives, as `Engine.exchange`.
        example_counts: the run's record of clients' keys and of those barred from sums; new ones are written into it.
    """

    def __init__(
        self,
        privacy: Privacy,
        requests: Sequence[Request],
        exchange: Exchange,
        example_counts: ExampleCounts | None = None,
    ) -> None:
        self.privacy = privacy
        self.exchange = exchange
        self.example_counts = example_counts or ExampleCounts()
        self.requests: dict[int, Request] = {}
        for request in requests:
            if request.client not in self.example_counts.barred:
                self.requests[request.client] = request
        self.lost: dict[int, str] = dict(self.example_counts.barred)
        self.refusals: dict[int, str] = {}
        """The reason each client gave for not answering a stage."""
        self.up = 0
        self.down = 0

    def total(self, segments: tuple[Segment, ...]) -> SumResult:
        """Return the sum over the surviving clients, laid out in `segments`; raise `SecureAbort` when too few are left.

        Sends the requests of all stages. Also after an abort `self.lost` says which clients are missing and why.
        """
        server = SecureServer(self._plan(segments), self.example_counts.identities)
        try:
            return drive(server, partial(self._exchange_stage, server))
        finally:
            for client, stage in server.lost.items():
                reason = server.rejections.get(client) or self.refusals.get(client, "")
                self.lost[client] = f"lost at stage {stage!r} of the secure sum"
                if reason:
                    self.lost[client] += f": {reason}"
            for client, reason in server.cheats.items():
                self._bar(client, reason)

    def _bar(self, client: int, reason: str) -> None:
        """Leave a client out of all further sums of the run; logged."""
        self.lost[client] = reason
        self.example_counts.barred[client] = reason
        log.warning("client %d is in no further secure sum: %s", client, reason)

    def _plan(self, segments: tuple[Segment, ...]) -> Plan:
        """Return the plan that all clients of this sum sign: participants, layout, threshold, the request's digest."""
        first = next(iter(self.requests.values()))
        action = str(first.settings["sums"])
        clients = tuple(sorted(self.requests))
        return self.privacy.plan_of_sum(
            series(first.run, action), first.round, clients, segments, action == "train", request_digest(first)
        )

    def _settle_disputes(self, server: SecureServer) -> None:
        """Find out who is right where a client says that a peer's box does not open, and bar the other one.

        The accused shows the key of that one box, and the server opens it. Who leaves two disputes of a run unanswered
        is barred too.
        """
        settled: set[int] = set()
        for accuser, refusal in sorted(self.refusals.items()):
            match = _SENDER.search(refusal)
            if match is None or accuser not in server.boxes or int(match[1]) not in server.boxes[accuser]:
                continue
            accused = int(match[1])
            if {accuser, accused} & settled:
                continue
            settled |= {accuser, accused}
            key = self._key_of_box(accuser, accused)
            if key is None:
                strikes = self.example_counts.unanswered.get(accused, 0) + 1
                self.example_counts.unanswered[accused] = strikes
                if strikes >= _STRIKES:
                    self._bar(accused, f"{BAD_BOX}: {strikes} times it did not show the key of a box in dispute")
            elif server.judge(accuser, accused, key):
                self._bar(accused, f"{BAD_BOX}: what it sent to client {accuser} does not open")
            else:
                self._bar(accuser, f"{FALSE_COMPLAINT}: what client {accused} sent it opens")

    def _key_of_box(self, accuser: int, accused: int) -> bytes | None:
        """Return the private key that the accused shows of its box for the accuser; None if it does not answer."""
        request = stage_request(self.requests[accused], DISPUTE, {"ids": torch.tensor([accuser])})
        self.down += wire_size(request)
        for arrival in self.exchange([request]):
            response = self._read(DISPUTE, arrival, HEADER_BYTES)
            if response is None or response.client != accused:
                continue
            self.up += wire_size(response)
            key = response.evidence["key"]
            if key.dtype == torch.uint8 and key.dim() == 1:
                return as_rows(key[None])[0]
            return b""
        return None

    def _exchange_stage(self, server: SecureServer, stage: str, outbox: Outbox) -> Iterator[tuple[int, Data]]:
        """Send one stage's requests and yield (client, tensors) of each client's first valid response, as they come.

        `outbox` holds by client the tensors of the protocol to send. Requests go out in groups, so that an engine that
        collects all responses before it returns does not hold more than about `_HELD_BYTES`.
        """
        requests = []
        for client, data in sorted(outbox.items()):
            requests.append(stage_request(self.requests[client], stage, data))
        self.down += sum(map(wire_size, requests))
        size = server.largest_answer(stage)
        answered: set[int] = set()
        group = max(_GROUP, _HELD_BYTES // size)  # an engine may hold all responses until the last is there
        for begin in range(0, len(requests), group):
            for arrival in self.exchange(requests[begin : begin + group]):
                response = self._read(stage, arrival, size + HEADER_BYTES)
                if response is not None and response.client in outbox and response.client not in answered:
                    answered.add(response.client)
                    self.up += wire_size(response)
                    yield response.client, dict(response.evidence)
        if stage == "masked":
            self._settle_disputes(server)

    def _read(self, stage: str, arrival: object, limit: int) -> Response | None:
        """Return an arrival as a response to this stage; None if it is late, of another run or client, or no message.

        A sentence instead of a response is noted in `self.refusals`. Bytes longer than `limit` are not parsed.
        """
        sender, response = arrival if isinstance(arrival, tuple) else (None, arrival)
        if isinstance(response, str) and sender is not None:
            self.refusals[sender] = response
        if isinstance(response, bytes | bytearray):
            try:
                response = unpack(Response, response, limit)
            except BadMessage:
                return None
        if not isinstance(response, Response) or type(response.client) is not int:
            return None
        request = self.requests.get(response.client)
        if request is None or (sender is not None and sender != request.client):
            return None
        if (response.run, response.round, response.space) != (request.run, request.round, request.space):
            return None
        if set(response.evidence) != STAGE_TENSORS[stage]:
            return None
        return response


def stage_request(request: Request, stage: str, data: Data) -> Request:
    """Return a request as one stage of a secure sum, with the protocol's tensors `data` added.

    Model and further tensors travel only at the stage "masked", when the client works on them.
    """
    auxiliary: dict[str, Tensor] = {}
    vector = None
    if stage == "masked":
        auxiliary |= request.auxiliary
        vector = request.vector
    for name, tensor in data.items():
        if name == "plan":
            auxiliary["plan"] = tensor
        else:
            auxiliary[f"data:{name}"] = tensor
    return replace(request, action=f"secure.{stage}", vector=vector, auxiliary=auxiliary)


def secure_sum(
    algorithm: Algorithm,
    federation: Federation,
    requests: Sequence[Request],
    exchange: Exchange,
    length: int,
    trained: int,
    example_counts: ExampleCounts | None = None,
    action: str = "train",
) -> SecureRound:
    """Run a training round under secure aggregation and return the mean update, the lost clients and the traffic.

    Args:
        requests: the round's training requests.
        exchange: sends requests and returns what arrives.
        length: coordinates of an update.
        trained: coordinates that train; the others are buffers.
        example_counts: the run's record of clients' keys and of those barred from sums.
        action: name of the client action that is summed.

    An aborted sum, or fewer than two clients, gives no update. Aborts and clipped numbers are logged.
    """
    sum_settings: dict[str, Scalar] = {"sums": action, "largest": federation.largest}
    sum_requests = []
    for request in requests:
        sum_requests.append(replace(request, settings={**request.settings, **sum_settings}))
    session = SecureSession(algorithm.privacy, sum_requests, exchange, example_counts)
    if len(session.requests) < 2:  # one client cannot hide in a sum of its own, so it gets no request
        return SecureRound(lost=session.lost)
    try:
        result = session.total(secure_segments(algorithm, length, trained, sum_requests[0].settings))
        update, sums, scalars = mean_of_sum(result)
    except SecureAbort as error:
        log.warning("round %d: the secure sum was aborted, nothing of it is used: %s", requests[0].round, error)
        return SecureRound(lost=session.lost, bytes_up=session.up, bytes_down=session.down, aborted=True)
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
    opened = OpenedMean(update, sums, scalars, result.survivors)
    return SecureRound(opened, session.lost, session.up, session.down, cut=cut)


class ResumableSum(Protocol):
    """Storage of a long sum in the clear while it grows, so that it continues after a stop of the process."""

    def load(self) -> tuple[int, dict[str, Tensor]]:
        """Return how many clients are in, and the sums over them; (0, {}) at the start."""
        ...

    def save(self, count: int, sums: Mapping[str, Tensor]) -> None:
        """Store the sums over the first `count` clients."""
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
        """Returns a sentence on what cannot be true of a response, or "" for a plausible one."""
        ...


class Sums:
    """Requests sums from all clients outside the rounds: by secure aggregation where the run has it, else in the clear.

    A client that does not answer, or whose answer is invalid, is logged, left out, and gets no further requests. `lost`
    holds the reasons by client, `up` and `down` the bytes.
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
        resumable: ResumableSum | None = None,
        **auxiliary: Tensor,
    ) -> dict[str, Tensor]:
        """Send one request to every client and return their named tensors added up, float64.

        Args:
            action: the client action that computes the tensors.
            vector: the model that the requests carry; None: none.
            settings: the settings that the requests carry.
            resumable: storage by which a sum in the clear continues where an earlier process stopped.
            auxiliary: further tensors that the requests carry, by name.
        """
        request_settings = dict(settings or {})
        number = -1
        space = ""
        if self.privacy.collects_sum:
            # Secure sums outside the rounds are numbered: a client takes part in each number once.
            request_settings["sums"] = action.name
            number = self.sums_requested
            space = action.name
        requests = []
        for client in self.clients:
            requests.append(Request(self.run, number, client, action.name, space, vector, auxiliary, request_settings))
        self.sums_requested += 1
        if self.privacy.collects_sum:
            total, lost = self._sum_hidden(action, requests)
        else:
            total, lost = self._sum_in_the_clear(action, requests, resumable)
        self._leave_out(action, lost)
        return total

    def _sum_hidden(
        self, action: SummedAction, requests: Sequence[Request]
    ) -> tuple[dict[str, Tensor], dict[int, str]]:
        """Return the sums by name through secure aggregation, and the clients that are not in them with the reason."""
        if len(requests) < 2:
            raise FedgraftError(
                "E-SERVER-SUM-COHORT",
                f"a secure sum of {action.name} needs at least two clients, and {len(requests)} is there",
                action=action.name,
                clients=len(requests),
            )
        summands = action.summands(self.network, requests[0].settings)
        session = SecureSession(self.privacy, requests, self.exchange, self.example_counts)
        try:
            result = session.total(segments_of(summands))
        except SecureAbort as error:
            raise FedgraftError(
                "E-SERVER-SUM-ABORTED",
                f"the secure sum of {action.name} was aborted and nothing was revealed: {error}",
                action=action.name,
                cause=error.code,
            ) from error
        self.up += session.up
        self.down += session.down
        sums = {name: result.sums[name].view(summand.shape) for name, summand in summands.items()}
        # A client that fell silent after its summand was in stays in the sum, and may be there again next time.
        lost = {client: reason for client, reason in session.lost.items() if client not in result.survivors}
        return sums, lost

    def _sum_in_the_clear(
        self, action: SummedAction, requests: Sequence[Request], resumable: ResumableSum | None
    ) -> tuple[dict[str, Tensor], dict[int, str]]:
        """Return the sums by name from responses in the clear, and the clients that are not in them with the reason.

        Responses are requested and added in groups of clients. With `resumable`, and float32 tensors only, the sum
        begins with what is stored and is stored again after each group.
        """
        fields = self._fields(action, requests)
        total: dict[str, Tensor] = {}
        answered: set[int] = set()
        reasons: dict[int, str] = {}
        answer_bytes = Expectation(self.run, -1, frozenset(), sums=fields).limit
        group = max(_GROUP, _HELD_BYTES // max(1, answer_bytes))
        first = 0
        dtypes = {tensor_field.dtype for tensor_field in fields.values()}
        if resumable is not None and dtypes <= {torch.float32}:  # which are added one by one, in the same order
            first, total = resumable.load()
            group = min(group, _RESUMABLE_GROUP)
            answered = {request.client for request in requests[:first]}
        for begin in range(first, len(requests), group):
            batch = requests[begin : begin + group]
            accepted, rejections = self._exchange(action, batch, fields)
            if accepted:
                for name in fields:
                    total[name] = _add_in_order([item.response.sums[name] for item in accepted], total.get(name))
            answered |= {item.response.client for item in accepted}
            reasons |= {rejection.client: rejection.reason for rejection in rejections}
            if resumable is not None and len(answered) == begin + len(batch):  # nobody is missing so far
                resumable.save(len(answered), total)
        if not answered:
            raise _nobody_answered(action, reasons, "sum")
        lost = {}
        for client in self.clients:
            if client not in answered:
                lost[client] = reasons.get(client, "did not answer")
        return total, lost

    def each(self, action: SummedAction) -> list[Response]:
        """Send one request to every client and return each one's own response in the clear, in client order.

        Missing and invalid ones are left out and logged; those clients get no further requests.
        """
        requests = [Request(self.run, -1, client, action.name) for client in self.clients]
        accepted, rejections = self._exchange(action, requests, self._fields(action, requests))
        reasons = {rejection.client: rejection.reason for rejection in rejections}
        self._leave_out(action, reasons)
        if not accepted:
            raise _nobody_answered(action, reasons, "make a head from")
        return [item.response for item in accepted]

    def _fields(self, action: SummedAction, requests: Sequence[Request]) -> dict[str, Field]:
        """Return shape, dtype and limit of each tensor of a response to these requests."""
        fields: dict[str, Field] = {}
        if requests:
            for name, summand in action.summands(self.network, requests[0].settings).items():
                fields[name] = Field(summand.shape, summand.dtype, summand.largest_in_the_clear)
        return fields

    def _exchange(
        self, action: SummedAction, requests: Sequence[Request], fields: Mapping[str, Field]
    ) -> tuple[list[Accepted], list[Rejection]]:
        """Send the requests and return the valid responses and the rejections; add their bytes to `down` and `up`.

        `fields` are the tensors that a response must have.
        """
        clients = frozenset(request.client for request in requests)
        expected = Expectation(
            self.run, -1, clients, sums=fields, example_counts=self.example_counts, check=action.implausible
        )
        arrivals: Iterable[Any] = self.exchange(requests)
        accepted, rejections = validate_responses(arrivals, expected)
        self.down += sum(wire_size(request) for request in requests)
        self.up += sum(wire_size(item.response) for item in accepted)
        return accepted, rejections

    def _leave_out(self, action: SummedAction, lost: Mapping[int, str]) -> None:
        """Log the lost clients with their reasons and remove them from `self.clients`: they get no further requests."""
        for client, reason in lost.items():
            log.warning("client %d is left out of the sums of %s: %s", client, action.name, reason)
        self.lost |= lost
        self.clients = tuple(client for client in self.clients if client not in lost)


def _nobody_answered(action: SummedAction, reasons: Mapping[int, str], purpose: str) -> FedgraftError:
    """Return the error for an action that no client answered; its hint is the first reason in `reasons`.

    `purpose` ends the sentence "there is nothing to ...".
    """
    sentence = f"no client answered the request {action.name!r}, so there is nothing to {purpose}"
    hint = ""
    for client, reason in reasons.items():
        hint = f"client {client}: {reason}"
        break
    return FedgraftError("E-SERVER-NO-ANSWERS", sentence, hint, action=action.name, reasons=dict(reasons))


def _add_in_order(parts: Sequence[Tensor], before: Tensor | None) -> Tensor:
    """Return `before` (None: zero) plus the parts in client order, float64; `before` may be changed in place.

    Long float32 vectors are added one by one, because a stack would double them.
    """
    if parts[0].dtype == torch.float64:
        total = torch.stack(list(parts)).sum(0)
        if before is None:
            return total
        return before + total
    if before is None:
        total = parts[0].double()
        remaining = parts[1:]
    else:
        total = before
        remaining = parts
    for part in remaining:
        total.add_(part)
    return total
