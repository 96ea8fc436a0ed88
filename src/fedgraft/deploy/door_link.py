"""The run's side of the front door: messages to nodes go to it over a socket of this machine, large parts as files.

The socket lies in a folder that only this user can enter. A run that ends, for whatever reason, hangs up, and its
messages are withdrawn. Nothing here imports Flower.
"""

from __future__ import annotations

import hashlib
import json
import os
import secrets
import socket
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from fedgraft.core.errors import FedgraftError
from fedgraft.engines.flower.node_link import private_folder
from fedgraft.engines.flower.transport import Incoming, NodeTransport, Outgoing, Part, failure_sentence

SOCKET_VARIABLE = "FEDGRAFT_DOOR"
"""Environment variable with the path of the door's socket: a run of this server has it."""


def socket_path(federation: Path) -> Path:
    """Return the path of the socket by which runs reach the door of a federation; it is short."""
    name = hashlib.blake2b(str(federation.resolve()).encode(), digest_size=8).hexdigest()
    return private_folder() / f"door-{name}"


class DoorClosed(KeyboardInterrupt):
    """The door has ended while a run was connected: the run is interrupted, and can be resumed."""


class DoorSocket:
    """A connection to the door: questions and answers, one line of JSON each."""

    def __init__(self, path: Path) -> None:
        self.connection = socket.socket(socket.AF_UNIX)
        try:
            self.connection.connect(str(path))
        except OSError as error:
            raise _door_gone() from error
        self.file = self.connection.makefile("rb")

    def ask(self, **question: Any) -> dict[str, Any]:
        """Send a question and return the answer."""
        try:
            self.connection.sendall(json.dumps(question).encode() + b"\n")
            line = self.file.readline()
        except OSError as error:
            raise DoorClosed from error
        if not line:
            raise DoorClosed
        return dict(json.loads(line))

    def close(self) -> None:
        """Hang up."""
        self.file.close()
        self.connection.close()


def _door_gone() -> FedgraftError:
    """Return the error of a door that does not answer."""
    return FedgraftError(
        "E-DEPLOY-DOOR-GONE",
        "the server's front door does not answer",
        "start the server again and resume: fedgraft deploy submit FED --resume",
    )


class DoorTransport(NodeTransport):
    """Carries messages through the front door.

    Args:
        path: the door's socket.
        spool: the folder of large parts, on the same disk as the door's.
        settings: sent with every message: the run's config, folder, task and number.
    """

    def __init__(self, path: Path, spool: Path, settings: Mapping[str, Any]) -> None:
        self.door = DoorSocket(path)
        self.spool = spool
        self.settings = dict(settings)

    def present(self) -> set[int]:
        """Return the nodes that are connected now."""
        return set(self.door.ask(do="present")["nodes"])

    def push(self, messages: Sequence[Outgoing]) -> list[str | None]:
        """Send messages and return the id of each, None for one whose node is gone."""
        if not messages:
            return []
        files: dict[int, list[Any]] = {}
        described = []
        for message in messages:
            parts = {name: self._stored(part, files) for name, part in message.parts.items()}
            described.append(
                {
                    "id": secrets.token_hex(16),
                    "node": message.node,
                    "kind": message.kind,
                    "settings": {**self.settings, **message.settings},
                    "parts": parts,
                    "seconds": message.seconds,
                    "waits": message.waits,
                }
            )
        accepted = self.door.ask(do="push", messages=described)["accepted"]
        identities: list[str | None] = []
        for message_table, is_accepted in zip(described, accepted, strict=True):
            identities.append(str(message_table["id"]) if is_accepted else None)
        if not any(accepted):
            for file, _, _ in files.values():
                Path(file).unlink(missing_ok=True)
        return identities

    def _stored(self, part: Part, files: dict[int, list[Any]]) -> list[Any]:
        """Return file, size and digest of a part; it is written once for all messages of one call."""
        if id(part) not in files:
            path = self.spool / f"part-{secrets.token_hex(16)}"
            descriptor = os.open(path, os.O_CREAT | os.O_EXCL | os.O_WRONLY, 0o600)
            with os.fdopen(descriptor, "wb") as file:
                file.write(part.data)
            files[id(part)] = [str(path), len(part.data), part.digest]
        return files[id(part)]

    def pull(self, waiting: Iterable[str]) -> list[Incoming]:
        """Return the replies that have come by now; the door has checked the digests of their bytes."""
        incoming = []
        for reply in self.door.ask(do="pull", ids=list(waiting))["replies"]:
            incoming.append(_read_reply(reply))
        return incoming

    def withdraw(self, waiting: Iterable[str]) -> None:
        """Let the door forget these messages."""
        ids = list(waiting)
        if ids:
            self.door.ask(do="withdraw", ids=ids)

    def limit_responses(self, most: int) -> None:
        """Let the door refuse responses of more than `most` bytes before it receives them."""
        self.door.ask(do="limit", bytes=most)


def _read_reply(reply: Mapping[str, Any]) -> Incoming:
    """Return a reply, with the bytes of its response; their file is removed."""
    if reply.get("failure"):
        reason = failure_sentence(str(reply["failure"]))
        return Incoming(reply["id"], reply["node"], failure=reason, expired=bool(reply["expired"]))
    file = Path(reply["file"])
    parts = {"response": file.read_bytes()}
    file.unlink()
    return Incoming(reply["id"], reply["node"], parts, reply["settings"])


def synchronize_door(federation: Path) -> None:
    """Let a running door end the sessions of nodes whose key is no longer registered."""
    path = socket_path(federation)
    if path.exists():
        door = DoorSocket(path)
        try:
            door.ask(do="keys")
        finally:
            door.close()


def transfers(federation: Path) -> list[dict[str, Any]]:
    """Return how far the messages of a running federation and their answers have come, in bytes; empty without one."""
    path = socket_path(federation)
    if not path.exists():
        return []
    door = DoorSocket(path)
    try:
        return list(door.ask(do="transfers")["transfers"])
    finally:
        door.close()


def describe_transfer(transfer: Mapping[str, Any]) -> str:
    """Return in words how far a message to a node, or its answer, has come."""
    if not transfer["delivered"]:
        return "has not fetched its request yet"
    if transfer["up_total"]:
        return f"sends its answer, {_amount(transfer['up'], transfer['up_total'])}"
    if transfer["down"] < transfer["down_total"]:
        return f"receives its request, {_amount(transfer['down'], transfer['down_total'])}"
    return "works on its request"


def _amount(done: int, total: int) -> str:
    """Return a part of some bytes in words, both in the unit that fits the whole."""
    unit = "MB"
    scale = 1e6
    if total < 1e6:
        unit = "kB"
        scale = 1e3
    return f"{done / scale:.1f} of {total / scale:.1f} {unit} ({100 * done // max(1, total)} %)"
