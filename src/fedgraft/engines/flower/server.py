"""The engine of nodes: requests go out as messages, responses come back; sampling and order stay ours.

Clients are numbers 0..K-1; `NodeRegistry` knows which node serves which. What carries the messages is a
`NodeTransport`: Flower's grid (`grid.py`), or the front door of a federation of fedgraft's own (`deploy`). Requests of
equal content share one part, which is stored and hashed once. A node that is silent, gone, or answers with an error is
missing from the round under its name; every answer is untrusted until it is validated.
"""

from __future__ import annotations

import hashlib
import logging
import time
from collections.abc import Callable, Mapping, MutableMapping, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from fedgraft.client.actions import progress_label
from fedgraft.core.client_memory import ClientMemory
from fedgraft.core.errors import FedgraftError
from fedgraft.core.messages import Request, pack
from fedgraft.core.progress import requests_phase
from fedgraft.engines.flower.registry import NodeRegistry
from fedgraft.engines.flower.response_store import ResponseStore
from fedgraft.engines.flower.transport import (
    REQUEST,
    Incoming,
    NodeTransport,
    Outgoing,
    Part,
    text_setting,
    whole_number,
)

log = logging.getLogger("fedgraft")

Arrival = tuple[int, bytes | str]
"""A client with its packed response, or with the reason why there is none."""
_RETRIES = 3  # of requests before the first round
SILENT = 1800.0
"""Without a deadline, a connected node that does not answer is waited for so many seconds, or `_TIMES` times as long as
the faster half took, whichever is longer: a node that never answers cannot hold up the run for ever."""
_TIMES = 10.0


@dataclass(frozen=True)
class Patience:
    """How long to wait for nodes."""

    deadline: float | None = None
    """Seconds that a node has for one request; None: as long as it is connected, within reason (`SILENT`)."""
    wait: float = 300.0
    """Seconds to wait at the start until every client has a node."""
    least: int = 1
    """Nodes without which the run does not start."""
    sum_needs: int | None = None
    """Clients that a round under secure aggregation needs to the end; None: more than two thirds."""
    enough: int | None = None
    """Answers of a round after which it ends; None: all. Until the deadline, nodes that are gone may come back."""


@dataclass(frozen=True)
class _Envelope:
    """A request on its way to a node; the engine makes one for each request of an exchange."""

    request: Request
    node: int
    content: Part
    """The packed request, with client number 0."""
    becomes: int
    """The step of the client's memory after the request."""


