"""Which node serves which client: nodes come and go and have random numbers, clients are 0..K-1.

Every node is asked once for its client number. Of two nodes that claim the same one, the first is kept and the other
refused by name, until the first is gone. A node that joins late is asked when it is first seen.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, Protocol

from fedgraft.errors import FedgraftError

log = logging.getLogger("fedgraft")
_ANSWER = 300.0  # seconds that a connected node has to answer a greeting: it starts its worker and reads its data


class Transport(Protocol):
    """Asks nodes who they are and brings what they say."""

    def present(self) -> set[int]:
        """The nodes that are connected now."""
        ...

    def greet(self, nodes: Sequence[int]) -> Mapping[str, int]:
        """Ask these nodes; returns which question went to which node."""
        ...

    def greetings(self, questions: Iterable[str]) -> Mapping[str, tuple[int, Mapping[str, Any], str]]:
        """Answers that have come: (client number, facts, error) by question."""
        ...


class Registry:
    """The nodes of a federation by client number, kept up to date by `refresh`."""

    def __init__(self, transport: Transport, clients: int) -> None:
        self.transport, self.clients = transport, clients
        self.nodes: dict[int, int] = {}
        self.facts: dict[int, Mapping[str, Any]] = {}
        self.refused: dict[int, str] = {}
        self._asked: dict[str, int] = {}

    def refresh(self) -> None:
        """Forget nodes that left, greet new ones, and enter those that have answered."""
        present = self.transport.present()
        gone = {client: node for client, node in self.nodes.items() if node not in present}
        for client, node in gone.items():
            log.warning("the node of client %d is gone (%d)", client, node)
            del self.nodes[client]
        if gone:  # whoever was refused as a double may be the successor
            self.refused.clear()
        self._asked = {question: node for question, node in self._asked.items() if node in present}
        known = {*self.nodes.values(), *self._asked.values(), *self.refused}
        if new := sorted(present - known):
            self._asked |= self.transport.greet(new)
        answers = self.transport.greetings(list(self._asked)) if self._asked else {}
        for question, (client, facts, error) in answers.items():
            self._enter(self._asked.pop(question), client, facts, error)

    def _enter(self, node: int, client: int, facts: Mapping[str, Any], error: str) -> None:
        if error:
            reason = error
        elif not 0 <= client < self.clients:
            reason = f"it calls itself client {client}, and there are clients 0 to {self.clients - 1}"
        elif client in self.nodes:
            reason = f"client {client} is served by node {self.nodes[client]} already"
        else:
            self.nodes[client], self.facts[client] = node, facts
            log.info("client %d is served by node %d", client, node)
            return
        self.refused[node] = reason
        log.warning("node %d is refused: %s", node, reason)

    def gather(self, least: int, patience: float, clock: Callable[[], float], sleep: Callable[[float], None]) -> None:
        """Wait until every client has a node; after `patience` seconds `least` of them are enough.

        Nodes that are connected by then get the time to say who they are.
        """
        end = clock() + patience
        self.refresh()
        while len(self.nodes) < self.clients and clock() < end + (_ANSWER if self._asked else 0):
            sleep(0.2)
            self.refresh()
        if len(self.nodes) < max(1, least):
            why = "".join(f"; node {node} was refused: {reason}" for node, reason in self.refused.items())
            raise FedgraftError(
                f"after {patience:g} s only {len(self.nodes)} of {self.clients} clients have a node and at least "
                f"{max(1, least)} are needed; start the others and resume{why}."
            )
        if missing := [k for k in range(self.clients) if k not in self.nodes]:
            log.warning("the run starts without the nodes of clients %s; they may join later", missing)
