"""A node's connection to the server's front door: Flower's activation and heartbeats, and fedgraft's messages.

Requests to Flower's paths carry the node's signature over the time, as Flower's own nodes make it; the others carry the
token that the door gave at the activation. Nothing is read beyond what the node expects: every response has a bound,
and a part of a message is never longer than announced. Downloads and uploads go on at the byte where they broke.
"""

from __future__ import annotations

import base64
import datetime
import hashlib
import http.client
import json
import re
import ssl
import time
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path
from typing import Any

from fedgraft.core.errors import FedgraftError
from fedgraft.deploy.door_paths import (
    FLEET_BODY,
    KEY_IN_USE,
    OFFSET_HEADER,
    POLL_SECONDS,
    RECEIVED_HEADER,
    SESSION_HEADER,
    SETTINGS_BODY,
    VERSION_HEADER,
)

HEARTBEAT = 10.0
"""Seconds between a node's heartbeats; the server takes it for gone after twice as many."""
_SILENCE = 30.0  # seconds without a byte after which a connection counts as broken, whatever is being sent
SAVE_SECONDS = 2.0
"""A download is written to its file so often: what a killed node loses of it at most."""
_BLOCK = 1 << 16  # bytes that are sent or received at once; the slowest link needs less than `_SILENCE` for them
_DIGEST = re.compile("[0-9a-f]{64}")  # it becomes part of a file's name
_MESSAGE = re.compile("[0-9a-f]{32}")
_PROTOBUF = "application/protobuf"


class Unreachable(Exception):
    """The server does not answer, or the connection broke: try again."""


class NoSession(Exception):
    """The server does not know this node's session: activate again."""


class KeyInUse(Exception):
    """The key is registered, and an earlier process with it still counts as connected."""


class KeyRefused(Exception):
    """The key is not registered at the server."""


class Withdrawn(Exception):
    """The server no longer wants the answer to this message."""


class AnswerRefused(Exception):
    """The server does not take this answer: it is too large, or its bytes arrived damaged too often."""


@dataclass(frozen=True)
class Delivery:
    """A message from the server: what it announces of its parts are size and digest."""

    id: str
    kind: str
    settings: dict[str, Any]
    parts: dict[str, tuple[int, str]]

    @property
    def size(self) -> int:
        """Return the bytes of all parts."""
        return sum(size for size, _ in self.parts.values())


class Download:
    """A part of a message on its way: in memory, and in a file every few seconds, so that a killed node goes on there.

    On a quick link a part is whole before it would be written: files cost more than the transfer.
    """

    def __init__(self, file: Path) -> None:
        self.file = file
        self._blocks: list[bytes] = []
        self._unsaved: list[bytes] = []
        self._hash = hashlib.sha256()
        self._saved_at = time.monotonic()
        self.size = 0
        if file.exists():
            self._append(file.read_bytes())

    def _append(self, data: bytes) -> None:
        """Add bytes in memory."""
        self._blocks.append(data)
        self._hash.update(data)
        self.size += len(data)

    def add(self, data: bytes) -> None:
        """Add bytes that have come; write what is not in the file yet if that was long ago."""
        self._append(data)
        self._unsaved.append(data)
        if time.monotonic() - self._saved_at >= SAVE_SECONDS:
            self.flush()

    def flush(self) -> None:
        """Write what is not in the file yet."""
        if self._unsaved:
            with self.file.open("ab") as target:
                target.writelines(self._unsaved)
        self._unsaved = []
        self._saved_at = time.monotonic()

    @property
    def digest(self) -> str:
        """The SHA-256 of what is there."""
        return self._hash.hexdigest()

    def whole(self) -> bytes:
        """Return all bytes."""
        return b"".join(self._blocks)


