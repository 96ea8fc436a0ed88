"""Processes of a federation: started with a clean environment, identified by number and start time, ended safely."""

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
_GRACE = 10.0  # seconds that a process has to end by itself
_PARENT_VARIABLE = "FEDGRAFT_LIVES_WITH"  # names the process with which another one ends
NODE_STATE_VARIABLE = "FEDGRAFT_NODE_STATE"
"""Environment variable with the node's home: ledger and audit log are in it, the owner's policy beside it."""
FINISHED_ANSWER = "work/answer"
"""File below a node's home with a finished answer that the server does not have yet (`work_store`)."""
PINNED_POLICY = "policy.pinned"
"""File in a node's home: the owner's policy as it was when the node was started."""
_IGNORED_VARIABLES = ("FORWARDED_ALLOW_IPS", "WEB_CONCURRENCY")
_IGNORED_PREFIXES = ("FLWR_", "UVICORN_")


@dataclass(frozen=True)
class ProcessId:
    """A process by its number and start time: a number alone may have been reused by another process."""

    pid: int
    began: int

    @property
    def alive(self) -> bool:
        """Return whether this very process still runs."""
        return _start_time(self.pid) == self.began


@dataclass(frozen=True)
class ServerProcess(ProcessId):
    """A running front door, the address it listens on, and the port of the SuperLink behind it, on loopback."""

    bind: str
    port: int
    control_port: int = 0

    @property
    def address(self) -> str:
        """Return the address by which nodes of this machine reach it."""
        host = self.bind
        if host == "0.0.0.0":
            host = "127.0.0.1"
        return f"{host}:{self.port}"

    @property
    def control_address(self) -> str:
        """Return the address of the SuperLink's control interface."""
        return f"127.0.0.1:{self.control_port}"


# ---- starting --------------------------------------------------------------------------------------------------------


def flower_environment(home: Path) -> dict[str, str]:
    """Return the environment of Flower's processes: a private home, no telemetry, no update checks."""
    variables = {}
    for name, value in os.environ.items():
        if not name.startswith(_IGNORED_PREFIXES) and name not in _IGNORED_VARIABLES:
            variables[name] = value
    return variables | {
        "FLWR_HOME": str(home),
        "FLWR_TELEMETRY_ENABLED": "0",
        "FLWR_DISABLE_UPDATE_CHECK": "1",
        "RAY_USAGE_STATS_ENABLED": "0",
        "HF_HUB_DISABLE_TELEMETRY": "1",
        "PYTHONUNBUFFERED": "1",
        "FLWR_SUPEREXEC_TASK_POLL_INTERVAL": "1",  # seconds until a submitted run is noticed
        # Flower starts its helpers by name: they must be those of this installation.
        "PATH": f"{Path(sys.executable).parent}{os.pathsep}{os.environ.get('PATH', os.defpath)}",
    }


def guard_command(command: Sequence[str]) -> list[str]:
    """Return the command that runs another one and ends it together with its own parent."""
    return [sys.executable, "-m", "fedgraft.deploy.guard", *command]


def bound_environment(environment: Mapping[str, str]) -> dict[str, str]:
    """Return an environment in which a process that calls `end_with_parent` ends with this one."""
    return {**environment, _PARENT_VARIABLE: str(os.getpid())}


def spawn(
    arguments: Sequence[str],
    home: Path,
    log: Path,
    bound: bool = False,
    variables: Mapping[str, str] | None = None,
) -> subprocess.Popen[bytes]:
    """Start a process whose output is appended to a log, in a session of its own (Ctrl-C here does not reach it).

    Args:
        home: Flower's private folder.
        bound: it ends by itself when this process has ended, for whatever reason.
        variables: further environment variables.
    """
    log.touch(mode=0o600)
    environment = flower_environment(home)
    if bound:
        environment = bound_environment(environment)
    environment.update(variables or {})
    with log.open("ab") as file:
        return subprocess.Popen(
            arguments,
            env=environment,
            stdin=subprocess.DEVNULL,
            stdout=file,
            stderr=file,
            start_new_session=True,
            umask=0o077,  # whatever these processes write is for this user only
        )


def end_with_parent() -> None:
    """If `spawn` bound this process: end it and its descendants as soon as its parent has ended."""
    parent = int(os.environ.pop(_PARENT_VARIABLE, "0"))
    if parent:
        threading.Thread(target=_watch_parent, args=(parent,), daemon=True).start()


def _watch_parent(parent: int) -> None:
    """Wait for the end of the parent; then end this process's descendants, and at last this process."""
    while os.getppid() == parent:  # an orphan gets another parent at once
        time.sleep(0.5)
    descendants = _descendants(os.getpid())
    _signal_all(descendants, signal.SIGTERM)
    _wait_for_end(descendants, _GRACE / 2)
    _signal_all(descendants, signal.SIGKILL)
    _wait_for_end(descendants, _GRACE / 5)
    os.kill(os.getpid(), signal.SIGTERM)
    time.sleep(_GRACE / 2)
    os.kill(os.getpid(), signal.SIGKILL)


