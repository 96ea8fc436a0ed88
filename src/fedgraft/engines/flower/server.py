"""The engine on Flower: orders go out as messages to nodes, replies come back, sampling and order stay ours.

Clients are numbers 0..K-1; `Registry` knows which node serves which. The grid's own `send_and_receive` sleeps three
seconds between looks, so this engine pushes and pulls by itself and looks again soon. Orders of equal content share
one array, which Flower then stores and hashes once. A node that is silent, gone, or answers with an error is missing
from the round under its name; everything that does arrive is hostile until it is screened.
"""

from __future__ import annotations

import hashlib
import logging
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from flwr.app import ArrayRecord, Message
from flwr.serverapp import Grid
from torch import Tensor

from fedgraft.client.actions import progress_label
from fedgraft.core.client_memory import ClientMemory
from fedgraft.core.errors import FedgraftError
from fedgraft.core.messages import Request, pack
from fedgraft.core.progress import requests_phase
from fedgraft.engines.flower.registry import ASK_AGAIN, Registry
from fedgraft.engines.flower.wire import HELLO, ORDER, as_record, names, plain, put, take, text, whole_number

log = logging.getLogger("fedgraft")

Arrival = tuple[int, bytes | str]
_RETRIES = 3
SILENT, _TIMES = 1800.0, 10.0
"""Without a deadline a connected node that says nothing is waited for so many seconds, or so many times as long as most
others took, whichever is longer: one that never answers does not hold up the run for ever."""
_EXPIRED = (3, 4)  # Flower's codes of an order or an answer that is over its time to live, which is our deadline


@dataclass(frozen=True)
class Patience:
    """How long to wait for whom."""

    deadline: float | None = None
    """Seconds that a node has for one order; None: as long as it is connected, within reason (`SILENT`)."""
    wait: float = 300.0
    """Seconds to wait at the start until every client has a node."""
    least: int = 1
    """Nodes without which the run does not start."""


class FlowerTransport:
    """Push and pull on a Flower grid."""

    def __init__(self, grid: Grid) -> None:
        self.grid = grid

    def present(self) -> set[int]:
        """The nodes that are connected now."""
        return set(self.grid.get_node_ids())

    def greet(self, nodes: Sequence[int]) -> dict[str, int]:
        """Ask these nodes who they are."""
        messages = [Message(put({}, {"hello": True}), node, HELLO) for node in nodes]
        return {question: node for question, node in zip(self.push(messages), nodes, strict=True) if question}

    def greetings(self, questions: Iterable[str]) -> dict[str, tuple[int, Mapping[str, Any], str]]:
        """What those that have answered say."""
        found: dict[str, tuple[int, Mapping[str, Any], str]] = {}
        for message in self.grid.pull_messages(list(questions)):
            settings = {} if message.has_error() else take(message.content)[1]
            error = failure_of(message) if message.has_error() else text(settings, "error")
            facts = {
                "examples": whole_number(settings, "examples", 0),
                "classes": names(settings, "classes"),
                "data": text(settings, "data"),
            }
            client = ASK_AGAIN if message.has_error() else whole_number(settings, "client")
            found[message.metadata.reply_to_message_id] = (client, facts, error)
        return found

    def push(self, messages: Sequence[Message]) -> list[str | None]:
        """Send messages; the identity of each, or None where Flower did not take it."""
        found = list(self.grid.push_messages(messages)) if messages else []
        return [found[i] if i < len(found) else None for i in range(len(messages))]

    def pull(self, waiting: Iterable[str]) -> Iterable[Message]:
        """The replies that are there."""
        return self.grid.pull_messages(list(waiting))


def failure_of(message: Message) -> str:
    """What Flower says went wrong at a node, as one line."""
    return f"its node failed: {plain(str(message.error.reason).strip() or 'no reason')[:300]}"


@dataclass(frozen=True)
class _Message:
    request: Request
    node: int
    content: ArrayRecord
    data: bytes
    becomes: int


