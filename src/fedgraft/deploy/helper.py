"""Flower's SuperExec with all modules loaded: it forks a child per message where Flower's own starts a new Python.

Starting one costs nearly two seconds of processor time. `python -m fedgraft.deploy.gate superexec FLAGS...` starts it.
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

from fedgraft.deploy.process import gate_command

FLOWER_COMMANDS = {
    "flwr-clientapp": ("flwr.supernode.cli", "fedgraft.deploy.flower_apps"),
    "flwr-serverapp": ("flwr.superlink.cli", "fedgraft.deploy.flower_apps", "fedgraft.deploy.deployed"),
}
"""The module of each command of Flower, and the modules it will need: loaded once here, for all children."""
_ORPHAN_GRACE = 15.0  # seconds in which a run whose helper has ended can record that it was interrupted


class PollPacer:
    """The pauses between polls: short after a request, then longer and longer, never longer than Flower's."""

    def __init__(
        self,
        clock: Callable[[], float] = time.monotonic,
        sleep: Callable[[float], None] = time.sleep,
        shortest: float = 0.1,
    ) -> None:
        self._clock = clock
        self._sleep = sleep
        self._shortest = shortest
        self._last_work = clock()

    def note_work(self) -> None:
        """Note that there was a request just now."""
        self._last_work = self._clock()

    def sleep(self, seconds: float) -> None:
        """Pause where Flower would pause for this many seconds."""
        idle = self._clock() - self._last_work
        pause = max(self._shortest, 0.05 * idle)
        self._sleep(min(seconds, pause))


def superexec() -> None:
    """Run Flower's SuperExec in this process so that it forks the processes that it starts per message and per run.

    Functions of Flower are replaced in place.
    """
    from flwr.supercore.cli import flower_superexec
    from flwr.supercore.superexec import run_superexec as loop
    from flwr.supercore.superexec.executor import subprocess_executor as executor

    pacer = PollPacer(shortest=0.05)
    loaded = {"flwr-clientapp": _load_command("flwr-clientapp")}

    def start(arguments: Sequence[str], **options: Any) -> None:
        """Start a command of Flower: in a fork if its modules are loaded here, else in a new process."""
        name = arguments[0]
        pacer.note_work()
        if name in loaded:
            _fork(arguments, loaded[name], silent="stdout" in options)
        elif name in FLOWER_COMMANDS:
            # The first run need not wait until torch is loaded here, and later ones need not load it.
            subprocess.Popen(gate_command(name, arguments[1:]), **options)
            loaded[name] = _load_command(name)
        else:
            subprocess.Popen(arguments, **options)

    def collect_ended(self: Any) -> None:
        """Collect children that have ended, so that none stays a zombie."""
        with contextlib.suppress(ChildProcessError):
            while os.waitpid(-1, os.WNOHANG)[0]:
                pass

    executor.subprocess = SimpleNamespace(Popen=start, DEVNULL=subprocess.DEVNULL)  # type: ignore[assignment]
    executor.SubprocessExecutor.reconcile = collect_ended  # type: ignore[method-assign]
    loop.time = SimpleNamespace(sleep=pacer.sleep)  # type: ignore[assignment]
    flower_superexec()


def _load_command(name: str) -> Callable[[], None]:
    """Return a command of Flower, with the modules loaded that it needs."""
    modules = [importlib.import_module(module) for module in FLOWER_COMMANDS[name]]
    command: Callable[[], None] = getattr(modules[0], name.replace("-", "_"))
    return command


def _fork(arguments: Sequence[str], command: Callable[[], None], silent: bool) -> None:
    """Run a command of Flower in a forked child, which has its modules loaded already; return in the parent at once.

    `arguments` become the child's `sys.argv`; `silent`: its output is dropped.
    """
    if os.fork():
        return
    if silent:
        null = os.open(os.devnull, os.O_WRONLY)
        for stream in (1, 2):
            os.dup2(null, stream)
    run_as_child(arguments, command)


def run_as_child(arguments: Sequence[str], command: Callable[[], None]) -> NoReturn:
    """Run a command of Flower in this forked child as if started with these arguments, and exit with its code."""
    from flwr.supercore.exit import exit_handler

    code = 1
    try:
        exit_handler.registered_exit_handlers.clear()  # they belong to the parent
        signal.signal(signal.SIGINT, signal.default_int_handler)
        for number in (signal.SIGTERM, signal.SIGQUIT):
            signal.signal(number, signal.SIG_DFL)
        sys.argv = list(arguments)
        threading.Thread(target=_exit_with_parent, args=(os.getppid(),), daemon=True).start()
        command()
        code = 0
    except SystemExit as end:
        if isinstance(end.code, int):
            code = end.code
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)


def _exit_with_parent(parent: int, grace: float = _ORPHAN_GRACE) -> None:
    """Exit when the parent has ended: Flower's own watch needs a main thread that may block for ever."""
    while os.getppid() == parent:
        time.sleep(0.5)
    time.sleep(grace)
    os._exit(1)