class FlowerEngine:
    """An engine that carries out requests on nodes.

    Args:
        clients: number of clients of the federation.
        clock, sleep: replaced in tests.
        members: returns the client whose key each node proved to have; None: nodes are believed.
        store: keeps the responses of the round under way for a server that comes back; None: nothing is kept.

    `memory` holds only which step of its memory each client has: the memory itself stays at the node.
    """

    def __init__(
        self,
        transport: NodeTransport,
        clients: int,
        patience: Patience | None = None,
        clock: Callable[[], float] = time.monotonic,
        sleep: Callable[[float], None] = time.sleep,
        members: Callable[[], Mapping[int, int]] | None = None,
        store: ResponseStore | None = None,
    ) -> None:
        self.store = store
        self.transport = transport
        self.patience = patience or Patience()
        self.clock = clock
        self.sleep = sleep
        self.registry = NodeRegistry(transport, clients, clock, members)
        self.memory: MutableMapping[int, ClientMemory] = {}
        self.classes: tuple[str, ...] = ()
        """The federation's classes, if nodes have data of their own."""
        self._opened: Part | None = None
        self._digest = ""
        self._have_space: set[int] = set()
        """Nodes that have the opened edit space."""
        self._under_way: dict[str, _Envelope] = {}
        """Requests that `exchange_first` sent and did not wait for, by message id."""
        self._early: dict[int, Arrival] = {}
        """Answers that came after a buffer was full, in order of arrival."""
        self._asked_rounds: set[int] = set()
        """Rounds of the requests of the last `exchange_first`: their answers may still be needed."""
        self._sum_under_way = ""
        """Run, action and number of the latest secure sum."""
        self._cohort = 0
        """Clients that were asked at the first stage of the secure sum under way."""
        self._silent: set[int] = set()
        """Clients whose node was not there or did not answer when it was last asked."""
        self._given_up: set[int] = set()
        """Clients that a secure sum waited for in vain; they are not waited for again until they answer."""
        self.waited = 0.0
        """Seconds spent waiting for answers so far."""
        self.sent = 0
        """Bytes of requests and opened edit spaces so far, without the carrier's own overhead."""
        self.received = 0
        """Bytes of responses so far, without the carrier's own overhead."""

    def gather(self) -> None:
        """Wait until enough nodes are connected at the start of a run; raise if they do not come in time."""
        self.registry.gather(self.patience.least, self.patience.wait, self.clock, self.sleep)

    def present_clients(self) -> list[int]:
        """Return the clients that a node serves now, in order."""
        self.registry.refresh()
        return sorted(self.registry.nodes)

    def limit_responses(self, most: int) -> None:
        """From now on accept no response of more than `most` bytes, where the carrier can refuse one."""
        self.transport.limit_responses(most)

    def open(self, run: str, tensors: Mapping[str, Tensor]) -> None:
        """Set the edit space of later requests: `tensors` from which a node rebuilds it.

        Every node gets them with its next request, and again if it lost them. Nothing is sent yet.
        """
        data = pack(Request(run, -1, 0, "open", auxiliary=tensors))
        self._opened = Part(data)
        self._digest = hashlib.blake2b(data, digest_size=12).hexdigest()
        self._have_space = set()

    def exchange(self, requests: Sequence[Request]) -> list[Arrival]:
        """Send the requests to the nodes and return (client, packed response or reason) in client order.

        Before round 0 every client is needed: a head or a mask from some of them would be another one. So the requests
        to a node that was restarted are sent again.
        """
        self._note_cohort(requests)
        arrivals = self._deliver(requests)
        self._settle({request.client for request in requests})
        before_training = bool(requests) and requests[0].round < 0
        retries = 0
        if before_training:
            retries = _RETRIES
        missing = _missing(arrivals)
        while missing and retries and self._wait_for(missing):
            arrivals |= self._deliver([request for request in requests if request.client in missing])
            missing = _missing(arrivals)
            retries -= 1
        if missing and not before_training:
            self._wait_for_sum(requests, arrivals)
            missing = _missing(arrivals)
        for client, reason in missing.items():
            log.warning("client %d is missing: %s", client, reason)
        answered = len(arrivals) - len(missing)
        if missing and before_training and answered < self.patience.least:
            client, reason = next(iter(missing.items()))
            raise FedgraftError(
                "E-ENGINES-TOO-FEW-ANSWERS",
                f"only {answered} clients answered the request {requests[0].action!r} before the first round and "
                f"{self.patience.least} are needed; client {client}: {reason}",
                "fix its node and resume",
                client=client,
                action=requests[0].action,
                answered=answered,
            )
        return [arrivals[client] for client in sorted(arrivals)]

    def _note_cohort(self, requests: Sequence[Request]) -> None:
        """Remember how many clients the secure sum has that these requests begin; they may come in several groups."""
        if not requests or requests[0].action != "secure.keys":
            return
        first = requests[0]
        name = f"{first.run} {first.settings.get('sums')} {first.round}"
        if name != self._sum_under_way:
            self._sum_under_way = name
            self._cohort = 0
        self._cohort += len(requests)

    def _wait_for_sum(self, requests: Sequence[Request], arrivals: dict[int, Arrival]) -> None:
        """Wait for nodes without which a secure sum would be given up, and put their answers into `arrivals`.

        A round of training needs as many as open the sum; a sum outside the rounds needs all, because clients refuse
        another one over fewer. Who was waited for in vain is not waited for again before its node is back.
        """
        first = requests[0]
        if not first.action.startswith("secure."):
            return
        in_rounds = first.settings.get("sums") == "train"
        needed = self._cohort
        if in_rounds:
            needed = self.patience.sum_needs or self._cohort * 2 // 3 + 1
        for _ in range(_RETRIES):
            missing = _missing(arrivals)
            awaited = {}
            for client in sorted(self._silent & missing.keys() - self._given_up):
                awaited[client] = missing[client]
            if not awaited or len(arrivals) - len(missing) >= needed:
                return
            names = ", ".join(map(str, awaited))
            log.warning("a secure sum waits for the nodes of clients %s; %d are needed", names, needed)
            if not self._wait_for(awaited):
                self._given_up |= set(awaited)
                return
            arrivals |= self._deliver([request for request in requests if request.client in awaited])
            self._given_up -= {client for client in awaited if isinstance(arrivals[client][1], bytes)}

    def _deliver(self, requests: Sequence[Request]) -> dict[int, Arrival]:
        """Send the requests to the nodes that are connected, wait, and return the arrivals by client.

        A client without a node arrives with that reason.
        """
        self.registry.refresh()
        arrivals: dict[int, Arrival] = {}
        if self.store is not None and requests and requests[0].round >= 0:
            self.store.keep_rounds({requests[0].round, *self._asked_rounds})
        envelopes = self._envelopes(requests, arrivals)
        with requests_phase([envelope.request for envelope in envelopes], progress_label) as phase:
            self._collect(envelopes, arrivals, phase.advance)
        return arrivals

    def exchange_first(self, requests: Sequence[Request], count: int) -> list[Arrival]:
        """Return what arrived, in order of arrival, once `count` clients have answered or nobody is left to answer.

        `requests` are all that are not answered yet; those that were sent before are not sent again, and answers beyond
        `count` arrive at the next call. What fails before the buffer is full arrives too, with the reason.
        """
        self.registry.refresh()
        busy = {envelope.request.client for envelope in self._under_way.values()} | self._early.keys()
        self._asked_rounds = {request.round for request in requests}
        if self.store is not None:
            self.store.keep_rounds(self._asked_rounds)
        new: dict[int, Arrival] = {}
        envelopes = self._envelopes([request for request in requests if request.client not in busy], new)
        self._under_way |= self._send(envelopes, new)
        self._early |= new
        with requests_phase(requests[:count], progress_label) as phase:
            began = last_arrival = self.clock()
            while self._under_way and _answers(self._early) < count:
                for client in self._pull_under_way():
                    last_arrival = self.clock()
                    if isinstance(self._early[client][1], bytes):
                        phase.advance()
                if self._under_way and _answers(self._early) < count:
                    if self.clock() - last_arrival > SILENT and self.patience.deadline is None:
                        self._give_up(f"no answer within {SILENT:g} s")
                    self.sleep(min(0.5, max(0.02, 0.02 * (self.clock() - last_arrival))))
            self.waited += self.clock() - began
        first: list[Arrival] = []
        answered = 0
        for client, arrival in list(self._early.items()):
            if answered == count:
                break
            first.append(self._early.pop(client))
            if isinstance(arrival[1], bytes):
                answered += 1
            else:
                log.warning("client %d is missing: %s", client, arrival[1])
        return first

    def _pull_under_way(self) -> list[int]:
        """Move what has come for the requests under way to `self._early`; return whose, in order of arrival."""
        arrived = []
        to_repeat = []
        for reply in self.transport.pull(self._under_way):
            envelope = self._under_way.pop(reply.reply_to, None)
            if envelope is None:
                continue
            arrival = self._read(reply, envelope)
            if arrival is None:
                to_repeat.append(envelope)
            else:
                self._early[envelope.request.client] = arrival
                arrived.append(envelope.request.client)
        not_accepted: dict[int, Arrival] = {}
        self._under_way |= self._send(to_repeat, not_accepted)
        self._early |= not_accepted
        return [*arrived, *not_accepted]

    def _give_up(self, reason: str) -> None:
        """Wait no longer for any request under way; `reason` is what arrives for it."""
        self.transport.withdraw(self._under_way)
        for envelope in self._under_way.values():
            self._early[envelope.request.client] = (envelope.request.client, reason)
        self._under_way = {}

    def _settle(self, clients: set[int]) -> None:
        """Wait for the requests of `exchange_first` that these clients work on, because a client does one at a time."""
        began = self.clock()
        while clients & {envelope.request.client for envelope in self._under_way.values()}:
            self._pull_under_way()
            if self.patience.deadline is None and self.clock() - began > SILENT:
                self._give_up(f"no answer within {SILENT:g} s")
            self.sleep(0.02)

    def _envelopes(self, requests: Sequence[Request], arrivals: dict[int, Arrival]) -> list[_Envelope]:
        """Return the envelopes of these requests; what needs none arrives in `arrivals`.

        An answer may be here from before the server was restarted, or no node serves the client.
        """
        envelopes: list[_Envelope] = []
        for request in requests:
            if self._answered_before(request, arrivals):
                continue
            node = self.registry.nodes.get(request.client)
            self._silent.discard(request.client)
            if node is None:
                self._silent.add(request.client)
                arrivals[request.client] = (request.client, "no node serves it at present")
                continue
            data = pack(replace(request, client=0))  # the same bytes for all clients with the same request
            becomes = self._step(request.client) + 1
            if envelopes and envelopes[-1].content.data == data:
                envelope = replace(envelopes[-1], request=request, node=node, becomes=becomes)
            else:
                envelope = _Envelope(request, node, Part(data), becomes)
            envelopes.append(envelope)
        return envelopes

    def _answered_before(self, request: Request, arrivals: dict[int, Arrival]) -> bool:
        """Return whether the answer to this very request came before the server was restarted; it then arrives now."""
        if self.store is None:
            return False
        stored = self.store.load(self._stored_name(request))
        if stored is None:
            return False
        data, step = stored
        if step:
            self.memory[request.client] = {"step": torch.tensor([step])}
        self.received += len(data)
        arrivals[request.client] = (request.client, data)
        log.info("the answer of client %d is here from before", request.client)
        return True

    def _stored_name(self, request: Request) -> str:
        """Return the name under which the answer to a request is kept."""
        assert self.store is not None
        return self.store.name(request, self._step(request.client) + 1, self._digest)

    def _wait_for(self, missing: Mapping[int, str]) -> bool:
        """Wait until the missing clients have nodes again, at most `patience.wait` seconds; return whether one has.

        `missing` are the reasons by client, which are logged.
        """
        for client, reason in missing.items():
            log.warning("client %d is missing: %s; waiting for its node", client, reason)
        end = self.clock() + self.patience.wait
        while True:
            self.sleep(1.0)
            self.registry.refresh()
            back = [client for client in missing if client in self.registry.nodes]
            if len(back) == len(missing) or self.clock() >= end:
                return bool(back)

    def _step(self, client: int) -> int:
        """Return the number of the step that a client's memory at its node is at; 0 if it has none."""
        if client not in self.memory:
            return 0
        return int(self.memory[client]["step"])

    def _collect(self, envelopes: Sequence[_Envelope], arrivals: dict[int, Arrival], done: Callable[[], None]) -> None:
        """Send the envelopes and write arrivals into `arrivals` until all are there or the time is over.

        `done` is called after each arrival. Without a deadline the time is limited once half have answered (`SILENT`).
        """
        began = self.clock()
        waiting = self._send(envelopes, arrivals)
        last_arrival = 0.0
        limit = self.patience.deadline
        while waiting:
            to_repeat = []
            for reply in self.transport.pull(waiting):
                envelope = waiting.pop(reply.reply_to, None)
                if envelope is None:
                    continue
                arrival = self._read(reply, envelope)
                if arrival is None:
                    to_repeat.append(envelope)
                else:
                    arrivals[envelope.request.client] = arrival
                    last_arrival = self.clock() - began
                    done()
            waiting |= self._send(to_repeat, arrivals)
            now = self.clock()
            if self._enough(envelopes, arrivals):
                break
            if self.patience.deadline is None and 2 * len(waiting) <= len(envelopes):  # half have answered
                limit = max(SILENT, _TIMES * last_arrival)
            if limit is not None and now >= began + limit:
                break
            if waiting:  # short pauses while answers may be near, longer ones later
                self.sleep(min(0.5, max(0.02, 0.02 * (now - began))))
        self.transport.withdraw(waiting)
        for envelope in waiting.values():
            self._silent.add(envelope.request.client)
            reason = f"no answer within {limit:g} s" if limit is not None else "no answer"
            if self._enough(envelopes, arrivals):
                reason = f"the round ended with {self.patience.enough} answers, before its own"
            arrivals[envelope.request.client] = (envelope.request.client, reason)
        self.waited += self.clock() - began

    def _enough(self, envelopes: Sequence[_Envelope], arrivals: Mapping[int, Arrival]) -> bool:
        """Return whether a round of training has the answers after which it need not wait for the others."""
        if self.patience.enough is None or not envelopes or envelopes[0].request.round < 0:
            return False
        action = envelopes[0].request.action
        if action != "train" and not action.startswith("secure."):
            return False
        asked = {envelope.request.client for envelope in envelopes}
        answered = [client for client, answer in arrivals.values() if client in asked and isinstance(answer, bytes)]
        return len(answered) >= self.patience.enough

    def _send(self, envelopes: Sequence[_Envelope], arrivals: dict[int, Arrival]) -> dict[str, _Envelope]:
        """Send the envelopes and return them by message id; note in `arrivals` those that were not accepted."""
        identities = self.transport.push([self._message(envelope) for envelope in envelopes])
        sent = {}
        for envelope, identity in zip(envelopes, identities, strict=True):
            if identity is None:
                arrivals[envelope.request.client] = (envelope.request.client, "the request was not accepted")
            else:
                sent[identity] = envelope
        return sent

    def _message(self, envelope: _Envelope) -> Outgoing:
        """Return the message of an envelope, with the tensors of the edit space if the node lacks them.

        Count the bytes.
        """
        parts = {"request": envelope.content}
        self.sent += len(envelope.content.data)
        if self._opened is not None and envelope.node not in self._have_space:
            parts["opened"] = self._opened
            self.sent += len(self._opened.data)
        # Nothing here names the client: content that is equal for all is stored and forwarded only once.
        settings = {
            "after": envelope.becomes - 1,
            "becomes": envelope.becomes,
            "digest": self._digest,
            "classes": list(self.classes),
        }
        group = str(envelope.request.round + 1)
        waits = self.patience.enough is not None and self.patience.deadline is not None
        return Outgoing(envelope.node, REQUEST, parts, settings, self.patience.deadline, group, waits)

    def _read(self, reply: Incoming, envelope: _Envelope) -> Arrival | None:
        """Return what a reply brings: (client, packed response or reason); None if the request must be sent again.

        That is so if the node lacks the edit space. The client's step of memory is noted; the caller validates the
        response.
        """
        client = envelope.request.client
        if reply.failure:
            self._silent.add(client)
            if reply.expired and self.patience.deadline is not None:
                return client, f"no answer within {self.patience.deadline:g} s"
            return client, reply.failure
        if reply.node != envelope.node:
            return client, "the answer came from another node"
        data = reply.parts.get("response", b"")
        self.received += len(data)
        if reply.settings.get("need") is True and envelope.node in self._have_space:
            self._have_space.discard(envelope.node)
            return None
        error = text_setting(reply.settings, "error")
        if error:
            return client, error
        self._have_space.add(envelope.node)
        step = whole_number(reply.settings, "step")
        if step not in (envelope.becomes - 1, envelope.becomes):
            return client, f"it answered with step {step} of its memory instead of {envelope.becomes}"
        if self.store is not None:
            self.store.save(self._stored_name(envelope.request), data, step)
        if step:
            self.memory[client] = {"step": torch.tensor([step])}
        return client, data  # the caller validates it

    def take_back(self, client: int, before: ClientMemory | None) -> None:
        """Let a client continue from the step of its memory before its last request; `before` None: from none.

        Nodes store two steps, and the next request names the one to continue from; nothing is sent now. A simulated
        node makes a step at every stage of a secure sum, so only the last step can be taken back there.
        """
        earlier = 0
        if before is not None:
            earlier = int(before["step"])
        if self._step(client) != earlier + 1:
            return
        if before is None:
            del self.memory[client]
        else:
            self.memory[client] = before

    def close(self) -> None:
        """Do nothing: the nodes belong to others."""


def _answers(arrivals: Mapping[int, Arrival]) -> int:
    """Return how many of these are answers, and no reasons why there is none."""
    return sum(isinstance(answer, bytes) for _, answer in arrivals.values())


def _missing(arrivals: Mapping[int, Arrival]) -> dict[int, str]:
    """Return the clients without a response, and why."""
    missing = {}
    for client, answer in arrivals.values():
        if isinstance(answer, str):
            missing[client] = answer
    return missing
