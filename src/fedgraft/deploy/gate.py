"""Starts Flower's SuperLink and SuperNode with three doors closed that Flower 1.41 leaves open, and three waits cut.

On its one port a SuperLink serves nodes (which prove who they are by their keys) and also its control and task
interfaces, which ask nobody who he is: whoever reaches the port could register a key of his own or start a program on
every node. `superlink` answers those two only to its own machine. A SuperNode runs whatever app it is sent;
`supernode` runs only the app of the fedgraft that is installed beside it. Neither bounds what it is sent: `limits`.

A SuperNode also looks for orders every three seconds only, so that each message costs a pause; `supernode` looks often
while there is work and calmly when not. It gives signs of life three times as often, so that a vanished node is known
as gone after 20 seconds instead of 60. Flower's helper is `helper.py`'s. What became of an order: `in_hand`.

`python -m fedgraft.deploy.gate superlink|supernode|superexec FLAGS...` takes the flags of Flower's own
commands.
"""

from __future__ import annotations

import importlib
import io
import os
import subprocess
import sys
import time
import tomllib
import zipfile
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from fedgraft.core.errors import FedgraftError
from fedgraft.deploy import audit, limits
from fedgraft.deploy.app import app_files
from fedgraft.deploy.helper import COMMANDS, Pace, be, superexec
from fedgraft.deploy.inflight import InFlightTracker, answering
from fedgraft.deploy.limits import App, Scope
from fedgraft.deploy.process import KEEPS, gate, live_with_parent

FLOWER = "1.41.0"
HEARTBEAT = 10
"""Seconds between a node's signs of life, at most; after twice as many without one it counts as gone."""
RETRY = 5
"""Seconds between two attempts to reach a server that is away, at most."""
IN_USE = "an earlier process with this key still counts as connected"
IN_USE_SECONDS = 60.0
"""How long a node waits for that to end; one that was killed counts as gone after 20 seconds."""
APP_BYTES = 1 << 20
"""Most that the app may be when it is unpacked; it has a few lines."""
OPEN_PATHS = ("/v1/fleet/",)


class LocalControl:
    """ASGI middleware: everything but the nodes' own interface is for callers on this machine."""

    def __init__(self, app: App) -> None:
        self.app = app

    async def __call__(
        self, scope: Scope, receive: Callable[[], Awaitable[Any]], send: Callable[[Any], Awaitable[None]]
    ) -> None:
        """Answer 403 to strangers, pass everything else on."""
        if scope["type"] == "http" and not admitted(str(scope["path"]), scope.get("client"), scope.get("server")):
            headers = [(b"content-type", b"text/plain")]
            await send({"type": "http.response.start", "status": 403, "headers": headers})
            await send({"type": "http.response.body", "body": b"this interface answers only its own machine"})
            return
        await self.app(scope, receive, send)


def admitted(path: str, client: tuple[str, int] | None, server: tuple[str, int] | None) -> bool:
    """Whether a caller may ask for a path: nodes' paths for all, others from the very address the server answers on.

    A connection from a machine to itself has one address at both ends; nobody else's has.
    """
    if path.startswith(OPEN_PATHS):
        return True
    return client is not None and server is not None and client[0] == server[0]


def same_app(content: bytes, expected: Mapping[str, str]) -> bool:
    """Whether an app bundle holds exactly the expected files (its list of checksums aside)."""
    with zipfile.ZipFile(io.BytesIO(content)) as bundle:
        names = [name for name in bundle.namelist() if name != ".info/CONTENT"]
        unpacked = sum(one.file_size for one in bundle.infolist())  # as it says; zipfile reads no more than that
        if sorted(names) != sorted(expected) or unpacked > APP_BYTES or len(bundle.namelist()) > len(expected) + 1:
            return False
        texts = {name: bundle.read(name).decode() for name in names}
    # Flower writes the TOML anew, so its meaning is compared and not its spelling.
    project = tomllib.loads(texts.pop("pyproject.toml"))
    rest = {name: text for name, text in expected.items() if name != "pyproject.toml"}
    return project == tomllib.loads(expected["pyproject.toml"]) and texts == rest


def superlink() -> None:
    """Run Flower's SuperLink with its control interface closed to other machines."""
    from flwr.server.superlink.linkstate import in_memory_linkstate, sql_linkstate
    from flwr.superlink import extensions
    from flwr.superlink.servicer.fleet import fleet_handlers
    from starlette.middleware import Middleware

    command: Any = importlib.import_module("flwr.superlink.cli.flower_superlink")  # its package has a function so named
    extensions.get_middleware = lambda: (Middleware(LocalControl), Middleware(limits.Bounded, paths=OPEN_PATHS))
    hands = InFlightTracker()
    fleet_handlers.activate_node = naming_use(hands.connecting(fleet_handlers.activate_node))
    fleet_handlers.pull_messages = hands.giving(fleet_handlers.pull_messages)
    states: tuple[Any, ...] = (in_memory_linkstate.InMemoryLinkState, sql_linkstate.SqlLinkState)
    for state in states:
        state.get_message_res = hands.responses(state.get_message_res)
    fleet_handlers.push_messages = limits.bounded_replies(fleet_handlers.push_messages)
    command.subprocess = _OwnHelper
    command.flower_superlink()


