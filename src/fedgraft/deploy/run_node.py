"""A data owner's node: one process in the foreground, whose log is translated into messages for its owner."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

from fedgraft.core.errors import FedgraftError
from fedgraft.core.files import make_private_folder
from fedgraft.core.store import write_atomic
from fedgraft.data.site_key import SITE_KEY
from fedgraft.deploy import process as processes
from fedgraft.deploy.control import require_flower
from fedgraft.deploy.door_paths import KEY_IN_USE
from fedgraft.deploy.keys import check_authority, check_private_key
from fedgraft.deploy.node_loop import CONNECTED, FAILED, KEY_IN_USE_SECONDS, UNREACHABLE, WORKING

DATA_SOURCES = ("folder", "parquet", "npz", "table")
_LAST_LINES = 40  # lines of the log in which the reason of an end is looked for


@dataclass(frozen=True)
class NodeOptions:
    """The options of a node: the server's address and certificate, the node's key and number, its images."""

    superlink: str
    """HOST:PORT of the server."""
    authority: Path
    """The certificate that the server must be signed by."""
    key: Path
    client: int
    data: Path | None = None
    source: str | None = None
    """Format of `data`; None: detected."""

    @property
    def home(self) -> Path:
        """Return the node's private folder beside its key: Flower's files, the ledger, the logs."""
        return self.key.absolute().with_suffix(".home")

    @property
    def log(self) -> Path:
        """Return the path of the node process's log."""
        return self.home / "node.log"

    def check(self) -> None:
        """Refuse options that cannot work."""
        require_flower()
        self._check_superlink()
        check_authority(self.authority)
        check_private_key(self.key)
        if self.client < 0:
            raise FedgraftError(
                "E-DEPLOY-NODE-ID",
                f"--id {self.client} is not a client number",
                "use the number, 0 or more, that the coordinator assigned to this node",
                client=self.client,
            )
        self._check_data()

    def _check_superlink(self) -> None:
        """Refuse an address that is not HOST:PORT."""
        host, _, port = self.superlink.rpartition(":")
        if not host or "/" in host or not port.isdigit() or not 0 < int(port) < 65536:
            raise FedgraftError(
                "E-DEPLOY-SUPERLINK",
                f"--superlink {self.superlink!r} is not HOST:PORT",
                "use for example server.example:9000",
                superlink=self.superlink,
            )

    def _check_data(self) -> None:
        """Refuse data that is missing, and a format without data."""
        if self.source is not None and self.source not in DATA_SOURCES:
            raise FedgraftError(
                "E-DEPLOY-SOURCE",
                f"--source {self.source!r} is not a format of a node's data",
                f"use one of {', '.join(DATA_SOURCES)}",
                source=self.source,
            )
        if self.data is None:
            if self.source is not None:
                raise FedgraftError(
                    "E-DEPLOY-SOURCE-WITHOUT-DATA",
                    "--source is the format of --data, which is missing",
                    "add --data PATH",
                    source=self.source,
                )
            return
        if not self.data.exists():
            raise FedgraftError(
                "E-DEPLOY-NO-DATA",
                f"there is no {self.data} on this machine",
                "use --data with the path of this node's own images",
                path=str(self.data),
            )

    def pin_policy(self) -> None:
        """Remember the owner's policy as it is now: while the node runs it may become stricter only."""
        pinned = self.home / processes.PINNED_POLICY
        policy = self.home.parent / "policy.toml"
        if policy.is_file():
            write_atomic(pinned, [policy.read_bytes()], mode=0o600)
        else:
            pinned.unlink(missing_ok=True)

    def command(self) -> list[str]:
        """Return the command that starts the node."""
        command = [sys.executable, "-m", "fedgraft.deploy.node_loop", "--superlink", self.superlink]
        command += ["--ca", str(self.authority.absolute()), "--key", str(self.key.absolute()), "--id", str(self.client)]
        if self.data is not None:
            command += ["--data", str(self.data.absolute())]
        if self.source is not None:
            command += ["--source", self.source]
        return command

    def start(self) -> subprocess.Popen[bytes]:
        """Start the node with its output in the log of its home; it ends with this process."""
        make_private_folder(self.home)
        self.pin_policy()
        variables = {processes.NODE_STATE_VARIABLE: str(self.home)}
        if SITE_KEY not in os.environ:  # beside what else must never leave
            variables[SITE_KEY] = str(self.home / "site.key")
        return processes.spawn(self.command(), self.home, self.log, bound=True, variables=variables)


def run_node(options: NodeOptions, echo: Callable[[str], None]) -> None:
    """Run a node in a child process until it is interrupted; raise the reason if it ends by itself.

    `echo` prints the messages for the owner that its log stands for.
    """
    options.check()
    process = options.start()
    identity = processes.process_id(process)
    lines: deque[str] = deque(maxlen=_LAST_LINES)
    last_message = ""
    try:
        for line in _follow_log(options.log, process):
            lines.append(line)
            message = describe_log_line(line, options)
            if message is not None and message != last_message:
                echo(message)
                last_message = message
    finally:
        processes.end_process(identity)
        process.wait()
    raise node_failure("\n".join(lines), options)


def _follow_log(log: Path, process: subprocess.Popen[bytes]) -> Iterator[str]:
    """Yield the lines that a process appends to its log, until it ends."""
    with log.open(errors="replace") as file:
        file.seek(0, 2)
        file.seek(max(0, file.tell() - 1))
        while True:
            ended = process.poll() is not None  # before reading, so that the last lines are read too
            for line in file:
                yield line.rstrip()
            if ended:
                return
            time.sleep(0.2)


def describe_log_line(line: str, options: NodeOptions) -> str | None:
    """Return the message for the owner that a line of the node's log stands for; None if there is none."""
    if line.startswith(CONNECTED):
        return f"connected to {options.superlink} as client {options.client}; Ctrl-C ends the node"
    if line.strip() == KEY_IN_USE:
        return f"{options.superlink} reports: {KEY_IN_USE}; trying again for up to {KEY_IN_USE_SECONDS:g} s"
    if line.startswith(WORKING):
        return f"working on a request ({line.removeprefix(WORKING).strip().partition('.')[0]})"
    if line.strip() == UNREACHABLE:
        return f"{options.superlink} does not answer; trying again"
    return None


def node_failure(log: str, options: NodeOptions) -> FedgraftError:
    """Return the error that explains why a node ended, from the end of its log."""
    last_line = "no output"
    for line in log.splitlines():
        if line.startswith(FAILED):
            table = json.loads(line.removeprefix(FAILED))
            return FedgraftError(table["code"], table["message"], table["hint"])
        if line.strip():
            last_line = line.strip()
    return FedgraftError(
        "E-DEPLOY-NODE-ENDED", f"the node ended: {last_line}", f"see {options.log}", last_line=last_line
    )
