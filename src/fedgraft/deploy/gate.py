"""Starts Flower's SuperLink and SuperNode with three weaknesses of Flower 1.41 closed and three delays shortened.

On its one port a SuperLink serves nodes (which authenticate by their keys) and also its control and task interfaces,
which authenticate nobody: whoever reaches the port could register a key of their own or start a program on every node.
`superlink` serves those two only to its own machine. A SuperNode runs any app it is sent; `supernode` runs only the app
of the fedgraft that is installed beside it. Neither limits the size of messages; `limits` does.

A SuperNode polls for requests only every three seconds, which delays every message; `supernode` polls often while there
is work. It sends heartbeats three times as often, so that a vanished node counts as gone after 20 seconds instead of
60. Flower's SuperExec is replaced by that of `helper`. Lost requests are detected by `inflight`.

`python -m fedgraft.deploy.gate superlink|supernode|superexec FLAGS...` takes the flags of Flower's own commands.
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
from fedgraft.deploy import audit, inflight, limits
from fedgraft.deploy.app import app_files
from fedgraft.deploy.helper import FLOWER_COMMANDS, PollPacer, run_as_child, superexec
from fedgraft.deploy.inflight import InFlightTracker
from fedgraft.deploy.limits import App, Scope
from fedgraft.deploy.process import NODE_STATE_VARIABLE, end_with_parent, gate_command

FLOWER_VERSION = "1.41.0"
"""The version whose internals are replaced here."""
HEARTBEAT = 10
"""Most seconds between a node's heartbeats; after twice as many without one it counts as gone."""
RETRY = 5
"""Most seconds between two attempts to reach a server that does not answer."""
KEY_IN_USE = "an earlier process with this key still counts as connected"
KEY_IN_USE_SECONDS = 60.0
"""How long a node waits for that to end; a node that was killed counts as gone after 20 seconds."""
APP_BYTES = 1 << 20
"""Most bytes of the unpacked app, which has a few lines."""
NODE_PATHS = ("/v1/fleet/",)
"""Paths of the nodes' interface, which authenticates by key."""


# ---- the SuperLink ---------------------------------------------------------------------------------------------------


class LocalControl:
    """ASGI middleware: serve everything but the nodes' interface only to callers on this machine."""

    def __init__(self, app: App) -> None:
        self.app = app

    async def __call__(
        self, scope: Scope, receive: Callable[[], Awaitable[Any]], send: Callable[[Any], Awaitable[None]]
    ) -> None:
        """Answer 403 to other machines, pass everything else on."""
        if scope["type"] == "http" and not may_access(str(scope["path"]), scope.get("client"), scope.get("server")):
            headers = [(b"content-type", b"text/plain")]
            await send({"type": "http.response.start", "status": 403, "headers": headers})
            await send({"type": "http.response.body", "body": b"this interface answers only its own machine"})
            return
        await self.app(scope, receive, send)


def may_access(path: str, client: tuple[str, int] | None, server: tuple[str, int] | None) -> bool:
    """Return whether a caller may access a path: the nodes' paths from anywhere, others from this machine.

    A connection from a machine to itself has the same address at both ends; no other connection has.
    """
    if path.startswith(NODE_PATHS):
        return True
    return client is not None and server is not None and client[0] == server[0]


def superlink() -> None:
    """Run Flower's SuperLink in this process, with its control interface closed to other machines.

    Functions of Flower are replaced in place: limits on sizes, detection of lost requests, a faster SuperExec.
    """
    from flwr.server.superlink.linkstate import in_memory_linkstate, sql_linkstate
    from flwr.superlink import extensions
    from flwr.superlink.servicer.fleet import fleet_handlers
    from starlette.middleware import Middleware

    # Imported by name, because its package has a function of the same name.
    command: Any = importlib.import_module("flwr.superlink.cli.flower_superlink")
    extensions.get_middleware = lambda: (
        Middleware(LocalControl),
        Middleware(limits.RequestSizeLimit, paths=NODE_PATHS),
    )
    tracker = InFlightTracker()
    fleet_handlers.activate_node = explain_key_in_use(tracker.wrap_activate(fleet_handlers.activate_node))
    fleet_handlers.pull_messages = tracker.wrap_pull(fleet_handlers.pull_messages)
    link_states: tuple[Any, ...] = (in_memory_linkstate.InMemoryLinkState, sql_linkstate.SqlLinkState)
    for link_state in link_states:
        link_state.get_message_res = tracker.wrap_get_responses(link_state.get_message_res)
    fleet_handlers.push_messages = limits.limit_responses(fleet_handlers.push_messages)
    command.subprocess = _HelperSubprocess
    command.flower_superlink()


