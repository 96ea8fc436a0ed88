"""Messages between the server's engine and nodes, whatever carries them: Flower's grid or fedgraft's own front door.

A message to a node is a few byte strings (`Part`) with plain settings beside them, and so is its reply. Everything that
arrives is untrusted: the functions here return only values of the right type and never raise. Nothing imports Flower.
"""

from __future__ import annotations

import hashlib
from abc import ABC, abstractmethod
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

HELLO = "query.hello"
"""Kind of a greeting, which asks a node for its client number and the facts of its data."""
REQUEST = "train.request"
"""Kind of a request of a run."""
ASK_AGAIN = -2
"""Stands for the client number of a node that failed before it could report it."""


@dataclass(frozen=True, eq=False)
class Part:
    """A byte string of a message; one object in many messages is stored and hashed once."""

    data: bytes

    @cached_property
    def digest(self) -> str:
        """Return the SHA-256 of the bytes, in hexadecimal digits."""
        return hashlib.sha256(self.data).hexdigest()


@dataclass(frozen=True)
class Outgoing:
    """A message to a node."""

    node: int
    kind: str
    """`HELLO` or `REQUEST`."""
    parts: Mapping[str, Part]
    settings: Mapping[str, Any]
    seconds: float | None = None
    """How long the node has to answer; None: no limit."""
    group: str = ""
    waits: bool = False
    """Wait until `seconds` are over for a node that is gone, instead of giving the message up at once."""


@dataclass(frozen=True)
class Incoming:
    """The reply to a message, or the reason why there is none."""

    reply_to: str
    """Id of the message that it answers."""
    node: int
    parts: Mapping[str, bytes] = field(default_factory=dict)
    settings: Mapping[str, Any] = field(default_factory=dict)
    failure: str = ""
    """Why there is no answer, as the carrier reports it; empty if there is one."""
    expired: bool = False
    """The time to answer was over."""


class NodeTransport(ABC):
    """Carries messages to nodes and their replies back; the engine and the registry of nodes use it."""

    @abstractmethod
    def present(self) -> set[int]:
        """Return the nodes that are connected now."""

    @abstractmethod
    def push(self, messages: Sequence[Outgoing]) -> list[str | None]:
        """Send messages and return the id of each, None for one that was not accepted."""

    @abstractmethod
    def pull(self, waiting: Iterable[str]) -> Sequence[Incoming]:
        """Return the replies to these message ids that have come by now; does not wait."""

    def withdraw(self, waiting: Iterable[str]) -> None:  # noqa: B027  # a carrier that keeps nothing need not do anything
        """Forget these messages: their replies are no longer wanted."""

    def limit_responses(self, most: int) -> None:  # noqa: B027  # Flower's own port has no limit
        """From now on accept no response of more than `most` bytes, where the carrier can refuse one."""

    def greet(self, nodes: Sequence[int]) -> dict[str, int]:
        """Send these nodes a greeting, which asks for their client numbers; return the node by message id."""
        messages = [Outgoing(node, HELLO, {}, {"hello": True}) for node in nodes]
        questions = {}
        for question, node in zip(self.push(messages), nodes, strict=True):
            if question:
                questions[question] = node
        return questions

    def greetings(self, questions: Iterable[str]) -> dict[str, tuple[int, Mapping[str, Any], str]]:
        """Return the answers to greetings that have come: (client number, facts of its data, error) by message id.

        The client number is `ASK_AGAIN` where the carrier reports a failure.
        """
        answers: dict[str, tuple[int, Mapping[str, Any], str]] = {}
        for reply in self.pull(questions):
            client = ASK_AGAIN
            error = reply.failure
            if not reply.failure:
                client = whole_number(reply.settings, "client")
                error = text_setting(reply.settings, "error")
            facts = {
                "examples": whole_number(reply.settings, "examples", 0),
                "classes": name_list(reply.settings, "classes"),
                "data": text_setting(reply.settings, "data"),
            }
            answers[reply.reply_to] = (client, facts, error)
        return answers


# ---- settings from others --------------------------------------------------------------------------------------------


def whole_number(settings: Mapping[str, Any], name: str, default: int = -1) -> int:
    """Return a setting that must be an integer; the default if it is not."""
    value = settings.get(name)
    if type(value) is not int:
        return default
    return value


def text_setting(settings: Mapping[str, Any], name: str) -> str:
    """Return a setting that must be a text, as one printable line; empty if it is not."""
    value = settings.get(name)
    if not isinstance(value, str):
        return ""
    return printable(value)


def printable(sentence: str) -> str:
    """Return at most 500 characters of an untrusted text with control characters replaced by spaces.

    Control characters could move a cursor or begin a new line in a log.
    """
    letters = []
    for letter in sentence[:500]:
        if letter.isprintable():
            letters.append(letter)
        else:
            letters.append(" ")
    return "".join(letters)


def name_list(settings: Mapping[str, Any], name: str) -> tuple[str, ...]:
    """Return a setting that must be a list of texts, without control characters; empty if it is not."""
    value = settings.get(name)
    if not isinstance(value, list) or not all(isinstance(item, str) for item in value):
        return ()
    return tuple(map(printable, value))


def failure_sentence(reason: str) -> str:
    """Return a sentence about a failure at a node, with the reason that a `NodeTransport` gives, as one line."""
    return f"its node failed: {printable(reason.strip() or 'no reason')[:300]}"