def process_id(process: subprocess.Popen[bytes]) -> ProcessId:
    """Return the identity of a process that was just started."""
    return ProcessId(process.pid, _start_time(process.pid) or 0)


# ---- the record of a running server ----------------------------------------------------------------------------------


def write_server_record(path: Path, server: ServerProcess) -> None:
    """Write the record of a running server."""
    write_text(path, json.dumps(asdict(server)) + "\n")


def read_server_record(path: Path) -> ServerProcess | None:
    """Return the server of a record; None if it no longer runs."""
    if not path.is_file():
        return None
    try:
        server = ServerProcess(**json.loads(path.read_text()))
    except (ValueError, TypeError):
        raise FedgraftError(
            "E-DEPLOY-SERVER-RECORD",
            f"{path} is damaged",
            "end the server's process yourself and delete this file",
            path=str(path),
        ) from None
    if not server.alive:
        return None
    return server


# ---- ending ----------------------------------------------------------------------------------------------------------


def end_process(process: ProcessId) -> bool:
    """End a process and its descendants, with SIGTERM before SIGKILL; return whether it was running."""
    if not process.alive:
        return False
    family = [process, *_descendants(process.pid)]
    _signal_all([process], signal.SIGTERM)
    _wait_for_end([process], _GRACE)
    _wait_for_end(family, _GRACE / 5)
    _signal_all(family, signal.SIGTERM)  # descendants that it left behind
    _wait_for_end(family, _GRACE / 2)
    _signal_all(family, signal.SIGKILL)
    _wait_for_end(family, _GRACE)
    return True


def _signal_all(processes: Sequence[ProcessId], number: signal.Signals) -> None:
    """Send a signal to those processes that still run."""
    for process in processes:
        if process.alive:
            with contextlib.suppress(ProcessLookupError):
                os.kill(process.pid, number)


def _wait_for_end(processes: Sequence[ProcessId], seconds: float) -> None:
    """Wait until all of these processes have ended, at most this long."""
    deadline = time.monotonic() + seconds
    while any(process.alive for process in processes) and time.monotonic() < deadline:
        time.sleep(0.05)


# ---- ports -----------------------------------------------------------------------------------------------------------


def free_port(host: str = "127.0.0.1") -> int:
    """Return a port that is free now."""
    with _tcp_socket(host) as probe:
        probe.bind((host, 0))
        return int(probe.getsockname()[1])


def check_port(host: str, port: int) -> None:
    """Refuse an address that cannot be listened on."""
    with _tcp_socket(host) as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((host, port))
        except OSError as error:
            raise FedgraftError(
                "E-DEPLOY-PORT",
                f"the server cannot listen on {host}:{port} ({error.strerror or error})",
                "choose another --port or --bind",
                host=host,
                port=port,
            ) from None


def _tcp_socket(host: str) -> socket.socket:
    """Return a TCP socket of the host's address family."""
    if ":" in host:
        return socket.socket(socket.AF_INET6)
    return socket.socket(socket.AF_INET)


# ---- the table of processes ------------------------------------------------------------------------------------------


def _start_time(pid: int) -> int | None:
    """Return when a process began; None if it has ended (also if its parent has not yet collected it)."""
    entry = _process_table(pid).get(pid)
    if entry is None:
        return None
    return entry[1]


def _descendants(pid: int) -> list[ProcessId]:
    """Return all processes that a process has started, directly or indirectly."""
    table = _process_table()
    descendants: list[ProcessId] = []
    parents = [pid]
    while parents:
        parent = parents.pop()
        for child, (parent_of_child, began) in table.items():
            if parent_of_child == parent:
                descendants.append(ProcessId(child, began))
                parents.append(child)
    return descendants


def _process_table(pid: int | None = None) -> dict[int, tuple[int, int]]:
    """Return (parent, start time) of every running process by its number, or of one; zombies are left out.

    It comes from /proc, or from `ps` where that does not exist.
    """
    if not (PROC / "self").exists():
        return _process_table_from_ps(pid)
    if pid is not None:
        names = [str(pid)]
    else:
        names = [entry.name for entry in PROC.iterdir() if entry.name.isdigit()]
    table = {}
    for name in names:
        with contextlib.suppress(OSError):
            fields = (PROC / name / "stat").read_text().rpartition(")")[2].split()  # the name may contain spaces
            if fields[0] != "Z":
                table[int(name)] = int(fields[1]), int(fields[19])
    return table


def _process_table_from_ps(pid: int | None) -> dict[int, tuple[int, int]]:
    """Return the table of `_process_table` from the output of `ps`."""
    selection = ["-ax"]
    if pid is not None:
        selection = ["-p", str(pid)]
    command = ["ps", *selection, "-o", "pid=,ppid=,stat=,lstart="]
    result = subprocess.run(command, capture_output=True, text=True, check=False, env=os.environ | {"LC_ALL": "C"})
    table = {}
    for line in result.stdout.splitlines():
        number, parent, state, start = line.split(maxsplit=3)
        if state[0] != "Z":
            seconds = time.mktime(time.strptime(start, "%a %b %d %H:%M:%S %Y"))
            table[int(number)] = int(parent), int(seconds)
    return table