def explain_key_in_use(activate: Callable[..., Any]) -> Callable[..., Any]:
    """Return Flower's handler `activate`, which admits a node, with a reason where a registered key is refused."""
    from flwr.supercore.error import FlowerError

    def activate_node(request: Any, state: Any) -> Any:
        """Admit a node, or raise Flower's error with the reason if its key is registered."""
        try:
            return activate(request=request, state=state)
        except FlowerError as error:
            if state.get_node_id_by_public_key(request.public_key) is not None:
                error.public_details = KEY_IN_USE
            raise

    return activate_node


# ---- the SuperNode ---------------------------------------------------------------------------------------------------


def retry_while_key_in_use(
    activate: Callable[[Any, Any], Any],
    clock: Callable[[], float] = time.monotonic,
    sleep: Callable[[float], None] = time.sleep,
) -> Callable[[Any, Any], Any]:
    """Return Flower's call `activate`, which connects a node, repeated while the key of a restarted node is in use."""
    import httpx

    def connect(client: Any, request: Any) -> Any:
        """Connect the node; try again each second while its key counts as in use, up to `KEY_IN_USE_SECONDS`."""
        deadline = clock() + KEY_IN_USE_SECONDS
        while True:
            try:
                return activate(client, request)
            except httpx.HTTPStatusError as error:
                if KEY_IN_USE not in error.response.text or clock() >= deadline:
                    raise
            print(KEY_IN_USE, flush=True)
            sleep(1.0)

    return connect


def same_app(content: bytes, expected: Mapping[str, str]) -> bool:
    """Return whether an app bundle contains exactly the expected files, apart from its list of checksums."""
    with zipfile.ZipFile(io.BytesIO(content)) as bundle:
        entries = bundle.infolist()
        names = [entry.filename for entry in entries if entry.filename != ".info/CONTENT"]
        declared_bytes = sum(entry.file_size for entry in entries)  # zipfile reads no more than is declared
        if sorted(names) != sorted(expected) or len(entries) > len(expected) + 1 or declared_bytes > APP_BYTES:
            return False
        texts = {name: bundle.read(name).decode() for name in names}
    # Flower rewrites the TOML, so its content is compared and not its spelling.
    expected_texts = dict(expected)
    project = tomllib.loads(texts.pop("pyproject.toml"))
    expected_project = tomllib.loads(expected_texts.pop("pyproject.toml"))
    return project == expected_project and texts == expected_texts


def supernode() -> None:
    """Run Flower's SuperNode in this process so that it refuses every app but that of the installed fedgraft.

    Functions of Flower are replaced in place: limits on sizes, shorter pauses, a faster SuperExec.
    """
    from flwr.supercore import heartbeat
    from flwr.supercore.retry import http_retry
    from flwr.supernode import fleet_http_connection as connection
    from flwr.supernode import start_client_internal as loop
    from flwr.supernode.cli.flower_supernode import flower_supernode

    pacer = PollPacer()
    expected = app_files()
    client: Any = connection.FleetHttpClient
    from_server_address = client.from_server_address

    def verify_fab(fab: Any, trusted_entities: dict[str, str]) -> bool:
        return same_app(fab.content, expected)

    def connect(*arguments: Any, **options: Any) -> Any:
        return limits.limit_http_responses(from_server_address(*arguments, **options))

    http_retry.MAX_RETRY_DELAY = RETRY  # a restarted server is reached soon
    client.ActivateNode = retry_while_key_in_use(client.ActivateNode)
    client.from_server_address = connect
    loop._pull_and_store_message = _pull_guarded(loop, loop._pull_and_store_message, pacer)
    loop._push_messages = inflight.push_or_give_up(loop._push_messages, pacer.sleep)
    loop._verify_fab = verify_fab
    heartbeat.HEARTBEAT_DEFAULT_INTERVAL = HEARTBEAT
    connection.HEARTBEAT_DEFAULT_INTERVAL = HEARTBEAT
    loop.time = SimpleNamespace(sleep=pacer.sleep)  # type: ignore[assignment]
    loop.subprocess = _HelperSubprocess  # type: ignore[assignment]
    flower_supernode()


