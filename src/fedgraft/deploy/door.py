"""The front door of a federation: the one port that nodes reach, in front of a stock SuperLink on loopback.

It terminates TLS and serves two kinds of paths. Three of Flower's Fleet API (activate, deactivate, heartbeat) are
passed on to the SuperLink, which authenticates nodes by their registered keys. And fedgraft's own: a node that the
SuperLink has activated gets a token for them, polls for its next message and is held until there is one, fetches the
message's parts and sends its answer, both from the byte where an earlier attempt broke. Nothing else is reachable from
outside, whatever a SuperLink serves; every body is bounded before it is read, and none is held in memory.

The run, a process of the same machine, talks to the door over a socket in a private folder (`door_link`); large byte
strings lie in files beside it. `python -m fedgraft.deploy.door OPTIONS...` starts door and SuperLink.
"""

from __future__ import annotations

import argparse
import asyncio
import base64
import datetime
import json
import os
import re
import signal
import ssl
import sys
from collections.abc import AsyncIterator, Awaitable, Callable, MutableMapping
from importlib.metadata import version
from pathlib import Path
from typing import Any

from fedgraft.deploy import process as processes
from fedgraft.deploy.door_paths import (
    FLEET_BODY,
    FLEET_PATHS,
    KEY_IN_USE,
    OFFSET_HEADER,
    POLL_SECONDS,
    RECEIVED_HEADER,
    SESSION_HEADER,
    SETTINGS_BODY,
    VERSION_HEADER,
)
from fedgraft.deploy.keys import flower_key_bytes
from fedgraft.deploy.mailbox import Letter, Mailbox, Session, StoredPart, TooLarge, Unknown, WrongDigest, WrongOffset

Scope = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[MutableMapping[str, Any]]]
Send = Callable[[MutableMapping[str, Any]], Awaitable[None]]

_FORWARDED_HEADERS = (b"content-type", b"accept", b"flwr-public-key", b"flwr-timestamp", b"flwr-signature")
_STEP = 1 << 17  # bytes of a part that are read and sent at once
_LETTER_PATH = re.compile(r"/v1/fedgraft/(parts|answers)/([0-9a-f]{32})(?:/([a-z]{1,20}))?")
_CLOCKS_DIFFER = 300.0  # seconds that a signed time may be off, as at the SuperLink
_SOCKET_LINE = 64 << 20  # most bytes of one question of the run