class ServerLink:
    """A connection of one node; a second one sends its heartbeats (`twin`).

    Args:
        address: HOST:PORT of the front door.
        authority: the certificate that the server must be signed by.
        key: the node's private key.
    """

    def __init__(self, address: str, authority: Path, key: Path) -> None:
        from cryptography.hazmat.primitives import serialization

        self.address = address
        self.authority = authority
        self.key = key
        self.private: Any = serialization.load_ssh_private_key(
            key.read_bytes(), None
        )  # `check_private_key` knows its kind
        encoding = serialization.Encoding.PEM
        info = serialization.PublicFormat.SubjectPublicKeyInfo
        self.public = self.private.public_key().public_bytes(encoding, info)
        self.context = ssl.create_default_context(cafile=str(authority))
        self.connection: http.client.HTTPSConnection | None = None
        self.token = ""
        self.node = 0
        self.received = 0
        """Bytes of the present message that have come so far."""

    def twin(self) -> ServerLink:
        """Return another connection of the same node."""
        return ServerLink(self.address, self.authority, self.key)

    # ---- HTTP --------------------------------------------------------------------------------------------------------

    def _request(
        self,
        method: str,
        path: str,
        body: Any = None,
        headers: dict[str, str] | None = None,
        patience: float = _SILENCE,
    ) -> http.client.HTTPResponse:
        """Send a request and return the response, whose body is not read yet."""
        try:
            if self.connection is None:
                host, _, port = self.address.rpartition(":")
                self.connection = http.client.HTTPSConnection(
                    host.strip("[]"), int(port), context=self.context, timeout=_SILENCE, blocksize=_BLOCK
                )
                self.connection.connect()
            if self.connection.sock is not None:
                self.connection.sock.settimeout(patience)
            self.connection.request(method, path, body, headers or {})
            return self.connection.getresponse()
        except ssl.SSLCertVerificationError as error:
            self.close()
            raise self._certificate_error(error) from error
        except (OSError, http.client.HTTPException) as error:
            self.close()
            if isinstance(error, ssl.SSLError) and "WRONG_VERSION_NUMBER" in str(error):
                raise FedgraftError(
                    "E-DEPLOY-NODE-NO-TLS",
                    f"the server at {self.address} does not use TLS",
                    "check the address",
                    superlink=self.address,
                ) from error
            raise Unreachable(str(error)) from error

    def _certificate_error(self, error: ssl.SSLCertVerificationError) -> FedgraftError:
        """Return the reason why the server's certificate is refused."""
        if "mismatch" in str(error) or "not valid for" in str(error):
            host = self.address.rpartition(":")[0]
            return FedgraftError(
                "E-DEPLOY-NODE-CERTIFICATE-HOST",
                f"the server's certificate is not for {host!r}",
                "use the host that the coordinator used in `deploy init --host`",
                host=host,
            )
        return FedgraftError(
            "E-DEPLOY-NODE-CERTIFICATE",
            f"the server at {self.address} was not certified by {self.authority}",
            "ask the coordinator for the right ca.crt",
            superlink=self.address,
        )

    def _read(self, response: http.client.HTTPResponse, most: int) -> bytes:
        """Return the body of a response; break off one of more than `most` bytes."""
        try:
            body = response.read(most + 1)
        except (OSError, http.client.HTTPException) as error:
            self.close()
            raise Unreachable(str(error)) from error
        if len(body) > most:
            self.close()
            raise Unreachable("the server's response is too long")
        if response.will_close:
            self.close()
        return body

    def close(self) -> None:
        """Close the connection; the next request opens another one."""
        if self.connection is not None:
            self.connection.close()
        self.connection = None

    # ---- Flower's paths ----------------------------------------------------------------------------------------------

    def _fleet(self, path: str, message: Any, **more: str) -> tuple[http.client.HTTPResponse, bytes]:
        """Send a signed request of the Fleet API; return the response and its body."""
        from cryptography.hazmat.primitives import hashes
        from cryptography.hazmat.primitives.asymmetric import ec

        timestamp = datetime.datetime.now(datetime.UTC).isoformat()
        signature = self.private.sign(timestamp.encode(), ec.ECDSA(hashes.SHA256()))
        headers = {
            "content-type": _PROTOBUF,
            "accept": _PROTOBUF,
            "flwr-public-key": base64.b64encode(self.public).decode(),
            "flwr-timestamp": timestamp,
            "flwr-signature": base64.b64encode(signature).decode(),
            **more,
        }
        response = self._request("POST", f"/v1/fleet/{path}", message.SerializeToString(), headers)
        body = self._read(response, FLEET_BODY)
        if response.status >= 500:
            raise Unreachable(body.decode(errors="replace")[:200])
        return response, body

    def activate(self) -> None:
        """Connect this node: the SuperLink checks its key, the door gives the token of its session."""
        from flwr.proto.fleet_pb2 import ActivateNodeRequest, ActivateNodeResponse

        response, body = self._fleet(
            "activate-node", ActivateNodeRequest(public_key=self.public, heartbeat_interval=HEARTBEAT)
        )
        if response.status == 409 and body.decode(errors="replace") == KEY_IN_USE:
            raise KeyInUse
        if response.status != 200:
            raise KeyRefused
        theirs = response.getheader(VERSION_HEADER, "none")
        if theirs != version("fedgraft"):
            raise FedgraftError(
                "E-DEPLOY-NODE-VERSION",
                f"the server has fedgraft {theirs[:40]}, and this node {version('fedgraft')}",
                "install the same version on both sides",
                server=theirs[:40],
            )
        self.token = response.getheader(SESSION_HEADER, "")
        self.node = int(ActivateNodeResponse.FromString(body).node_id)

    def deactivate(self, node: int) -> None:
        """Disconnect this node; also a process of it that was killed, whose id is known."""
        from flwr.proto.fleet_pb2 import DeactivateNodeRequest

        self._fleet("deactivate-node", DeactivateNodeRequest(node_id=node))

    def heartbeat(self, node: int, received: int = 0) -> None:
        """Send a sign of life, with the bytes of the present message that have come so far."""
        from flwr.proto.heartbeat_pb2 import SendNodeHeartbeatRequest
        from flwr.proto.node_pb2 import Node

        message = SendNodeHeartbeatRequest(node=Node(node_id=node), heartbeat_interval=HEARTBEAT)
        self._fleet("send-node-heartbeat", message, **{RECEIVED_HEADER: str(received)})

    # ---- fedgraft's paths --------------------------------------------------------------------------------------------

    def _own(self, method: str, path: str, body: Any = None, **more: Any) -> http.client.HTTPResponse:
        """Send a request with the session's token; raise what its status says."""
        headers = {SESSION_HEADER: self.token, **more.pop("headers", {})}
        response = self._request(method, f"/v1/fedgraft/{path}", body, headers, **more)
        if response.status == 401:
            self._read(response, FLEET_BODY)
            raise NoSession
        if response.status == 410:
            self._read(response, FLEET_BODY)
            raise Withdrawn
        if response.status >= 500:
            self.close()
            raise Unreachable(f"status {response.status}")
        return response

    def poll(self) -> Delivery | None:
        """Wait for the next message, as long as the server holds the poll; None if none came."""
        response = self._own("POST", "next", patience=POLL_SECONDS + _SILENCE)
        body = self._read(response, SETTINGS_BODY)
        if response.status == 204:
            return None
        if response.status != 200:
            raise Unreachable(f"status {response.status}")
        try:
            return _parse_delivery(json.loads(body))
        except (ValueError, TypeError, KeyError, AttributeError, RecursionError):
            raise Unreachable("the server's message is malformed") from None

    def fetch(self, delivery: Delivery, name: str, file: Path) -> bytes:
        """Return a part, downloaded from the byte where an earlier attempt broke; its digest is checked at the end.

        `file` holds what has come of it when the line breaks or the process ends, and nothing once it is whole.
        """
        size, digest = delivery.parts[name]
        download = Download(file)
        self.received = download.size + sum(other for key, (other, _) in delivery.parts.items() if key < name)
        if download.size < size:
            headers = {OFFSET_HEADER: str(download.size)}
            response = self._own("GET", f"parts/{delivery.id}/{name}", headers=headers)
            if response.status != 200 or response.length != size - download.size:
                self.close()
                file.unlink(missing_ok=True)
                raise Unreachable("the server sends something else than it announced")
            self._save(response, size - download.size, download)
        file.unlink(missing_ok=True)
        if download.digest != digest or download.size != size:
            raise Unreachable("a part of the message arrived damaged")
        return download.whole()

    def _save(self, response: http.client.HTTPResponse, size: int, download: Download) -> None:
        """Add `size` bytes of a response to a download, as they come."""
        left = size
        try:
            while left:
                try:
                    data = response.read1(min(left, _BLOCK))
                except (OSError, http.client.HTTPException) as error:
                    self.close()
                    raise Unreachable(str(error)) from error
                if not data:
                    self.close()
                    raise Unreachable("the connection broke")
                download.add(data)
                left -= len(data)
                self.received += len(data)
        except BaseException:  # also where this process is ended: the next one goes on here
            download.flush()
            raise
        response.read()

    def answer(self, message: str, settings: dict[str, Any], data: bytes) -> None:
        """Send the answer to a message, from the byte where an earlier attempt broke."""
        digest = hashlib.sha256(data).hexdigest()
        described = {"settings": settings, "bytes": len(data), "digest": digest}
        response = self._own("POST", f"answers/{message}", json.dumps(described).encode())
        body = self._read(response, FLEET_BODY)
        if response.status != 200:
            raise AnswerRefused(body.decode(errors="replace")[:200])
        have = _have(body)
        if have >= len(data):
            return
        headers = {OFFSET_HEADER: str(have), "content-length": str(len(data) - have)}
        response = self._own("PUT", f"answers/{message}", _blocks(data, have), headers=headers)
        body = self._read(response, FLEET_BODY)
        if response.status in (409, 422):  # begin again: the server says from where
            raise Unreachable(body.decode(errors="replace")[:200])
        if response.status != 200:
            raise AnswerRefused(body.decode(errors="replace")[:200])


def _blocks(data: bytes, start: int) -> Any:
    """Yield the bytes from `start` on in blocks."""
    view = memoryview(data)
    for begin in range(start, len(data), _BLOCK):
        yield view[begin : begin + _BLOCK]


def _have(body: bytes) -> int:
    """Return how many bytes the server has, from its response."""
    try:
        have = json.loads(body)["have"]
    except (ValueError, TypeError, KeyError, RecursionError):
        raise Unreachable("the server's response is malformed") from None
    if type(have) is not int or have < 0:
        raise Unreachable("the server's response is malformed")
    return have


def _parse_delivery(table: Any) -> Delivery:
    """Return the message that a table describes; raise if it has another form."""
    parts = {}
    for name, (size, digest) in table["parts"].items():
        if name not in ("request", "opened") or type(size) is not int or size < 0 or not _DIGEST.fullmatch(digest):
            raise ValueError("not a part")
        parts[name] = (size, digest)
    identity, kind, settings = table["id"], table["kind"], table["settings"]
    if not _MESSAGE.fullmatch(identity) or not isinstance(kind, str):
        raise ValueError("not a message")
    if not isinstance(settings, dict):
        raise ValueError("not settings")
    return Delivery(identity, kind, settings, parts)
