"""A node's process: it connects, waits for messages, lets the worker carry them out, and sends the answers.

It never runs anything that a server sends: the worker is that of the installed fedgraft (`node`), a process that stays
warm between messages. What a message announces is held against the owner's limit before any of it is fetched. When
the link breaks, everything is tried again, and transfers go on where they were.

`python -m fedgraft.deploy.node_loop OPTIONS...` is started by `run_node`, which translates its lines for the owner.
"""

from __future__ import annotations

import argparse
import contextlib
import fcntl
import json
import os
import signal
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

from fedgraft.core.errors import FedgraftError
from fedgraft.core.store import write_text
from fedgraft.deploy import audit, limits
from fedgraft.deploy.door_paths import KEY_IN_USE
from fedgraft.deploy.process import FINISHED_ANSWER, NODE_STATE_VARIABLE, end_with_parent
from fedgraft.deploy.server_link import (
    HEARTBEAT,
    AnswerRefused,
    Delivery,
    KeyInUse,
    KeyRefused,
    NoSession,
    ServerLink,
    Unreachable,
    Withdrawn,
)
from fedgraft.engines.flower.node_link import WorkerRequest, WorkerResponse, ask_worker
from fedgraft.engines.flower.transport import HELLO, REQUEST, name_list, text_setting, whole_number

CONNECTED = "connected to the server as node"
"""Begins the line that is printed when the node is admitted."""
UNREACHABLE = "the server does not answer; trying again"
WORKING = "working on a request:"
ANSWERED = "the request is answered"
"""Printed when the server has the whole answer."""
FAILED = "the node ended: "
"""Begins the last line of a node that cannot continue: the error as JSON."""
KEY_IN_USE_SECONDS = 60.0
"""How long a node waits for an earlier process with its key to count as gone, and for a key to be registered again."""
_LONGEST_PAUSE = 5.0  # seconds between two attempts to reach a server that does not answer
T = TypeVar("T")


class NodeLoop:
    """One node, from its connection to its end.

    Args:
        link: the connection to the server.
        client: the node's client number.
        data, source: the node's own images and their format; empty: its part of the config's data.
        home: the node's private folder.
        carry_out: answers a request; replaced in tests.
    """

    def __init__(
        self,
        link: ServerLink,
        client: int,
        data: str,
        source: str,
        home: Path,
        carry_out: Callable[[WorkerRequest], WorkerResponse],
    ) -> None:
        self.link = link
        self.client = client
        self.data = data
        self.source = source
        self.home = home
        self.carry_out = carry_out
        self.limit = limits.request_limit(home.parent / "policy.toml")
        self.downloads = home / "incoming"
        self.connected = False
        self.pause = 0.1
        """Seconds until the next attempt to reach a server that does not answer."""
        self.sleep: Callable[[float], None] = time.sleep

    # ---- the connection ----------------------------------------------------------------------------------------------

    def connect(self) -> None:
        """Connect to the server; wait while it does not answer, or while the key of a killed process is in use.

        The lock of the node's home shows that an earlier process of this node is dead: it is signed off by its id.
        """
        deadline = time.monotonic() + KEY_IN_USE_SECONDS
        identity = self.home / "node-id"
        while True:
            try:
                if identity.is_file() and identity.read_text().isdigit():
                    self.link.deactivate(int(identity.read_text()))
                self.link.activate()
                break
            except Unreachable:
                self.report_unreachable()
            except KeyInUse:
                if time.monotonic() >= deadline:
                    raise FedgraftError(
                        "E-DEPLOY-NODE-KEY-IN-USE",
                        f"another process uses the key {self.link.key} at {self.link.address}",
                        "end that process, or make another key for this node",
                        key=str(self.link.key),
                    ) from None
                print(KEY_IN_USE, flush=True)
                self.sleep(1.0)
            except KeyRefused:
                if not self.connected or time.monotonic() >= deadline:  # a restarted server may not have its keys yet
                    raise FedgraftError(
                        "E-DEPLOY-NODE-KEY-REFUSED",
                        f"the server at {self.link.address} refused the key {self.link.key}: it is not registered",
                        "the coordinator registers it with: fedgraft deploy register FED NAME "
                        f"{self.link.key.stem}.pub",
                        key=str(self.link.key),
                    ) from None
                self.sleep(1.0)
        write_text(identity, str(self.link.node))
        self.connected = True
        self.pause = 0.1
        print(f"{CONNECTED} {self.link.node}", flush=True)

    def report_unreachable(self) -> None:
        """Say that the server does not answer, and pause before the next attempt."""
        print(UNREACHABLE, flush=True)
        self.sleep(self.pause)
        self.pause = min(_LONGEST_PAUSE, 2 * self.pause)

    def persist(self, attempt: Callable[[], T]) -> T:
        """Return what `attempt` returns; repeat it while the server does not answer, connect again if need be."""
        while True:
            try:
                result = attempt()
                self.pause = 0.1
                return result
            except Unreachable:
                self.report_unreachable()
            except NoSession:
                self.connect()

    def send_heartbeats(self, over: threading.Event) -> None:
        """Send a sign of life every few seconds until the node ends; failures are the main thread's business."""
        twin = self.link.twin()
        while not over.wait(HEARTBEAT):
            with contextlib.suppress(Unreachable, FedgraftError):
                twin.heartbeat(self.link.node, self.link.received)

    # ---- messages ----------------------------------------------------------------------------------------------------

    def run(self) -> None:
        """Connect, and answer one message after another, for ever."""
        self.connect()
        while True:
            delivery = self.persist(self.link.poll)
            if delivery is not None:
                self.answer(delivery)

    def answer(self, delivery: Delivery) -> None:
        """Answer a message; drop the answer if the server no longer wants it.

        An answer that is not sent because this process ends stays on disk (`WorkStore`), and is sent by the next one.
        """
        try:
            response = self.carry_out_delivery(delivery)
            settings = {"step": response.step, "need": response.need, "error": response.error[:500], **response.facts}
            self.persist(lambda: self.link.answer(delivery.id, settings, response.response))
        except Withdrawn:
            print("the server no longer wants the answer to this request", flush=True)
        except AnswerRefused as refusal:
            print(f"the server refused the answer: {refusal}", flush=True)
        else:
            print(ANSWERED, flush=True)
        (self.home / FINISHED_ANSWER).unlink(missing_ok=True)

    def carry_out_delivery(self, delivery: Delivery) -> WorkerResponse:
        """Return the worker's answer to a message, or the reason why it is not carried out."""
        if delivery.size > self.limit:
            reason = limits.request_too_large(self.limit)
            self.record_refusal(reason)
            return WorkerResponse(error=reason)
        if delivery.kind not in (HELLO, REQUEST) or (delivery.kind == REQUEST) != ("request" in delivery.parts):
            self.record_refusal("a message of another kind than fedgraft's")
            return WorkerResponse(error="this node answers fedgraft's messages only")
        print(f"{WORKING} {delivery.kind}", flush=True)
        parts = {name: self.persist(lambda name=name: self.fetch(delivery, name)) for name in delivery.parts}  # type: ignore[misc]
        settings = delivery.settings
        request = WorkerRequest(
            config=_text(settings, "config"),
            folder=_text(settings, "folder"),
            client=self.client,
            run=whole_number(settings, "run", 0),
            data=self.data,
            source=self.source,
            after=whole_number(settings, "after", 0),
            becomes=whole_number(settings, "becomes", 0),
            digest=text_setting(settings, "digest"),
            classes=name_list(settings, "classes"),
            request=parts.get("request", b""),
            opened=parts.get("opened", b""),
            task=text_setting(settings, "task"),
        )
        return self.carry_out(request)

    def fetch(self, delivery: Delivery, name: str) -> bytes:
        """Return a part of a message; what has come of it is in a file while the line is broken."""
        self.downloads.mkdir(mode=0o700, exist_ok=True)
        file = self.downloads / f"{name}-{delivery.parts[name][1]}"
        if not file.exists():
            for older in self.downloads.glob(f"{name}-*"):  # of a message that was withdrawn
                older.unlink()
        return self.link.fetch(delivery, name, file)

    def record_refusal(self, reason: str) -> None:
        """Note in the audit log that a message was not carried out."""
        entry: dict[str, Any] = {"kind": "refused", "bytes": 0, "action": "request", "round": -1, "why": reason}
        audit.append_entry(self.home / "audit.jsonl", **entry)


