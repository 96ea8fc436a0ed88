"""Processes of a federation: started with a clean environment, remembered by id and start time, ended only if ours."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from fedgraft.core.errors import FedgraftError
from fedgraft.core.store import write_text

PROC = Path("/proc")
_PATIENCE = 10.0  # seconds a process gets to end by itself
_LIVES_WITH = "FEDGRAFT_LIVES_WITH"
KEEPS = "FEDGRAFT_NODE_KEEPS"
"""Names the node's home to its processes: ledger and audit log are there, the owner's policy beside it."""


@dataclass(frozen=True)
class Process:
    """A process by its number and the moment it began: a number alone may belong to somebody else by now."""

    pid: int
    began: int

    @property
    def alive(self) -> bool:
        """Whether this very process is still there."""
        return _began(self.pid) == self.began


@dataclass(frozen=True)
class Server(Process):
    """A running SuperLink and the address it listens on."""

    bind: str
    port: int

    @property
    def address(self) -> str:
        """Where this machine reaches it."""
        return f"{'127.0.0.1' if self.bind == '0.0.0.0' else self.bind}:{self.port}"


def environment(home: Path) -> dict[str, str]:
    """The environment of Flower's processes: a private home, no telemetry, no update checks."""
    kept = {
        key: value
        for key, value in os.environ.items()
        if not key.startswith(("FLWR_", "UVICORN_")) and key not in {"FORWARDED_ALLOW_IPS", "WEB_CONCURRENCY"}
    }
    return kept | {
        "FLWR_HOME": str(home),
        "FLWR_TELEMETRY_ENABLED": "0",
        "FLWR_DISABLE_UPDATE_CHECK": "1",
        "RAY_USAGE_STATS_ENABLED": "0",
        "HF_HUB_DISABLE_TELEMETRY": "1",
        "PYTHONUNBUFFERED": "1",
        "FLWR_SUPEREXEC_TASK_POLL_INTERVAL": "3",  # at most; our helper looks often while there is work
        # Flower starts its helpers by name: they must be those of this installation.
        "PATH": f"{Path(sys.executable).parent}{os.pathsep}{os.environ.get('PATH', os.defpath)}",
    }


def gate(which: str, flags: Sequence[str]) -> list[str]:
    """The words that start a SuperLink or a SuperNode behind fedgraft's gate."""
    return [sys.executable, "-m", "fedgraft.deploy.gate", which, *flags]


def spawn(
    arguments: Sequence[str], home: Path, log: Path, bound: bool = False, more: Mapping[str, str] | None = None
) -> subprocess.Popen[bytes]:
    """Start a process in a session of its own, so that Ctrl-C here is not Ctrl-C there, with its words in a log.

    A gate that is `bound` ends by itself when this process is gone, however it ended.
    """
    log.touch(mode=0o600)
    settings = environment(home) | ({_LIVES_WITH: str(os.getpid())} if bound else {}) | dict(more or {})
    with log.open("ab") as file:
        return subprocess.Popen(
            arguments, env=settings, stdin=subprocess.DEVNULL, stdout=file, stderr=file, start_new_session=True
        )


def live_with_parent() -> None:
    """Where `spawn` said so: end this process and all it started as soon as the one that started it is gone."""
    parent = int(os.environ.pop(_LIVES_WITH, "0"))
    if not parent:
        return

    def watch() -> None:
        while os.getppid() == parent:  # an orphan gets another parent at once
            time.sleep(0.5)
        family = _descendants(os.getpid())
        for what, seconds in ((signal.SIGTERM, _PATIENCE / 2), (signal.SIGKILL, _PATIENCE / 5)):
            for one in family:
                _signal(one, what)
            _await(family, seconds)
        os.kill(os.getpid(), signal.SIGTERM)
        time.sleep(_PATIENCE / 2)
        os.kill(os.getpid(), signal.SIGKILL)

    threading.Thread(target=watch, daemon=True).start()


