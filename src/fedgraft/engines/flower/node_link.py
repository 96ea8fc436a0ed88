"""The link between a short-lived client process and the node's worker process, which stays warm between messages.

Flower starts one process per message. Loading torch, the network and the data each time would cost seconds, so that
process only forwards bytes: it sends a `WorkerRequest` to a worker on a socket in a private folder and returns the
`WorkerResponse`. The worker is started by the first message, and ends when the node's own process has ended or after
`IDLE` seconds without work. Nothing here imports torch or Flower; nothing on the socket is pickled.
"""

from __future__ import annotations

import hashlib
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from multiprocessing.connection import Client, Connection, Listener
from pathlib import Path
from typing import Any

from fedgraft.core.errors import FedgraftError, Refused
from fedgraft.core.store import locked

IDLE = 1800.0
"""Seconds without a request after which a worker ends."""
_START = 180.0  # seconds that a worker may take to start
_BYTES = ("request", "opened", "response")  # fields that are sent as byte strings


@dataclass(frozen=True)
class WorkerRequest:
    """One request to a client, with what its node must know to carry it out; without a request, a greeting."""

    config: str
    """The config of the run, as TOML text."""
    folder: str
    """The run folder on the server's machine: with the config the identity of the run."""
    client: int
    run: int
    """Flower's number of the run; a new one starts from a fresh network."""
    data: str = ""
    """The node's own data, a path that only it knows; empty: it serves its part of the config's data."""
    source: str = ""
    after: int = 0
    """The step of the client's memory that the server continues from; 0: none."""
    becomes: int = 0
    """The step of the memory after this request."""
    digest: str = ""
    """Digest of `opened`, the tensors of the run's edit space; empty before the space is chosen."""
    classes: tuple[str, ...] = ()
    """The federation's classes, if nodes have data of their own."""
    request: bytes = b""
    opened: bytes = b""
    """The packed tensors from which a node rebuilds the edit space; empty if the server thinks that it has them."""
    task: str = ""
    """The task if it is not a run: `preflight` or `evaluate`."""


@dataclass(frozen=True)
class WorkerResponse:
    """The result of a request: a packed response, or the reason why there is none."""

    response: bytes = b""
    step: int = 0
    """The step of the memory that the client now has."""
    need: bool = False
    """The node lacks the tensors of the edit space (`opened`); send the request again with them."""
    error: str = ""
    facts: dict[str, Any] = field(default_factory=dict)
    """The answer to a greeting: number of examples, classes, digest of the data."""


def send(pipe: Connection, message: WorkerRequest | WorkerResponse) -> None:
    """Write a message to a socket: one line of JSON, then the byte strings of `_BYTES`, each by itself."""
    plain = asdict(message)
    parts = [plain.pop(name) for name in _BYTES if name in plain]
    pipe.send_bytes(json.dumps(plain).encode())
    for part in parts:
        pipe.send_bytes(part)


def receive(pipe: Connection, kind: type[WorkerRequest] | type[WorkerResponse]) -> Any:
    """Read a message that `send` wrote, as an instance of `kind`."""
    plain = json.loads(pipe.recv_bytes())
    if "classes" in plain:
        plain["classes"] = tuple(plain["classes"])
    for name in _BYTES:
        if name in kind.__dataclass_fields__:
            plain[name] = pipe.recv_bytes()
    return kind(**plain)


def private_folder() -> Path:
    """Return the folder for sockets in the system's temporary folder, created if needed; only this user can enter it.

    Raises if others can enter it. Its path is short enough for a socket.
    """
    folder = Path(tempfile.gettempdir()) / f"fedgraft-{os.getuid()}"
    folder.mkdir(mode=0o700, exist_ok=True)
    info = folder.lstat()
    if info.st_uid != os.getuid() or info.st_mode & 0o077 or folder.is_symlink():
        raise FedgraftError(
            "E-ENGINES-PRIVATE-FOLDER",
            f"{folder} is not a folder that only this user can enter",
            "remove it or set TMPDIR",
            path=str(folder),
        )
    return folder