def _text(settings: dict[str, Any], name: str) -> str:
    """Return a setting that must be a text; empty if it is not."""
    value = settings.get(name)
    if not isinstance(value, str):
        return ""
    return value


# ---- the process -----------------------------------------------------------------------------------------------------


def lock_home(home: Path, key: Path) -> int:
    """Return the lock of a node's home, held by this process until it ends; raise if another node runs with it."""
    descriptor = os.open(home / "lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        raise FedgraftError(
            "E-DEPLOY-NODE-KEY-IN-USE",
            f"another process of this machine uses the key {key}",
            "end that process, or make another key for this node",
            key=str(key),
        ) from None
    return descriptor


def _interrupt(number: int, frame: Any) -> None:
    """End the node in order."""
    raise KeyboardInterrupt


def main() -> None:
    """Run a node until it is interrupted; the reason of another end is printed as its last line."""
    parser = argparse.ArgumentParser(prog="fedgraft.deploy.node_loop")
    parser.add_argument("--superlink", required=True)
    parser.add_argument("--ca", type=Path, required=True)
    parser.add_argument("--key", type=Path, required=True)
    parser.add_argument("--id", type=int, required=True)
    parser.add_argument("--data", default="")
    parser.add_argument("--source", default="")
    options = parser.parse_args()
    end_with_parent()
    os.umask(0o077)
    signal.signal(signal.SIGTERM, _interrupt)
    home = Path(os.environ[NODE_STATE_VARIABLE])
    over = threading.Event()
    link = ServerLink(options.superlink, options.ca, options.key)

    def carry_out(request: WorkerRequest) -> WorkerResponse:
        """Let the worker process answer; it ends with this one."""
        return ask_worker(request, os.getpid())

    try:
        lock_home(home, options.key)
        loop = NodeLoop(link, options.id, options.data, options.source, home, carry_out)
        threading.Thread(target=loop.send_heartbeats, args=(over,), daemon=True).start()
        loop.run()
    except KeyboardInterrupt:
        over.set()
        if link.node:
            with contextlib.suppress(Unreachable, FedgraftError):
                link.close()
                link.deactivate(link.node)
                (home / "node-id").unlink(missing_ok=True)
    except FedgraftError as error:
        table = {"code": error.code, "message": error.message, "hint": error.hint}
        print(f"{FAILED}{json.dumps(table)}", flush=True)
        sys.exit(1)


if __name__ == "__main__":
    main()