def _pull_guarded(loop: Any, pull: Callable[..., int | None], pacer: PollPacer) -> Callable[..., int | None]:
    """Return Flower's function `pull`, which fetches a request, with apps verified and the size limited.

    `loop` is Flower's module of the node's loop; the pacer is told of every request.
    """
    limit = limits.request_limit(Path(os.environ.get(NODE_STATE_VARIABLE, ".")).parent / "policy.toml")

    def pull_and_store(**arguments: Any) -> int | None:
        """Fetch the next request, or refuse one over the limit; return its run, None without a request."""
        get_fab = arguments["get_fab"]

        def get_fab_to_verify(digest: str, run: int) -> Any:
            # Flower verifies an app only if a licence vouches for it; ours is compared, in `_verify_fab`.
            return replace(get_fab(digest, run), verifications={"valid_license": "fedgraft"})

        arguments["get_fab"] = get_fab_to_verify
        arguments["receive"] = limits.limit_requests(arguments["receive"], limit)
        arguments["trusted_entities"] = {"fedgraft": "the installed one"}
        try:
            run = pull(**arguments)
        except limits.RequestTooLarge as error:  # nothing of it was fetched
            _refuse_too_large(loop, error.message, limit, arguments)
            run = error.message.metadata.run_id
        if run is not None:
            pacer.note_work()
        return run

    return pull_and_store


def _refuse_too_large(loop: Any, message: Any, limit: int, arguments: Mapping[str, Any]) -> None:
    """Record the refusal of a request over the limit, and answer it; Flower sends the error like a response."""
    from flwr.app import Error, Message

    reason = limits.request_too_large(limit)
    home = os.environ.get(NODE_STATE_VARIABLE)
    if home is not None:
        entry: dict[str, Any] = {"kind": "refused", "bytes": 0, "action": "request", "round": -1, "why": reason}
        audit.append_entry(Path(home) / "audit.jsonl", **entry)
    response = Message(Error(0, reason), reply_to=message)
    loop._insert_message(response, arguments["state"], arguments["object_store"])


# ---- starting --------------------------------------------------------------------------------------------------------


class _HelperSubprocess:
    """The part of `subprocess` that Flower uses to start its SuperExec, which here is that of `helper`."""

    TimeoutExpired = subprocess.TimeoutExpired

    @staticmethod
    def Popen(command: Sequence[str], **options: Any) -> subprocess.Popen[bytes]:  # Flower's spelling
        """Start the SuperExec with Flower's flags for it."""
        return subprocess.Popen(gate_command("superexec", command[1:]), **options)


def main() -> None:
    """Start the component that the first argument names, with the other arguments as its flags."""
    import flwr

    if flwr.__version__ != FLOWER_VERSION:
        raise FedgraftError(
            "E-DEPLOY-FLOWER-VERSION",
            f"a deployed federation needs flwr {FLOWER_VERSION}, and {flwr.__version__} is installed",
            f"install it with: pip install flwr=={FLOWER_VERSION}",
            version=flwr.__version__,
        )
    end_with_parent()
    name = sys.argv.pop(1)
    if name in FLOWER_COMMANDS:
        module = importlib.import_module(FLOWER_COMMANDS[name][0])
        run_as_child([name, *sys.argv[1:]], getattr(module, name.replace("-", "_")))
    component = {"superlink": superlink, "supernode": supernode, "superexec": superexec}[name]
    sys.argv[0] = f"flower-{component.__name__}"
    component()


if __name__ == "__main__":
    main()
