"""Flower's helper with everything loaded: it forks a child per message where Flower's own starts a Python.

Starting one costs nearly two seconds of computing; `python -m fedgraft.deploy.gate superexec FLAGS...` starts ours.
"""

from __future__ import annotations

import contextlib
import importlib
import os
import signal
import subprocess
import sys
import threading
import time
import traceback
from collections.abc import Callable, Sequence
from types import SimpleNamespace
from typing import Any, NoReturn

from fedgraft.deploy.process import gate


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


def superexec() -> None:
    """Run Flower's helper, which starts a process per message and per run, so that it forks them instead."""
    from flwr.supercore.cli import flower_superexec
    from flwr.supercore.superexec import run_superexec as loop
    from flwr.supercore.superexec.executor import subprocess_executor as executor

    pace, loaded = Pace(least=0.05), {"flwr-clientapp": _load("flwr-clientapp")}

    def start(arguments: Sequence[str], **more: Any) -> None:
        pace.worked()
        if arguments[0] in loaded:
            _fork(arguments, loaded[arguments[0]], "stdout" in more)
            return
        known = arguments[0] in COMMANDS
        subprocess.Popen(gate(arguments[0], arguments[1:]) if known else arguments, **more)
        if known:  # the first run does not wait while torch is loaded here, and the next need not load it
            loaded[arguments[0]] = _load(arguments[0])

    def collect(self: Any) -> None:
        with contextlib.suppress(ChildProcessError):
            while os.waitpid(-1, os.WNOHANG)[0]:  # those that have ended
                pass

    executor.subprocess = SimpleNamespace(Popen=start, DEVNULL=subprocess.DEVNULL)  # type: ignore[assignment]
    executor.SubprocessExecutor.reconcile = collect  # type: ignore[method-assign]
    loop.time = SimpleNamespace(sleep=pace.sleep)  # type: ignore[assignment]
    flower_superexec()


COMMANDS = {
    "flwr-clientapp": ("flwr.supernode.cli", "fedgraft.deploy.flower_apps"),
    "flwr-serverapp": ("flwr.superlink.cli", "fedgraft.deploy.flower_apps", "fedgraft.deploy.deployed"),
}
"""Where Flower's command is, and what else it will need: loaded once in the helper, there already in every child."""


def _load(name: str) -> Callable[[], None]:
    """One of Flower's commands, with what it needs."""
    modules = [importlib.import_module(one) for one in COMMANDS[name]]
    command: Callable[[], None] = getattr(modules[0], name.replace("-", "_"))
    return command


def _fork(arguments: Sequence[str], command: Callable[[], None], silent: bool) -> None:
    """Carry out one of Flower's commands in a child of this process, which has loaded what that needs."""
    if os.fork():
        return
    if silent:
        nowhere = os.open(os.devnull, os.O_WRONLY)
        for stream in (1, 2):
            os.dup2(nowhere, stream)
    be(arguments, command)


def be(arguments: Sequence[str], command: Callable[[], None]) -> NoReturn:
    """The child's life: Flower's command, as if it had been started by these words; it never returns to the helper."""
    from flwr.supercore.exit import exit_handler

    code = 1
    try:
        exit_handler.registered_exit_handlers.clear()  # those are the helper's
        for one in (signal.SIGINT, signal.SIGTERM, signal.SIGQUIT):
            signal.signal(one, signal.default_int_handler if one == signal.SIGINT else signal.SIG_DFL)
        sys.argv = list(arguments)
        threading.Thread(target=_end_after, args=(os.getppid(),), daemon=True).start()
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


def _end_after(helper: int, grace: float = 15.0) -> None:
    """End this process when its helper is gone: Flower's own watch waits for a main thread that may wait for ever."""
    while os.getppid() == helper:
        time.sleep(0.5)
    time.sleep(grace)  # enough for a run to note that it was interrupted
    os._exit(1)
