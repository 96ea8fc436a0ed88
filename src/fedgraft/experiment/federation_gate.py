"""Starts Flower's SuperLink and SuperNode with two doors closed that Flower 1.41 leaves open, and three waits cut.

On its one port a SuperLink serves nodes (which prove who they are by their keys) and also its control and task
interfaces, which ask nobody who he is: whoever reaches the port could register a key of his own or start a program on
every node. `superlink` answers those two only to its own machine. A SuperNode runs whatever app it is sent;
`supernode` runs only the app of the fedgraft that is installed beside it.

A SuperNode also looks for orders every three seconds only, so that each message costs a pause; `supernode` looks often
while there is work and calmly when not. It gives signs of life three times as often, so that a vanished node is known
as gone after 20 seconds instead of 60. And its helper starts a Python for every message, which costs nearly two seconds
of computing; `superexec`, our helper, forks one that has everything loaded.

`python -m fedgraft.experiment.federation_gate superlink|supernode|superexec FLAGS...` takes the flags of Flower's own
commands.
"""

from __future__ import annotations

import contextlib
import importlib
import io
import os
import signal
import subprocess
import sys
import time
import tomllib
import traceback
import zipfile
from collections.abc import Awaitable, Callable, Mapping, MutableMapping, Sequence
from dataclasses import replace
from types import SimpleNamespace
from typing import Any, NoReturn

from fedgraft.errors import FedgraftError
from fedgraft.experiment.federation_app import app_files
from fedgraft.experiment.federation_process import gate, live_with_parent

FLOWER = "1.41.0"
HEARTBEAT = 10
"""Seconds between a node's signs of life, at most; after twice as many without one it counts as gone."""
OPEN_PATHS = ("/v1/fleet/",)
Scope = MutableMapping[str, Any]
App = Callable[[Scope, Callable[[], Awaitable[Any]], Callable[[Any], Awaitable[None]]], Awaitable[None]]


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
        if sorted(names) != sorted(expected):
            return False
        texts = {name: bundle.read(name).decode() for name in names}
    # Flower writes the TOML anew, so its meaning is compared and not its spelling.
    project = tomllib.loads(texts.pop("pyproject.toml"))
    rest = {name: text for name, text in expected.items() if name != "pyproject.toml"}
    return project == tomllib.loads(expected["pyproject.toml"]) and texts == rest


class Pace:
    """How long a node pauses: briefly after an order, longer and longer without one, never longer than Flower would."""

    def __init__(
        self,
        clock: Callable[[], float] = time.monotonic,
        rest: Callable[[float], None] = time.sleep,
        least: float = 0.1,
    ) -> None:
        self.clock, self.rest, self.least, self.last = clock, rest, least, clock()

    def worked(self) -> None:
        """There was an order just now."""
        self.last = self.clock()

    def sleep(self, seconds: float) -> None:
        """Pause where Flower would pause for so many seconds."""
        self.rest(min(seconds, max(self.least, 0.05 * (self.clock() - self.last))))


def superlink() -> None:
    """Run Flower's SuperLink with its control interface closed to other machines."""
    from flwr.superlink import extensions
    from starlette.middleware import Middleware

    command: Any = importlib.import_module("flwr.superlink.cli.flower_superlink")  # its package has a function so named
    extensions.get_middleware = lambda: (Middleware(LocalControl),)
    command.subprocess = _OwnHelper
    command.flower_superlink()


def supernode() -> None:
    """Run Flower's SuperNode so that it refuses every app but the installed fedgraft's own."""
    from flwr.supercore import heartbeat as sending
    from flwr.supernode import fleet_http_connection as connecting
    from flwr.supernode import start_client_internal as loop
    from flwr.supernode.cli.flower_supernode import flower_supernode

    pull, expected, pace = loop._pull_and_store_message, app_files(), Pace()

    def guarded(**parts: Any) -> int | None:
        get = parts["get_fab"]
        # Flower checks signatures only where a licence vouches for them; ours is a comparison, made in `_verify_fab`.
        parts["get_fab"] = lambda digest, run: replace(get(digest, run), verifications={"valid_license": "fedgraft"})
        run = pull(**{**parts, "trusted_entities": {"fedgraft": "the installed one"}})
        if run is not None:
            pace.worked()
        return run

    def verified(fab: Any, trusted_entities: dict[str, str]) -> bool:
        return same_app(fab.content, expected)

    loop._pull_and_store_message = guarded  # type: ignore[assignment]
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


def superexec() -> None:
    """Run Flower's helper, which starts a process per message, so that clients are forked and not started anew."""
    from flwr.supercore.cli import flower_superexec
    from flwr.supercore.constant import TASK_TYPE_TO_APPIO_API_ADDRESS_ARG, TASK_TYPE_TO_COMMAND, TaskType
    from flwr.supercore.superexec import run_superexec as loop
    from flwr.supercore.superexec.executor.subprocess_executor import LaunchResult, SubprocessExecutor

    pace = Pace(least=0.05)

    class Forking(SubprocessExecutor):
        def launch(self, spec: Any) -> LaunchResult:
            pace.worked()
            if spec.task_type != TaskType.CLIENT_APP or not spec.insecure or spec.runtime_dependency_install:
                return super().launch(spec)  # a server's app once per run
            words = [
                TASK_TYPE_TO_COMMAND[spec.task_type], TASK_TYPE_TO_APPIO_API_ADDRESS_ARG[spec.task_type],
                spec.runtime_api_address, "--token", spec.token, "--insecure", "--parent-pid", str(os.getpid()),
            ]  # fmt: skip
            _fork_client(words)
            return LaunchResult.accepted()

        def reconcile(self) -> None:
            with contextlib.suppress(ChildProcessError):  # collect those that have ended
                while os.waitpid(-1, os.WNOHANG)[0]:
                    pass

    loop.get_executor = lambda *words, **more: Forking()
    loop.time = SimpleNamespace(sleep=pace.sleep)  # type: ignore[assignment]
    flower_superexec()


def _fork_client(words: Sequence[str]) -> None:
    """Carry out one message in a child of this process, which has loaded what that needs."""
    from flwr.supernode.cli import flwr_clientapp

    importlib.import_module("fedgraft.flower_apps")  # all that the app's own modules import
    if os.fork() == 0:
        _be_client(words, flwr_clientapp)


def _be_client(words: Sequence[str], command: Callable[[], None]) -> NoReturn:
    """The child's life: Flower's command, as if it had been started by these words; it never returns to the helper."""
    from flwr.supercore.exit import exit_handler

    code = 1
    try:
        exit_handler.registered_exit_handlers.clear()  # those are the helper's
        for one in (signal.SIGINT, signal.SIGTERM, signal.SIGQUIT):
            signal.signal(one, signal.default_int_handler if one == signal.SIGINT else signal.SIG_DFL)
        sys.argv = list(words)
        command()
        code = 0
    except SystemExit as end:
        code = end.code if isinstance(end.code, int) else 1
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)


def main() -> None:
    """Start the one that the first word names, with the other words as its flags."""
    import flwr

    if flwr.__version__ != FLOWER:
        raise FedgraftError(f"fedgraft's gate is made for flwr {FLOWER}, not {flwr.__version__}; install that version.")
    live_with_parent()
    which = {"superlink": superlink, "supernode": supernode, "superexec": superexec}[sys.argv.pop(1)]
    sys.argv[0] = f"flower-{which.__name__}"
    which()


if __name__ == "__main__":
    main()