def ask_worker(worker_request: WorkerRequest, owner: int | None = None) -> WorkerResponse:
    """Send a request to the node's worker process and return its answer; start the worker if there is none.

    `owner` is the process with which the worker ends; None: our parent. A worker that dies gives a response with an
    error.
    """
    if owner is None:
        owner = os.getppid()
    identity = f"{owner} {worker_request.client} {worker_request.data}"
    name = hashlib.blake2b(identity.encode(), digest_size=8).hexdigest()
    address = private_folder() / name
    try:
        with _connect(address, owner) as pipe:
            send(pipe, worker_request)
            answer: WorkerResponse = receive(pipe, WorkerResponse)
    except (EOFError, ConnectionError):
        return WorkerResponse(error="its worker process died, probably for lack of memory")
    return answer


def _connect(address: Path, owner: int) -> Connection:
    """Return a connection to the worker's socket at this address; start the worker process if there is none.

    `owner` is the process with which the worker ends. Raises if the worker does not start in time.
    """
    with suppress(FileNotFoundError, ConnectionError):
        return Client(str(address), "AF_UNIX")
    with locked(address.with_suffix(".lock")):  # two messages at once start one worker
        with suppress(FileNotFoundError, ConnectionError):
            return Client(str(address), "AF_UNIX")
        address.unlink(missing_ok=True)
        command = [sys.executable, "-m", "fedgraft.deploy.node", str(address), str(owner)]
        process = subprocess.Popen(command, stdin=subprocess.DEVNULL, start_new_session=True)
        end = time.monotonic() + _START
        while time.monotonic() < end and process.poll() is None:
            with suppress(FileNotFoundError, ConnectionError):
                return Client(str(address), "AF_UNIX")
            time.sleep(0.02)
    raise FedgraftError("E-ENGINES-NODE-WORKER", "the node's worker process could not be started", "see the node's log")


def serve(address: Path, owner: int, carry_out: Callable[[WorkerRequest], WorkerResponse], idle: float = IDLE) -> None:
    """Run a worker: listen at `address` and carry out one request after another.

    It returns when the process `owner` has ended or no request came for `idle` seconds. Errors of `carry_out` become
    responses without any detail of the node's data.
    """
    with Listener(str(address), "AF_UNIX") as listener:
        socket = listener._listener._socket  # type: ignore[attr-defined]  # the only way to wait with a limit
        socket.settimeout(1.0)
        last = time.monotonic()
        while time.monotonic() - last < idle and _alive(owner):
            try:
                pipe = listener.accept()
            except TimeoutError:
                continue
            with pipe, suppress(EOFError, ConnectionError):
                worker_request = receive(pipe, WorkerRequest)
                try:
                    answer = carry_out(worker_request)
                except FedgraftError as error:
                    answer = WorkerResponse(error=public_reason(error))
                    _log_failure(worker_request)
                except Exception as error:  # an error may quote the node's data: only its type leaves
                    answer = WorkerResponse(error=f"failed with {type(error).__name__}; its log says more")
                    _log_failure(worker_request)
                send(pipe, answer)
            last = time.monotonic()


def public_reason(error: FedgraftError) -> str:
    """Return what the server is told of an error on a node: its code.

    The sentence may quote a file, and files bear the names of patients; it is in the node's log. A refusal says which
    rule, and nothing of the data.
    """
    if isinstance(error, Refused):
        return error.public_reason
    return f"{error.code}; its log says more"


def without_path(sentence: str, data: str) -> str:
    """Return an error's sentence without the path of the node's data, which is private."""
    if not data:
        return sentence
    return sentence.replace(data, "its data")


def _log_failure(worker_request: WorkerRequest) -> None:
    """Log the present exception in the node's own log."""
    import logging

    logging.getLogger("fedgraft").exception("client %d could not carry out a request", worker_request.client)


def _alive(process: int) -> bool:
    """Return whether this process still runs; a zombie does not."""
    try:
        os.kill(process, 0)
        state = Path(f"/proc/{process}/stat")
        return not state.exists() or state.read_text().rpartition(")")[2].split()[0] not in "ZX"
    except (ProcessLookupError, FileNotFoundError):
        return False
    except PermissionError:
        return True