class Door:
    """The ASGI app of the nodes' port, and the run's side of it.

    Args:
        mailbox: sessions and messages.
        forward: passes a request of the Fleet API on: (path, headers, body) to (status, content type, body).
        registered_keys: returns the public keys that the coordinator has registered.
    """

    def __init__(
        self,
        mailbox: Mailbox,
        forward: Callable[[str, dict[str, str], bytes], Awaitable[tuple[int, str, bytes]]],
        registered_keys: Callable[[], set[bytes]],
    ) -> None:
        self.mailbox = mailbox
        self.forward = forward
        self.registered_keys = registered_keys
        self.bells: dict[int, asyncio.Event] = {}
        mailbox.arrived = self._ring

    def _ring(self, node: int) -> None:
        """Wake the poll of a node."""
        if node in self.bells:
            self.bells[node].set()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serve one request of a node; everything that is not a node's is answered with 403."""
        if scope["type"] != "http":
            return
        path = str(scope["path"])
        method = str(scope["method"])
        headers = dict(scope["headers"])
        if method == "POST" and path in FLEET_PATHS:
            await self._fleet(path, headers, receive, send)
            return
        if not path.startswith("/v1/fedgraft/"):
            await _respond(send, 403, b"this port serves nothing but the nodes of its federation")
            return
        session = self.mailbox.session(headers.get(SESSION_HEADER.encode(), b"").decode("latin-1"))
        if session is None:
            await _respond(send, 401, b"no session: activate the node")
            return
        match = _LETTER_PATH.fullmatch(path)
        try:
            if method == "POST" and path == "/v1/fedgraft/next":
                await self._next(session, headers, receive, send)
            elif match is not None and match[1] == "parts" and match[3] and method == "GET":
                await self._send_part(session, match[2], match[3], headers, send)
            elif match is not None and match[1] == "answers" and not match[3] and method == "POST":
                await self._begin_answer(session, match[2], headers, receive, send)
            elif match is not None and match[1] == "answers" and not match[3] and method == "PUT":
                await self._append_answer(session, match[2], headers, receive, send)
            else:
                await _respond(send, 404, b"there is no such path")
        except Unknown:
            await _respond(send, 410, b"this message is not wanted any more")
        except _BadRequest as error:
            await _respond(send, error.status, error.reason, close=True)

    # ---- Flower's paths ----------------------------------------------------------------------------------------------

    async def _fleet(self, path: str, headers: dict[bytes, bytes], receive: Receive, send: Send) -> None:
        """Pass a request of the Fleet API on to the SuperLink, and learn from its answer who is connected."""
        try:
            body = await _read_body(headers, receive, FLEET_BODY)
        except _BadRequest as error:
            await _respond(send, error.status, error.reason, close=True)
            return
        forwarded = {}
        for name in _FORWARDED_HEADERS:
            if name in headers:
                forwarded[name.decode()] = headers[name].decode("latin-1")
        key = signing_key(headers)
        if key is None:  # nobody can speak for another's key, not even to end its session
            await _respond(send, 401, b"Invalid SuperNode authentication", close=True)
            return
        status, content_type, answer = await self.forward(path, forwarded, body)
        extra: list[tuple[bytes, bytes]] = [(VERSION_HEADER.encode(), version("fedgraft").encode())]
        action = path.rpartition("/")[2]
        if 400 <= status < 500:
            self.mailbox.dismiss_key(key)
            if action == "activate-node" and status != 401 and key in self.registered_keys():
                status, content_type, answer = 409, "text/plain", KEY_IN_USE.encode()
        elif status == 200 and action == "activate-node":
            session = self.mailbox.admit(_activated_node(answer), key)
            extra.append((SESSION_HEADER.encode(), session.token.encode()))
        elif status == 200 and action == "deactivate-node":
            self.mailbox.sign_off(key)
        elif status == 200:
            self.mailbox.heard_of(key, _received(headers))
        await _respond(send, status, answer, content_type, extra)

    # ---- fedgraft's paths --------------------------------------------------------------------------------------------

    async def _next(self, session: Session, headers: dict[bytes, bytes], receive: Receive, send: Send) -> None:
        """Answer a poll with the node's next message, held until there is one; 204 if none came."""
        await _read_body(headers, receive, 0)
        session.polls += 1
        poll = session.polls
        bell = self.bells.setdefault(session.node, asyncio.Event())
        bell.set()  # an earlier poll of this node is over
        gone = asyncio.ensure_future(receive())  # completes when the node hangs up
        deadline = asyncio.get_running_loop().time() + POLL_SECONDS
        letter = None
        try:
            while poll == session.polls and session.token in self.mailbox.sessions:
                letter = self.mailbox.next_letter(session.node)
                left = deadline - asyncio.get_running_loop().time()
                if letter is not None or left <= 0 or gone.done():
                    break
                bell.clear()
                ring = asyncio.ensure_future(bell.wait())
                await asyncio.wait({ring, gone}, timeout=left, return_when=asyncio.FIRST_COMPLETED)
                ring.cancel()
        finally:
            gone.cancel()
        session.seen = self.mailbox.clock()
        if letter is None:
            await _respond(send, 204, b"")
            return
        parts = {name: [part.size, part.digest] for name, part in letter.parts.items()}
        described = {"id": letter.id, "kind": letter.kind, "settings": letter.settings, "parts": parts}
        await _respond(send, 200, json.dumps(described).encode(), "application/json")

    async def _send_part(
        self, session: Session, name: str, part_name: str, headers: dict[bytes, bytes], send: Send
    ) -> None:
        """Send a part of a message from the offset that the node names."""
        letter = self.mailbox.letter(session.node, name)
        part = letter.parts.get(part_name)
        offset = _offset(headers)
        if part is None or offset > part.size:
            raise Unknown
        length = (b"content-length", str(part.size - offset).encode())
        start = {"type": "http.response.start", "status": 200, "headers": [length]}
        await send(start)
        before = sum(other.size for key, other in letter.parts.items() if key < part_name)
        with part.file.open("rb") as file:
            file.seek(offset)
            while offset < part.size:
                data = file.read(min(_STEP, part.size - offset))
                if not data:
                    return  # the file is shorter than announced: the connection breaks off
                offset += len(data)
                letter.sent = before + offset
                session.seen = self.mailbox.clock()
                await send({"type": "http.response.body", "body": data, "more_body": offset < part.size})
        if not part.size:
            await send({"type": "http.response.body", "body": b""})

    async def _begin_answer(
        self, session: Session, name: str, headers: dict[bytes, bytes], receive: Receive, send: Send
    ) -> None:
        """Take the settings, size and digest of an answer; reply with the bytes that are here already."""
        letter = self.mailbox.letter(session.node, name)
        body = await _read_body(headers, receive, SETTINGS_BODY)
        try:
            described = json.loads(body)
            settings, size, digest = described["settings"], described["bytes"], described["digest"]
        except (ValueError, TypeError, KeyError, RecursionError):
            raise _BadRequest(400, b"not an answer") from None
        if not isinstance(settings, dict) or type(size) is not int or size < 0 or not isinstance(digest, str):
            raise _BadRequest(400, b"not an answer")
        try:
            have = self.mailbox.begin_answer(letter, settings, size, digest)
        except TooLarge:
            raise _BadRequest(413, b"the answer is larger than this run can need") from None
        await _respond(send, 200, json.dumps({"have": have}).encode(), "application/json")

    async def _append_answer(
        self, session: Session, name: str, headers: dict[bytes, bytes], receive: Receive, send: Send
    ) -> None:
        """Append the bytes of an answer as they come; what came before a break is kept."""
        letter = self.mailbox.letter(session.node, name)
        answer = letter.answer
        offset = _offset(headers)
        if answer is None or offset != answer.have or _declared(headers) != answer.size - offset:
            have = 0
            if answer is not None:
                have = answer.have
            await _respond(send, 409, json.dumps({"have": have}).encode(), "application/json", close=True)
            return
        try:
            async for data in _body_parts(receive):
                self.mailbox.letter(session.node, name)  # it may have been withdrawn since
                self.mailbox.append(letter, offset, data)
                offset += len(data)
                session.seen = self.mailbox.clock()
        except WrongOffset as error:
            raise _BadRequest(409, json.dumps({"have": error.have}).encode()) from None
        except WrongDigest:
            raise _BadRequest(422, b"the bytes do not have the digest that was announced") from None
        await _respond(send, 200, b"")

    # ---- the run's side ----------------------------------------------------------------------------------------------

    async def serve_run(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """Answer the questions of one run, a line of JSON each; its messages are withdrawn when it hangs up."""
        posted: set[str] = set()
        try:
            while line := await reader.readline():
                reply = self.answer_run(json.loads(line), posted)
                writer.write(json.dumps(reply).encode() + b"\n")
                await writer.drain()
        except (ConnectionError, asyncio.IncompleteReadError, asyncio.CancelledError):
            pass  # the run hung up, or the door ends
        finally:
            self.mailbox.withdraw(posted)
            writer.close()

    def answer_run(self, question: dict[str, Any], posted: set[str]) -> dict[str, Any]:
        """Carry out what a run asks (`do`: "push", "pull", "withdraw", ...) and return the answer, both as JSON.

        `posted` are the ids of the messages that the run has sent and not collected yet; it is changed in place.
        """
        mailbox = self.mailbox
        mailbox.expire()
        what = question["do"]
        if what == "push":
            accepted = []
            for message in question["messages"]:
                letter = _letter(message, mailbox.clock())
                accepted.append(mailbox.post(letter))
                posted.add(letter.id)
            return {"accepted": accepted}
        if what == "pull":
            letters = mailbox.collect(question["ids"])
            posted.difference_update(letter.id for letter in letters)
            return {"replies": [_reply(letter) for letter in letters]}
        if what == "withdraw":
            mailbox.withdraw(question["ids"])
            posted.difference_update(question["ids"])
        elif what == "limit":
            mailbox.limit = int(question["bytes"])
        elif what == "keys":
            mailbox.keep_keys(self.registered_keys())
        elif what == "transfers":
            return {"transfers": [_transfer(letter) for letter in mailbox.letters.values() if not letter.over]}
        return {"nodes": sorted(mailbox.present())}


def _letter(message: dict[str, Any], now: float) -> Letter:
    """Return a message that the run wants sent, from its JSON `message`; its time to answer begins at `now`."""
    parts = {}
    for name, (file, size, digest) in message["parts"].items():
        parts[name] = StoredPart(Path(file), size, digest)
    expires = None
    if message["seconds"] is not None:
        expires = now + message["seconds"]
    kind, settings = message["kind"], message["settings"]
    return Letter(message["id"], message["node"], kind, settings, parts, expires, message["waits"])


def _reply(letter: Letter) -> dict[str, Any]:
    """Return the outcome of a message as JSON for the run: settings and file of the answer, or why it failed."""
    reply: dict[str, Any] = {"id": letter.id, "node": letter.node}
    if letter.failure or letter.answer is None:
        return reply | {"failure": letter.failure, "expired": letter.expired}
    return reply | {"settings": letter.answer.settings, "file": str(letter.answer.file)}


def _transfer(letter: Letter) -> dict[str, Any]:
    """Return as JSON how far a message (`down`) and its answer (`up`) have come, in bytes, and their totals."""
    down = letter.sent
    if letter.received is not None:
        down = min(down, letter.received)
    transfer = {"node": letter.node, "down": down, "down_total": letter.size, "up": 0, "up_total": 0}
    if letter.answer is not None:
        transfer |= {"up": letter.answer.have, "up_total": letter.answer.size}
    return transfer | {"delivered": letter.deliveries > 0}


# ---- HTTP ------------------------------------------------------------------------------------------------------------


class _BadRequest(Exception):
    """A request that is refused, with its status and reason; the connection is closed."""

    def __init__(self, status: int, reason: bytes) -> None:
        self.status = status
        self.reason = reason


async def _respond(
    send: Send,
    status: int,
    body: bytes,
    content_type: str = "text/plain",
    extra: list[tuple[bytes, bytes]] | None = None,
    close: bool = False,
) -> None:
    """Send a response of a few bytes, with `extra` headers; `close`: the connection ends with it."""
    headers = [(b"content-type", content_type.encode()), *(extra or ())]
    if status != 204:
        headers.append((b"content-length", str(len(body)).encode()))
    if close:
        headers.append((b"connection", b"close"))
    await send({"type": "http.response.start", "status": status, "headers": headers})
    await send({"type": "http.response.body", "body": body})


def _declared(headers: dict[bytes, bytes]) -> int:
    """Return the declared length of a body; -1 if there is none, as in a body of chunks."""
    declared = headers.get(b"content-length", b"")
    if b"transfer-encoding" in headers or not declared.isdigit() or len(declared) > 18:
        return -1
    return int(declared)


def _offset(headers: dict[bytes, bytes]) -> int:
    """Return the offset that a node names; 0 without one."""
    value = headers.get(OFFSET_HEADER.encode(), b"0")
    if not value.isdigit() or len(value) > 18:
        raise _BadRequest(400, b"not an offset")
    return int(value)


def _received(headers: dict[bytes, bytes]) -> int | None:
    """Return how many bytes of its message a node says that it has received; None if it says nothing."""
    value = headers.get(RECEIVED_HEADER.encode(), b"")
    if not value.isdigit() or len(value) > 18:
        return None
    return int(value)


async def _body_parts(receive: Receive) -> AsyncIterator[bytes]:
    """Yield the body of a request as it comes; end early if the node hangs up."""
    while True:
        message = await receive()
        if message["type"] != "http.request":
            return
        if message.get("body"):
            yield message["body"]
        if not message.get("more_body"):
            return


async def _read_body(headers: dict[bytes, bytes], receive: Receive, most: int) -> bytes:
    """Return a body of at most `most` bytes; refuse a longer one before it is read."""
    declared = _declared(headers)
    if declared < 0 and b"content-length" not in headers and b"transfer-encoding" not in headers:
        declared = 0
    if not 0 <= declared <= most:
        raise _BadRequest(413, b"longer than such a request can be")
    body = bytearray()
    async for data in _body_parts(receive):
        body += data
    return bytes(body)


def signing_key(headers: dict[bytes, bytes]) -> bytes | None:
    """Return the public key of who signed a request as Flower's nodes do, its time, just now; None if nobody did."""
    from cryptography.exceptions import InvalidSignature, UnsupportedAlgorithm
    from cryptography.hazmat.primitives import hashes, serialization
    from cryptography.hazmat.primitives.asymmetric import ec

    try:
        key = base64.b64decode(headers[b"flwr-public-key"], validate=True)
        signature = base64.b64decode(headers[b"flwr-signature"], validate=True)
        signed_at = headers[b"flwr-timestamp"]
        age = (
            datetime.datetime.now(datetime.UTC) - datetime.datetime.fromisoformat(signed_at.decode())
        ).total_seconds()
        public = serialization.load_pem_public_key(key)
        if abs(age) > _CLOCKS_DIFFER or not isinstance(public, ec.EllipticCurvePublicKey):
            return None
        public.verify(signature, signed_at, ec.ECDSA(hashes.SHA256()))
    except (KeyError, ValueError, TypeError, UnsupportedAlgorithm, InvalidSignature):
        return None
    return key


def _activated_node(answer: bytes) -> int:
    """Return the node's id in the SuperLink's answer to its activation."""
    from flwr.proto.fleet_pb2 import ActivateNodeResponse

    return int(ActivateNodeResponse.FromString(answer).node_id)


# ---- the process -----------------------------------------------------------------------------------------------------


def main() -> None:
    """Start the SuperLink on loopback and the door in front of it; both end together."""
    parser = argparse.ArgumentParser(prog="fedgraft.deploy.door")
    parser.add_argument("--folder", type=Path, required=True, help="the federation's folder")
    parser.add_argument("--host", required=True)
    parser.add_argument("--port", type=int, required=True)
    parser.add_argument("--control-port", type=int, required=True, help="the SuperLink's, on loopback")
    options = parser.parse_args()
    processes.end_with_parent()
    os.umask(0o077)
    asyncio.run(serve(options.folder, options.host, options.port, options.control_port))


async def serve(folder: Path, host: str, port: int, control_port: int) -> None:
    """Serve nodes and runs until the door or the SuperLink ends; then end both.

    Nodes connect to `host` and `port`, Flower's control to `control_port`.
    """
    import uvicorn

    from fedgraft.deploy.door_link import SOCKET_VARIABLE, socket_path
    from fedgraft.deploy.folder import open_federation

    federation = open_federation(folder)
    spool = federation.home / "spool"
    spool.mkdir(mode=0o700, exist_ok=True)
    for left_over in spool.iterdir():  # of a door that was killed
        left_over.unlink()
    door_socket = socket_path(federation.path)
    door_socket.unlink(missing_ok=True)

    def registered_keys() -> set[bytes]:
        return {flower_key_bytes(federation.key(name)) for name in federation.registered()}

    forwarder = SuperLinkForwarder(f"https://127.0.0.1:{control_port}", federation.authority)
    door = Door(Mailbox(spool), forwarder, registered_keys)
    runs = await asyncio.start_unix_server(door.serve_run, door_socket, limit=_SOCKET_LINE)
    command = superlink_command(federation, control_port)
    guard = processes.guard_command(command)
    superlink = await asyncio.create_subprocess_exec(
        *guard, env=processes.bound_environment(os.environ | {SOCKET_VARIABLE: str(door_socket)})
    )
    config = uvicorn.Config(
        door,
        host=host,
        port=port,
        http="h11",  # bounds the headers of a request, which httptools does not
        ws="none",
        lifespan="off",
        ssl_certfile=federation.certificates / "server.crt",
        ssl_keyfile=str(federation.certificates / "server.key"),
        ssl_version=ssl.PROTOCOL_TLS_SERVER,
        timeout_keep_alive=120,
        timeout_graceful_shutdown=1,
        limit_concurrency=4096,
        log_level="warning",
        access_log=False,
        server_header=False,
    )
    server = uvicorn.Server(config)
    serving = asyncio.ensure_future(server.serve())
    watching = asyncio.ensure_future(superlink.wait())
    expiring = asyncio.ensure_future(_expire(door.mailbox))
    await asyncio.wait({serving, watching}, return_when=asyncio.FIRST_COMPLETED)
    server.should_exit = True
    if superlink.returncode is None:
        superlink.send_signal(signal.SIGTERM)
    await asyncio.gather(serving, superlink.wait(), return_exceptions=True)
    expiring.cancel()
    runs.close()
    door_socket.unlink(missing_ok=True)
    await forwarder.close()


async def _expire(mailbox: Mailbox) -> None:
    """Let the mailbox end silent nodes' sessions and give up messages (`Mailbox.expire`), twice a second, for ever."""
    while True:
        mailbox.expire()
        await asyncio.sleep(0.5)


def superlink_command(federation: Any, port: int) -> list[str]:
    """Return Flower's own command of a SuperLink on loopback, with TLS and registered keys only."""
    certificates = federation.certificates
    return [
        str(Path(sys.executable).parent / "flower-superlink"),
        "--host",
        "127.0.0.1",
        "--port",
        str(port),
        "--ssl-ca-certfile",
        str(federation.authority),
        "--ssl-certfile",
        str(certificates / "server.crt"),
        "--ssl-keyfile",
        str(certificates / "server.key"),
        "--enable-supernode-auth",
        "--disable-runtime-dependency-installation",
        "--database",
        str(federation.home / "state.db"),
    ]


class SuperLinkForwarder:
    """Passes requests on to the SuperLink, over TLS on loopback."""

    def __init__(self, base: str, authority: Path) -> None:
        import httpx

        context = ssl.create_default_context(cafile=str(authority))
        self.client = httpx.AsyncClient(base_url=base, verify=context, timeout=30.0, trust_env=False)

    async def __call__(self, path: str, headers: dict[str, str], body: bytes) -> tuple[int, str, bytes]:
        """Return status, content type and body of the SuperLink's answer; 503 if it does not answer."""
        import httpx

        try:
            async with self.client.stream("POST", path, headers=headers, content=body) as response:
                answer = bytearray()
                async for data in response.aiter_bytes():
                    answer += data
                    if len(answer) > FLEET_BODY:
                        return 502, "text/plain", b"the SuperLink's answer is too long"
        except httpx.HTTPError:
            return 503, "text/plain", b"the SuperLink does not answer yet"
        return response.status_code, response.headers.get("content-type", "text/plain"), bytes(answer)

    async def close(self) -> None:
        """Close the connections."""
        await self.client.aclose()


if __name__ == "__main__":
    main()
