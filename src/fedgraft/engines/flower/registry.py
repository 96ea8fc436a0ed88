"""Which node serves which client: nodes come and go and have random numbers, clients are 0..K-1.

Every node is asked for its client number, which must be that of its registered key, and again while it does not
answer: it may have been restarted with the question in its hands. Of two nodes that claim the same number, the first
is kept and the other refused by name, until the first is gone. A refused node is asked again after a while: its owner
may have mended it. A node that joins late is asked when it is first seen. What a client said of its data when it was
first greeted stands for the whole run.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, Protocol

from fedgraft.core.errors import FedgraftError

log = logging.getLogger("fedgraft")
ASK_AGAIN = -2
"""Stands for the client number of a node that failed before it could say it."""
_AGAIN, _MEND = 60.0, 60.0  # seconds until a silent node is greeted again (then twice as many), and a refused one
_SOON = 5.0  # and one that failed at it
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

    def __init__(
        self,
        transport: Transport,
        clients: int,
        clock: Callable[[], float] = time.monotonic,
        members: Callable[[], Mapping[int, int]] | None = None,
    ) -> None:
        self.transport, self.clients, self.clock, self.members = transport, clients, clock, members
        """`members` says which client each node's key was registered for; None: nodes have no keys."""
        self._keys: Mapping[int, int] = {}
        self._rules: list[Callable[[Mapping[str, Any]], str]] = []
        """Each says of what a node tells of its data why it is left out, or nothing."""
        self.nodes: dict[int, int] = {}
        self.facts: dict[int, Mapping[str, Any]] = {}
        self.refused: dict[int, str] = {}
        self._asked: dict[str, int] = {}
        self._next: dict[int, tuple[float, float]] = {}
        """When a node that has not answered, or was refused, is greeted again, and after how long the next time."""

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
        self._next = {
            node: when
            for node, when in self._next.items()
            if node in present and (not gone or node in self._asked.values())
        }
        now, serving = self.clock(), set(self.nodes.values())
        due = sorted(node for node in present - serving if self._next.get(node, (0.0, 0.0))[0] <= now)
        if due:
            self._asked |= self.transport.greet(due)
            for node in due:
                pause = _MEND if node in self.refused else self._next.get(node, (0.0, _AGAIN))[1]
                self._next[node] = (now + pause, 2 * pause)
        answers = self.transport.greetings(list(self._asked)) if self._asked else {}
        for question, (client, facts, error) in answers.items():
            if question not in self._asked:  # an earlier question to it was answered in the same breath
                continue
            node = self._asked.pop(question)
            if node not in self.nodes.values():  # else an earlier question's late answer
                self._enter(node, client, facts, error)

    def _enter(self, node: int, client: int, facts: Mapping[str, Any], error: str) -> None:
        before = self.facts.get(client, facts)
        if client == ASK_AGAIN:  # it failed before it could say who it is: the next question is due soon
            log.warning("node %d did not say who it is (%s) and is asked again", node, error)
            self._next[node] = (self.clock() + _SOON, _AGAIN)
            return
        if error:
            reason = error
        elif not 0 <= client < self.clients:
            reason = f"it calls itself client {client}, and there are clients 0 to {self.clients - 1}"
        elif not _sane(facts):
            reason = (
                "it tells of itself what cannot be: a number of images below 0, or classes twice or by the thousand"
            )
        elif why := next(filter(None, (rule(facts) for rule in self._rules)), ""):
            reason = why
        elif facts != before:
            reason = f"client {client} has other data than when the run began ({_told(before)}, now {_told(facts)})"
        elif client in self.nodes:
            reason = f"client {client} is served by node {self.nodes[client]} already"
        elif (owner := self._owner(node, client)) != client:
            who = "of nobody here" if owner is None else f"that of client {owner}"
            reason = f"it calls itself client {client}, and its key is {who}"
        else:
            self.nodes[client], self.facts[client] = node, facts
            self.refused.pop(node, None)
            self._asked = {question: other for question, other in self._asked.items() if other != node}
            log.info("client %d is served by node %d", client, node)
            return
        if self.refused.get(node) != reason:
            log.warning("node %d is refused: %s", node, reason)
        self.refused[node] = reason
        self._next[node] = (self.clock() + _MEND, _MEND)

    def need_images(self) -> None:
        """From now on nodes have images of their own; whoever has none is left out by name and ends no run."""
        self.leave_out(lambda facts: "" if facts["classes"] else "it has no images of its own, and the others have")

    def leave_out(self, rule: Callable[[Mapping[str, Any]], str]) -> None:
        """From now on whoever tells of itself what this rule has a reason against is left out, by name."""
        self._rules.append(rule)
        for client in [k for k, facts in self.facts.items() if rule(facts)]:
            facts, node = self.facts.pop(client), self.nodes.pop(client, None)
            if node is not None:
                self._enter(node, client, facts, "")

    def _owner(self, node: int, claimed: int) -> int | None:
        """The client whose key this node proved to have; without keys, whom it claims to be."""
        if self.members is None:
            return claimed
        if node not in self._keys:  # it may have been registered since
            self._keys = self.members()
        return self._keys.get(node)

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


MOST_CLASSES, MOST_IMAGES = 50_000, 1 << 40


def _sane(facts: Mapping[str, Any]) -> bool:
    """Whether what a node says of its data can be; its classes would become everybody's."""
    classes = facts.get("classes", ())
    each = all(0 < len(name) <= 200 for name in classes) and len(set(classes)) == len(classes)
    return each and len(classes) <= MOST_CLASSES and 0 <= facts.get("examples", 0) <= MOST_IMAGES


def _told(facts: Mapping[str, Any]) -> str:
    return f"{facts.get('examples', 0)} images, digest {str(facts.get('data', ''))[:8] or 'none'}"
