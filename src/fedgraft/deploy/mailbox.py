"""What the front door knows: which nodes are connected, which messages wait for them, and how far each answer has come.

No network here. A node has a session from its activation at the SuperLink until it was silent for `GONE` seconds. A
message is delivered when its node asks for the next one, and delivered again if the node asks once more without having
answered: the response to its poll was lost on the way, or the node was restarted. After `MOST_DELIVERIES` of them, or
when the node is gone, the run gets the reason in place of the answer, at once. Answers are appended to files, byte by
byte as they arrive, so that an upload goes on where it broke; the digest of all of it decides at the end.
"""

from __future__ import annotations

import hashlib
import os
import secrets
import time
from collections import deque
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

GONE = 20.0
"""Seconds of silence after which a node counts as gone: twice the time between its heartbeats."""
RETURN = 5.0
"""Seconds in which a node that signed off may come back to its messages: one that is restarted does so at once."""
MOST_DELIVERIES = 3
"""How often a message is delivered in one session of its node before it counts as lost."""
MOST_RESTARTS = 20
"""How often a node may be restarted over one message: it may be the message that kills it."""
MOST_UPLOADS = 3
"""How often the bytes of an answer may not have the digest that was announced."""
REQUEST_LOST = "the node continued without answering this request"
"""The reason that a run gets in place of the answer to a request that will never be answered."""
NODE_GONE = "its node was silent for so long that it counts as gone"
LEAST_RESPONSE_LIMIT = 64 << 20
"""The limit for responses before a run has stated a larger one."""


def response_too_large(limit: int) -> str:
    """Return the reason that the run gets in place of a response over the limit."""
    return f"its response is larger than the limit of {limit >> 20} MB"


class Unknown(Exception):
    """There is no such message for this node; the run may have withdrawn it."""


class TooLarge(Exception):
    """An answer is over the limit."""


class WrongOffset(Exception):
    """An upload does not begin where the one before ended; `have` are the bytes that are there."""

    def __init__(self, have: int) -> None:
        self.have = have


class WrongDigest(Exception):
    """The bytes of an answer do not have the digest that was announced."""


@dataclass
class Session:
    """A connected node."""

    node: int
    key: bytes
    """The public key by which the SuperLink admitted it."""
    token: str
    seen: float
    """When it was last heard of."""
    polls: int = 0
    """Number of its latest poll; an earlier one that still waits is over."""


@dataclass
class StoredPart:
    """A byte string of a message, in a file of the server's machine."""

    file: Path
    size: int
    digest: str


@dataclass
class Answer:
    """An answer on its way: its settings, and the bytes that have come so far."""

    settings: Mapping[str, Any]
    size: int
    digest: str
    file: Path
    have: int = 0
    complete: bool = False
    faults: int = 0
    hash: Any = field(default_factory=hashlib.sha256)


@dataclass
class Letter:
    """A message for a node, from its arrival until the run has the answer."""

    id: str
    node: int
    kind: str
    settings: Mapping[str, Any]
    parts: dict[str, StoredPart]
    expires: float | None
    """When its time to be answered is over; None: never."""
    waits: bool = False
    """It stays until then if its node is gone, which may come back."""
    deliveries: int = 0
    """How often it was delivered in the present session of its node."""
    restarts: int = 0
    sent: int = 0
    """Bytes of its parts that were sent to the node, for the display of progress; many may still be on the way."""
    received: int | None = None
    """Bytes that the node says it has received; None: it has said nothing yet."""
    answer: Answer | None = None
    failure: str = ""
    expired: bool = False

    @property
    def over(self) -> bool:
        """Return whether the run can have the outcome."""
        return bool(self.failure) or (self.answer is not None and self.answer.complete)

    @property
    def size(self) -> int:
        """Return the bytes of all parts."""
        return sum(part.size for part in self.parts.values())


