"""Which node serves which client: nodes come and go and have random numbers, clients are 0..K-1.

Every node is asked for its client number, which must be that of its registered key, and asked again while it does not
answer: it may have been restarted while it held the question. Of two nodes that claim the same number, the first stays
and the other is refused by name, until the first is gone. A refused node is asked again after a while: its owner may
have fixed it. A node that joins late is asked when it is first seen. The facts that a client reported of its data at
its first greeting hold for the whole run.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Mapping
from typing import Any

from fedgraft.core.errors import FedgraftError
from fedgraft.engines.flower.transport import ASK_AGAIN, NodeTransport

log = logging.getLogger("fedgraft")
_SILENT_PAUSE = 60.0  # seconds until a silent node is greeted again; then twice as many
_REFUSED_PAUSE = 60.0  # seconds until a refused node is greeted again
_FAILED_PAUSE = 5.0  # seconds until a node that failed at the greeting is greeted again
_OF_CONFIG = "E-CONFIG-"
"""How the code begins that a node gives where the config cannot be worked on."""
_ANSWER = 300.0  # seconds that a connected node has to answer a greeting: it starts its worker and reads its data
MOST_CLASSES = 50_000
MOST_IMAGES = 1 << 40

NodeFacts = Mapping[str, Any]
"""The facts that a node reports of its data: `examples`, `classes`, and `data`, a digest."""


class NodeRegistry:
    """Which node serves which client (`nodes`), brought up to date by `refresh`.

    Args:
        transport: greets nodes and returns their answers.
        clients: number of clients of the federation.
        clock: returns seconds; replaced in tests.
        members: returns the client for which each node's key was registered; None: nodes have no keys.
    """

    def __init__(
        self,
        transport: NodeTransport,
        clients: int,
        clock: Callable[[], float] = time.monotonic,
        members: Callable[[], Mapping[int, int]] | None = None,
    ) -> None:
        self.transport = transport
        self.clients = clients
        self.clock = clock
        self.members = members
        """Returns the client for which each node's key was registered; None: nodes have no keys."""
        self.nodes: dict[int, int] = {}
        """The node of each client that has one."""
        self.facts: dict[int, NodeFacts] = {}
        """The facts of each client that was ever admitted."""
        self.refused: dict[int, str] = {}
        """Why a node was refused."""
        self._keys: Mapping[int, int] = {}
        self._rules: list[Callable[[NodeFacts], str]] = []
        """Each returns why a node with these facts is left out, or an empty text."""
        self._questions: dict[str, int] = {}
        """Greetings without an answer yet, and their node."""
        self._next_greeting: dict[int, tuple[float, float]] = {}
        """When a node that has not answered, or was refused, is greeted again, and the pause after that."""

    def refresh(self) -> None:
        """Forget nodes that left, greet new ones, and admit or refuse those that have answered; does not wait."""
        present = self.transport.present()
        self._forget_absent(present)
        self._greet_due(present)
        if not self._questions:
            return
        answers = self.transport.greetings(list(self._questions))
        for question, (client, facts, error) in answers.items():
            if question not in self._questions:  # an earlier greeting of the same node was answered just before
                continue
            node = self._questions.pop(question)
            if node not in self.nodes.values():  # else the late answer to an earlier greeting
                self._enter(node, client, facts, error)

    def _forget_absent(self, present: set[int]) -> None:
        """Remove the nodes that are not among `present`, with their unanswered greetings.

        When a node that served a client is gone, refused nodes may be its successor: they are greeted again at once.
        """
        gone = {client: node for client, node in self.nodes.items() if node not in present}
        for client, node in gone.items():
            log.warning("the node of client %d is gone (%d)", client, node)
            del self.nodes[client]
        if gone:
            self.refused.clear()
        self._questions = {question: node for question, node in self._questions.items() if node in present}
        questioned = set(self._questions.values())
        next_greeting = {}
        for node, when in self._next_greeting.items():
            if node in present and (not gone or node in questioned):
                next_greeting[node] = when
        self._next_greeting = next_greeting

    def _greet_due(self, present: set[int]) -> None:
        """Greet the connected nodes that serve no client and whose time of the next greeting has come.

        A node that stays silent is greeted again after a pause that doubles each time.
        """
        now = self.clock()
        serving = set(self.nodes.values())
        due = []
        for node in sorted(present - serving):
            when, _ = self._next_greeting.get(node, (0.0, 0.0))
            if when <= now:
                due.append(node)
        if not due:
            return
        self._questions |= self.transport.greet(due)
        for node in due:
            _, pause = self._next_greeting.get(node, (0.0, _SILENT_PAUSE))
            if node in self.refused:
                pause = _REFUSED_PAUSE
            self._next_greeting[node] = (now + pause, 2 * pause)

    def _enter(self, node: int, client: int, facts: NodeFacts, error: str) -> None:
        """Admit a node that has answered its greeting, or note why it is refused, or when it is greeted again.

        `client` is the number that it claims, `facts` are those of its data, `error` is the reason why it cannot serve.
        """
        if client == ASK_AGAIN:
            log.warning("node %d did not report its client number (%s) and is asked again", node, error)
            self._next_greeting[node] = (self.clock() + _FAILED_PAUSE, _SILENT_PAUSE)
            return
        reason = error or self._reason_against(node, client, facts)
        if reason:
            if self.refused.get(node) != reason:
                log.warning("node %d is refused: %s", node, reason)
            self.refused[node] = reason
            self._next_greeting[node] = (self.clock() + _REFUSED_PAUSE, _REFUSED_PAUSE)
            return
        self.nodes[client] = node
        self.facts[client] = facts
        self.refused.pop(node, None)
        self._questions = {question: other for question, other in self._questions.items() if other != node}
        log.info("client %d is served by node %d", client, node)

    def _reason_against(self, node: int, client: int, facts: NodeFacts) -> str:
        """Return why a node cannot serve the client it claims to be; empty if it can."""
        if not 0 <= client < self.clients:
            return f"it calls itself client {client}, and there are clients 0 to {self.clients - 1}"
        if not _plausible(facts):
            return "it reports implausible facts: a negative number of images, or repeated or too many classes"
        for rule in self._rules:
            reason = rule(facts)
            if reason:
                return reason
        before = self.facts.get(client, facts)
        if facts != before:
            change = f"{_describe(before)}, now {_describe(facts)}"
            return f"client {client} has other data than when the run began ({change})"
        if client in self.nodes:
            return f"client {client} is served by node {self.nodes[client]} already"
        owner = self._owner(node, client)
        if owner is None:
            return f"it calls itself client {client}, and its key is not registered here"
        if owner != client:
            return f"it calls itself client {client}, and its key is that of client {owner}"
        return ""

    def need_images(self) -> None:
        """From now on leave out nodes without images of their own; such a node does not end a run."""

        def rule(facts: NodeFacts) -> str:
            """Return why a node without classes of its own is left out; "" for others."""
            if facts["classes"]:
                return ""
            return "it has no images of its own, and the others have"

        self.leave_out(rule)

    def leave_out(self, rule: Callable[[NodeFacts], str]) -> None:
        """From now on refuse nodes for whose facts `rule` returns a reason; this holds for admitted ones too."""
        self._rules.append(rule)
        affected = [client for client, facts in self.facts.items() if rule(facts)]
        for client in affected:
            facts = self.facts.pop(client)
            node = self.nodes.pop(client, None)
            if node is not None:
                self._enter(node, client, facts, "")

    def _owner(self, node: int, claimed: int) -> int | None:
        """Return the client whose key this node proved to have, None if it is not registered.

        Where nodes have no keys, it is the client it claims to be. For an unknown node the server is asked for keys.
        """
        if self.members is None:
            return claimed
        if node not in self._keys:  # it may have been registered since
            self._keys = self.members()
        return self._keys.get(node)

    def gather(self, least: int, patience: float, clock: Callable[[], float], sleep: Callable[[float], None]) -> None:
        """Wait until every client has a node; after `patience` seconds `least` of them are enough.

        Nodes that are connected by then get the time to answer their greeting. Where so many cannot work on the config
        that `least` are out of reach, nothing is waited for.
        """
        began = clock()
        end = began + patience
        self.refresh()
        while len(self.nodes) < self.clients:
            if self.clients - self._refused_for_good() < max(1, least):
                break
            grace = 0.0
            if self._questions:
                grace = _ANSWER
            if clock() >= end + grace:
                break
            sleep(0.2)
            self.refresh()
        needed = max(1, least)
        if len(self.nodes) < needed:
            refusals = "".join(f"; node {node} was refused: {reason}" for node, reason in self.refused.items())
            waited = min(clock() - began, patience)
            raise FedgraftError(
                "E-ENGINES-TOO-FEW-NODES",
                f"after {waited:.0f} s only {len(self.nodes)} of {self.clients} clients have a node and at least "
                f"{needed} are needed{refusals}",
                "start the others and resume",
                nodes=len(self.nodes),
                needed=needed,
            )
        missing = [client for client in range(self.clients) if client not in self.nodes]
        if missing:
            log.warning("the run starts without the nodes of clients %s; they may join later", missing)

    def _refused_for_good(self) -> int:
        """Return how many nodes cannot work on the config itself, which no owner and no time will change."""
        return sum(reason.startswith(_OF_CONFIG) for reason in self.refused.values())


def _plausible(facts: NodeFacts) -> bool:
    """Return whether the facts of a node can be true; its classes would become those of the federation."""
    classes = facts.get("classes", ())
    if len(classes) > MOST_CLASSES or len(set(classes)) < len(classes):
        return False
    if not all(0 < len(name) <= 200 for name in classes):
        return False
    return bool(0 <= facts.get("examples", 0) <= MOST_IMAGES)


def _describe(facts: NodeFacts) -> str:
    """Return the facts of a node in short."""
    digest = str(facts.get("data", ""))[:8] or "none"
    return f"{facts.get('examples', 0)} images, digest {digest}"