def known(process: subprocess.Popen[bytes]) -> Process:
    """A process we have just started."""
    return Process(process.pid, _began(process.pid) or 0)


def remember(path: Path, server: Server) -> None:
    """Write down a running server."""
    write_text(path, json.dumps(asdict(server)) + "\n")


def recall(path: Path) -> Server | None:
    """The server written down, if it still runs."""
    if not path.is_file():
        return None
    try:
        server = Server(**json.loads(path.read_text()))
    except (ValueError, TypeError):
        raise FedgraftError(f"{path} is damaged; end the server's process yourself and delete this file.") from None
    return server if server.alive else None


def end(process: Process) -> bool:
    """End a process and all it started, politely first; returns whether there was one."""
    if not process.alive:
        return False
    family = [process, *_descendants(process.pid)]
    _signal(process, signal.SIGTERM)
    _await([process], _PATIENCE)
    _await(family, _PATIENCE / 5)
    for one in family:  # what it left behind
        _signal(one, signal.SIGTERM)
    _await(family, _PATIENCE / 2)
    for one in family:
        _signal(one, signal.SIGKILL)
    _await(family, _PATIENCE)
    return True


def free_port(host: str = "127.0.0.1") -> int:
    """A port that the system says is free."""
    with socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET) as probe:
        probe.bind((host, 0))
        return int(probe.getsockname()[1])


def check_port(host: str, port: int) -> None:
    """Refuse an address that cannot be listened on."""
    with socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET) as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((host, port))
        except OSError as error:
            reason = error.strerror or error
            raise FedgraftError(
                f"the server cannot listen on {host}:{port} ({reason}); choose another --port or --bind."
            ) from None


def _signal(process: Process, what: signal.Signals) -> None:
    if process.alive:
        with contextlib.suppress(ProcessLookupError):
            os.kill(process.pid, what)


def _await(family: Sequence[Process], seconds: float) -> None:
    until = time.monotonic() + seconds
    while any(one.alive for one in family) and time.monotonic() < until:
        time.sleep(0.05)


def _began(pid: int) -> int | None:
    """When a process began; None when it is gone (or dead and not yet collected)."""
    found = _seen(pid).get(pid)
    return found[1] if found else None


def _descendants(pid: int) -> list[Process]:
    """Everything a process has started, directly or not."""
    running = _seen()
    found: list[Process] = []
    waiting = [pid]
    while waiting:
        parent = waiting.pop()
        for child, (its_parent, began) in running.items():
            if its_parent == parent:
                found.append(Process(child, began))
                waiting.append(child)
    return found


def _seen(pid: int | None = None) -> dict[int, tuple[int, int]]:
    """Parent and beginning of every process that runs, or of one; from `ps` where there is no /proc."""
    if not (PROC / "self").exists():
        return _listed(pid)
    names = [str(pid)] if pid is not None else [one.name for one in PROC.iterdir() if one.name.isdigit()]
    found = {}
    for name in names:
        with contextlib.suppress(OSError):
            fields = (PROC / name / "stat").read_text().rpartition(")")[2].split()  # the name may hold spaces
            if fields[0] != "Z":
                found[int(name)] = int(fields[1]), int(fields[19])
    return found


def _listed(pid: int | None) -> dict[int, tuple[int, int]]:
    which = ["-ax"] if pid is None else ["-p", str(pid)]
    asked = ["ps", *which, "-o", "pid=,ppid=,stat=,lstart="]
    done = subprocess.run(asked, capture_output=True, text=True, check=False, env=os.environ | {"LC_ALL": "C"})
    lines = [line.split(maxsplit=3) for line in done.stdout.splitlines()]
    when = "%a %b %d %H:%M:%S %Y"
    return {int(a): (int(b), int(time.mktime(time.strptime(t, when)))) for a, b, state, t in lines if state[0] != "Z"}