class Mailbox:
    """Sessions of nodes and the messages for them.

    Args:
        folder: where answers are written; only this user can enter it.
        clock: returns seconds; replaced in tests.
    """

    def __init__(self, folder: Path, clock: Callable[[], float] = time.monotonic) -> None:
        self.folder = folder
        self.clock = clock
        self.sessions: dict[str, Session] = {}
        """By token."""
        self.letters: dict[str, Letter] = {}
        self.queues: dict[int, deque[str]] = {}
        """Messages of each node that it has not answered, in order."""
        self.left: dict[int, float] = {}
        """When a node signed off that may come back."""
        self.limit = LEAST_RESPONSE_LIMIT
        self.arrived: Callable[[int], None] = lambda node: None
        """Called with the node for which a message arrived."""

    # ---- nodes -------------------------------------------------------------------------------------------------------

    def admit(self, node: int, key: bytes) -> Session:
        """Begin the session of a node that the SuperLink has activated; an earlier one of this node is over.

        A message that it has not answered is delivered again.
        """
        self.dismiss(node)
        self.left.pop(node, None)
        for name in list(self.queues.get(node, ())):
            letter = self.letters[name]
            if not letter.deliveries:
                continue
            letter.deliveries = 0
            letter.restarts += 1
            if letter.restarts > MOST_RESTARTS:
                self._fail(letter, REQUEST_LOST)
        session = Session(node, key, secrets.token_urlsafe(32), self.clock())
        self.sessions[session.token] = session
        return session

    def dismiss(self, node: int) -> None:
        """End the session of a node; its messages wait for its return."""
        self.sessions = {token: session for token, session in self.sessions.items() if session.node != node}

    def sign_off(self, key: bytes) -> None:
        """End the session of the node with this key, at its own wish; it may come back to its messages soon."""
        for session in self.sessions.values():
            if session.key == key:
                self.left[session.node] = self.clock()
        self.dismiss_key(key)

    def dismiss_key(self, key: bytes) -> None:
        """End the session of the node with this key."""
        self.sessions = {token: session for token, session in self.sessions.items() if session.key != key}

    def keep_keys(self, keys: Iterable[bytes]) -> None:
        """End the sessions of all nodes whose key is not among these."""
        kept = set(keys)
        self.sessions = {token: session for token, session in self.sessions.items() if session.key in kept}

    def session(self, token: str) -> Session | None:
        """Return the session of a token and note that its node was heard of; None if there is none."""
        session = self.sessions.get(token)
        if session is None:
            return None
        session.seen = self.clock()
        return session

    def heard_of(self, key: bytes, received: int | None = None) -> None:
        """Note a sign of life of the node with this key, and how much of its present message it has received."""
        for session in self.sessions.values():
            if session.key != key:
                continue
            session.seen = self.clock()
            for name in list(self.queues.get(session.node, ()))[:1]:
                self.letters[name].received = received

    def present(self) -> set[int]:
        """Return the nodes that are connected."""
        return {session.node for session in self.sessions.values()}

    def expire(self) -> None:
        """End sessions of silent nodes, and give up messages whose node is gone or whose time is over."""
        now = self.clock()
        for session in list(self.sessions.values()):
            if now - session.seen > GONE:
                del self.sessions[session.token]
        present = self.present()
        for node in [node for node, when in self.left.items() if now - when > RETURN]:
            del self.left[node]
        for letter in self.letters.values():
            if letter.over:
                continue
            if letter.expires is not None and now >= letter.expires:
                self._fail(letter, "its time to answer was over", expired=True)
            elif letter.node not in present and letter.node not in self.left and not letter.waits:
                self._fail(letter, NODE_GONE)

    # ---- the run's side ----------------------------------------------------------------------------------------------

    def post(self, letter: Letter) -> bool:
        """Queue a message for a node and announce it; return whether the node is connected (else nothing is kept)."""
        if letter.node not in self.present():
            return False
        self.letters[letter.id] = letter
        self.queues.setdefault(letter.node, deque()).append(letter.id)
        self.arrived(letter.node)
        return True

    def collect(self, ids: Iterable[str]) -> list[Letter]:
        """Return those of these messages that are over, and forget them; the files of answers are the caller's."""
        done = []
        for name in ids:
            letter = self.letters.get(name)
            if letter is not None and letter.over:
                done.append(letter)
                self._forget(letter)
        return done

    def withdraw(self, ids: Iterable[str]) -> None:
        """Forget these messages and what has come of their answers."""
        for name in ids:
            letter = self.letters.get(name)
            if letter is not None:
                self._forget(letter)
                if letter.answer is not None:
                    letter.answer.file.unlink(missing_ok=True)

    def _forget(self, letter: Letter) -> None:
        """Remove a message, and those of its parts that no other message has."""
        del self.letters[letter.id]
        self._unqueue(letter)
        used = {part.file for other in self.letters.values() for part in other.parts.values()}
        for part in letter.parts.values():
            if part.file not in used:
                part.file.unlink(missing_ok=True)

    def _unqueue(self, letter: Letter) -> None:
        """Take a message out of its node's queue."""
        queue = self.queues.get(letter.node)
        if queue is not None and letter.id in queue:
            queue.remove(letter.id)

    def _fail(self, letter: Letter, reason: str, expired: bool = False) -> None:
        """Give a message up: the run gets the reason, and whether its time was over (`expired`).

        Its answer so far is deleted.
        """
        letter.failure = reason
        letter.expired = expired
        self._unqueue(letter)
        if letter.answer is not None:
            letter.answer.file.unlink(missing_ok=True)

    # ---- the node's side ---------------------------------------------------------------------------------------------

    def next_letter(self, node: int) -> Letter | None:
        """Return the next message of a node, which now counts as delivered; None if there is none.

        A message that it got before and has not answered comes again, up to `MOST_DELIVERIES` times.
        """
        queue = self.queues.get(node)
        while queue:
            letter = self.letters[queue[0]]
            if letter.deliveries >= MOST_DELIVERIES:
                self._fail(letter, REQUEST_LOST)
                continue
            letter.deliveries += 1
            letter.sent = 0
            letter.received = None
            return letter
        return None

    def letter(self, node: int, name: str) -> Letter:
        """Return a message that was delivered to this node and waits for an answer."""
        letter = self.letters.get(name)
        if letter is None or letter.node != node or letter.over or not letter.deliveries:
            raise Unknown
        return letter

    def begin_answer(self, letter: Letter, settings: Mapping[str, Any], size: int, digest: str) -> int:
        """Note what a node is about to answer; return how many of its bytes are here from an earlier attempt.

        Raises `TooLarge` if it is over the limit: the run gets that as the reason.
        """
        if size > self.limit:
            self._fail(letter, response_too_large(self.limit))
            raise TooLarge
        earlier = letter.answer
        if earlier is None or (earlier.size, earlier.digest) != (size, digest):
            file = self.folder / f"answer-{letter.id}"
            file.unlink(missing_ok=True)
            letter.answer = Answer(settings, size, digest, file)
            os.close(os.open(file, os.O_CREAT | os.O_EXCL | os.O_WRONLY, 0o600))
        assert letter.answer is not None
        if not size:
            self._complete(letter, letter.answer)
        return letter.answer.have

    def append(self, letter: Letter, offset: int, data: bytes) -> None:
        """Append bytes to an answer; they must begin where the ones before ended."""
        answer = letter.answer
        if answer is None:
            raise WrongOffset(0)
        if offset != answer.have or offset + len(data) > answer.size:
            raise WrongOffset(answer.have)
        with answer.file.open("ab") as file:
            file.write(data)
        answer.hash.update(data)
        answer.have += len(data)
        if answer.have == answer.size:
            self._finish(letter, answer)

    def _finish(self, letter: Letter, answer: Answer) -> None:
        """Check the digest of an answer whose bytes are all here; it begins anew if they are not those announced."""
        if answer.hash.hexdigest() == answer.digest:
            self._complete(letter, answer)
            return
        answer.faults += 1
        answer.have = 0
        answer.hash = hashlib.sha256()
        os.truncate(answer.file, 0)
        if answer.faults >= MOST_UPLOADS:
            self._fail(letter, "the bytes of its answer are not those that it announced")
        raise WrongDigest

    def _complete(self, letter: Letter, answer: Answer) -> None:
        """Note that an answer is whole."""
        answer.complete = True
        self._unqueue(letter)