def naming_use(activate: Callable[..., Any]) -> Callable[..., Any]:
    """Flower's answer to a node that connects, which says of a refused key that is registered why it is refused."""
    from flwr.supercore.error import FlowerError

    def answer(request: Any, state: Any) -> Any:
        try:
            return activate(request=request, state=state)
        except FlowerError as error:
            if state.get_node_id_by_public_key(request.public_key) is not None:
                error.public_details = IN_USE
            raise

    return answer


def waiting_for_use(
    activate: Callable[[Any, Any], Any],
    clock: Callable[[], float] = time.monotonic,
    rest: Callable[[float], None] = time.sleep,
) -> Callable[[Any, Any], Any]:
    """A node's connecting, which tries again while its key is in use: a restarted node is let in when it may be."""
    import httpx

    def connect(client: Any, request: Any) -> Any:
        until = clock() + IN_USE_SECONDS
        while True:
            try:
                return activate(client, request)
            except httpx.HTTPStatusError as error:
                if IN_USE not in error.response.text or clock() >= until:
                    raise
            print(IN_USE, flush=True)
            rest(1.0)

    return connect


def supernode() -> None:
    """Run Flower's SuperNode so that it refuses every app but the installed fedgraft's own."""
    from flwr.app import Error, Message
    from flwr.supercore import heartbeat as sending
    from flwr.supercore.retry import http_retry
    from flwr.supernode import fleet_http_connection as connecting
    from flwr.supernode import start_client_internal as loop
    from flwr.supernode.cli.flower_supernode import flower_supernode

    pull, expected, pace = loop._pull_and_store_message, app_files(), Pace()
    limit = limits.order_limit(Path(os.environ.get(KEEPS, ".")).parent / "policy.toml")

    def guarded(**parts: Any) -> int | None:
        get = parts["get_fab"]
        # Flower checks signatures only where a licence vouches for them; ours is a comparison, made in `_verify_fab`.
        parts["get_fab"] = lambda digest, run: replace(get(digest, run), verifications={"valid_license": "fedgraft"})
        parts["receive"] = limits.bounded_orders(parts["receive"], limit)
        try:
            run = pull(**{**parts, "trusted_entities": {"fedgraft": "the installed one"}})
        except limits.TooLarge as found:  # nothing of it was fetched; Flower sends the error as it sends replies
            reason = f"the order is larger than the {limit >> 20} MB that its owner's policy allows"
            if KEEPS in os.environ:
                note: dict[str, Any] = {"kind": "refused", "bytes": 0, "action": "order", "round": -1, "why": reason}
                audit.append(Path(os.environ[KEEPS]) / "audit.jsonl", **note)
            loop._insert_message(
                Message(Error(0, reason), reply_to=found.message), parts["state"], parts["object_store"]
            )
            run = found.message.metadata.run_id
        if run is not None:
            pace.worked()
        return run

    def verified(fab: Any, trusted_entities: dict[str, str]) -> bool:
        return same_app(fab.content, expected)

    http_retry.MAX_RETRY_DELAY = RETRY  # a server that was restarted is found soon
    client: Any = connecting.FleetHttpClient
    client.ActivateNode = waiting_for_use(client.ActivateNode)
    connect = client.from_server_address
    client.from_server_address = lambda *words, **more: limits.bounded_answers(connect(*words, **more))
    loop._pull_and_store_message = guarded  # type: ignore[assignment]
    loop._push_messages = answering(loop._push_messages, pace.sleep)
    loop._verify_fab = verified
    sending.HEARTBEAT_DEFAULT_INTERVAL = connecting.HEARTBEAT_DEFAULT_INTERVAL = HEARTBEAT
    loop.time = SimpleNamespace(sleep=pace.sleep)  # type: ignore[assignment]
    loop.subprocess = _OwnHelper  # type: ignore[assignment]
    flower_supernode()


class _OwnHelper:
    """What Flower uses of `subprocess` to start its helper, which here is ours."""

    TimeoutExpired = subprocess.TimeoutExpired

    @staticmethod
    def Popen(command: Sequence[str], **more: Any) -> subprocess.Popen[bytes]:  # Flower calls it so
        """Start the helper with the flags that Flower has for it."""
        return subprocess.Popen(gate("superexec", command[1:]), **more)


def main() -> None:
    """Start the one that the first word names, with the other words as its flags."""
    import flwr

    if flwr.__version__ != FLOWER:
        raise FedgraftError(f"fedgraft's gate is made for flwr {FLOWER}, not {flwr.__version__}; install that version.")
    live_with_parent()
    name = sys.argv.pop(1)
    if name in COMMANDS:
        command = getattr(importlib.import_module(COMMANDS[name][0]), name.replace("-", "_"))
        be([name, *sys.argv[1:]], command)
    which = {"superlink": superlink, "supernode": supernode, "superexec": superexec}[name]
    sys.argv[0] = f"flower-{which.__name__}"
    which()


if __name__ == "__main__":
    main()