class FlowerEngine:
    """Carries out orders on Flower nodes. `memory` holds no client's memory, only which step of it each one has."""

    def __init__(
        self,
        transport: FlowerTransport,
        clients: int,
        patience: Patience | None = None,
        clock: Callable[[], float] = time.monotonic,
        sleep: Callable[[float], None] = time.sleep,
        members: Callable[[], Mapping[int, int]] | None = None,
    ) -> None:
        self.transport, self.patience, self.clock, self.sleep = transport, patience or Patience(), clock, sleep
        self.registry = Registry(transport, clients, clock, members)
        self.memory: dict[int, ClientMemory] = {}
        self.classes: tuple[str, ...] = ()
        """The federation's classes, where nodes bring data of their own."""
        self._opened: ArrayRecord | None = None
        self._digest = ""
        self._told: set[int] = set()
        self.waited = 0.0
        """Seconds spent waiting for answers so far."""
        self.sent = self.received = 0
        """Bytes of orders, openings and replies so far; what Flower puts around them is not counted."""

    def gather(self) -> None:
        """Wait for the nodes at the start of a run."""
        p = self.patience
        self.registry.gather(p.least, p.wait, self.clock, self.sleep)

    def open(self, run: str, tensors: Mapping[str, Tensor]) -> None:
        """From now on orders belong to this edit space; every node gets it once, and again when it lost it."""
        data = pack(Request(run, -1, 0, "open", auxiliary=tensors))
        self._opened, self._digest = as_record(data), hashlib.blake2b(data, digest_size=12).hexdigest()
        self._told = set()

    def exchange(self, requests: Sequence[Request]) -> list[Arrival]:
        """Deliver the orders and return what came back, by client; a sentence stands for a missing answer.

        Before round 0 everyone counts: a head or a mask from some clients would be another one. So what a node owes
        that was restarted is asked for again.
        """
        arrivals = self._once(requests)
        missing: dict[int, str] = {}
        for left in range(_RETRIES if requests and requests[0].round < 0 else 0, -1, -1):
            missing = {client: said for client, said in arrivals.values() if isinstance(said, str)}
            if not missing or not left or not self._await(missing):
                break
            arrivals |= self._once([request for request in requests if request.client in missing])
        for client, said in missing.items():
            log.warning("client %d is missing: %s", client, said)
        if missing and requests[0].round < 0 and len(arrivals) - len(missing) < self.patience.least:
            client, said = next(iter(missing.items()))
            raise FedgraftError(
                f"only {len(arrivals) - len(missing)} clients did their part ({requests[0].action}) before the first "
                f"round and {self.patience.least} are needed; client {client}: {said}; mend its node and resume."
            )
        return [arrivals[client] for client in sorted(arrivals)]

    def _once(self, requests: Sequence[Request]) -> dict[int, Arrival]:
        """Deliver the orders to the nodes that are there."""
        self.registry.refresh()
        arrivals: dict[int, Arrival] = {}
        letters: list[_Message] = []
        for request in requests:
            node = self.registry.nodes.get(request.client)
            if node is None:
                arrivals[request.client] = (request.client, "no node serves it at present")
                continue
            data = pack(replace(request, client=0))  # the same bytes for all who get the same
            same = bool(letters) and letters[-1].data == data
            content, data = (letters[-1].content, letters[-1].data) if same else (as_record(data), data)
            letters.append(_Message(request, node, content, data, self._step(request.client) + 1))
        self._carry(letters, arrivals)
        return arrivals

    def _await(self, missing: Mapping[int, str]) -> bool:
        """Wait until the missing clients have nodes again, or for as long as at the start; whether one has."""
        for client, said in missing.items():
            log.warning("client %d is missing before the first round: %s; waiting for its node", client, said)
        end = self.clock() + self.patience.wait
        while True:
            self.sleep(1.0)
            self.registry.refresh()
            back = [client for client in missing if client in self.registry.nodes]
            if len(back) == len(missing) or self.clock() >= end:
                return bool(back)

    def _step(self, client: int) -> int:
        return int(self.memory[client]["step"]) if client in self.memory else 0

    def _carry(self, letters: Sequence[_Message], arrivals: dict[int, Arrival]) -> None:
        """Send the letters and collect answers until all are there or the deadline is over."""
        requests = [letter.request for letter in letters]
        with requests_phase(requests, progress_label) as asked:
            self._wait(letters, arrivals, asked.advance)

    def _wait(self, letters: Sequence[_Message], arrivals: dict[int, Arrival], done: Callable[[], None]) -> None:
        began = self.clock()
        waiting, last = self._send(letters, arrivals), 0.0
        limit = self.patience.deadline
        while waiting:
            again = []
            for message in self.transport.pull(waiting):
                letter = waiting.pop(message.metadata.reply_to_message_id, None)
                if letter is None:
                    continue
                arrival = self._read(message, letter)
                if arrival is None:
                    again.append(letter)
                else:
                    arrivals[letter.request.client], last = arrival, self.clock() - began
                    done()
            waiting |= self._send(again, arrivals)
            now = self.clock()
            if self.patience.deadline is None and 2 * len(waiting) <= len(letters):  # half are there
                limit = max(SILENT, _TIMES * last)
            if limit is not None and now >= began + limit:
                break
            if waiting:  # quick while answers may be near, calm when they take long
                self.sleep(min(0.5, max(0.02, 0.02 * (now - began))))
        for letter in waiting.values():
            arrivals[letter.request.client] = (letter.request.client, f"no answer within {limit:g} s")
        self.waited += self.clock() - began

    def _send(self, letters: Sequence[_Message], arrivals: dict[int, Arrival]) -> dict[str, _Message]:
        identities = self.transport.push([self._message(letter) for letter in letters])
        sent = {}
        for letter, identity in zip(letters, identities, strict=True):
            if identity is None:
                arrivals[letter.request.client] = (letter.request.client, "Flower did not take the order")
            else:
                sent[identity] = letter
        return sent

    def _message(self, letter: _Message) -> Message:
        request, arrays = letter.request, {"request": letter.content}
        self.sent += len(letter.data)
        if self._opened is not None and letter.node not in self._told:
            arrays["opened"] = self._opened
            self.sent += len(self._opened["bytes"].data)
        # Nothing here names the client: what is equal for all, Flower stores and hands on once.
        settings = {
            "after": letter.becomes - 1,
            "becomes": letter.becomes,
            "digest": self._digest,
            "classes": list(self.classes),
        }
        return Message(
            put(arrays, settings), letter.node, ORDER, ttl=self.patience.deadline, group_id=str(request.round + 1)
        )

    def _read(self, message: Message, letter: _Message) -> Arrival | None:
        """A reply, its bytes, or why there is none; None: the node must be told the edit space again."""
        client = letter.request.client
        if message.has_error():
            late = message.error.code in _EXPIRED and self.patience.deadline is not None
            return client, f"no answer within {self.patience.deadline:g} s" if late else failure_of(message)
        if message.metadata.src_node_id != letter.node:
            return client, "the answer came from another node"
        arrays, settings = take(message.content)
        self.received += len(arrays.get("response", b""))
        if settings.get("need") is True and letter.node in self._told:
            self._told.discard(letter.node)
            return None
        if sentence := text(settings, "error"):
            return client, sentence
        self._told.add(letter.node)
        data, step = arrays.get("response", b""), whole_number(settings, "step")
        if step not in (letter.becomes - 1, letter.becomes):
            return client, f"it answered with step {step} of its memory instead of {letter.becomes}"
        if step:
            self.memory[client] = {"step": torch.tensor([step])}
        return client, data  # whoever asked knows what it must look like

    def take_back(self, client: int, before: ClientMemory | None) -> None:
        """Name the step before in the next order: a node holds two steps, and goes on from the one that is named.

        A simulated node makes a step at every stage of a secure sum, so there the last step is all that can be named.
        """
        earlier = 0 if before is None else int(before["step"])
        if self._step(client) != earlier + 1:
            return
        if before is None:
            del self.memory[client]
        else:
            self.memory[client] = before

    def close(self) -> None:
        """Nothing to end: nodes belong to others."""
