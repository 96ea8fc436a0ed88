"""A node: one SuperNode process in the foreground, and its words turned into sentences."""

from __future__ import annotations

import json
import subprocess
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

from fedgraft.core.errors import FedgraftError
from fedgraft.deploy import process as processes
from fedgraft.deploy.control import require_flower
from fedgraft.deploy.gate import IN_USE, IN_USE_SECONDS
from fedgraft.deploy.keys import check_authority, check_private_key

SOURCES = ("folder", "parquet", "npz")


@dataclass(frozen=True)
class NodeChoice:
    """What a node needs to know: where the server is, how to trust it, who it is, where its images are."""

    superlink: str
    authority: Path
    key: Path
    client: int
    data: Path | None = None
    source: str | None = None

    @property
    def home(self) -> Path:
        """The node's private folder, beside its key: Flower's files and the log."""
        return self.key.absolute().with_suffix(".home")

    def check(self) -> None:
        """Refuse what cannot work, with one sentence."""
        require_flower()
        host, _, port = self.superlink.rpartition(":")
        if not host or "/" in host or not port.isdigit() or not 0 < int(port) < 65536:
            raise FedgraftError(f"--superlink is HOST:PORT, as server.example:9000, not {self.superlink!r}.")
        check_authority(self.authority)
        check_private_key(self.key)
        if self.client < 0:
            raise FedgraftError(f"--id is this node's client number, 0 or more, not {self.client}.")
        if self.source is not None and self.source not in SOURCES:
            raise FedgraftError(f"--source is one of {', '.join(SOURCES)}, not {self.source!r}.")
        if self.source is not None and self.data is None:
            raise FedgraftError("--source says what --data is; give --data PATH as well.")
        if self.data is not None and not self.data.exists():
            raise FedgraftError(f"there is no {self.data} on this machine; --data names this node's own images.")
        if self.data is not None and any(mark in str(self.data.absolute()) for mark in "\"'\\"):
            raise FedgraftError(
                f"Flower cannot pass on the path {self.data} with its quotes or backslashes; rename it."
            )

    def arguments(self) -> list[str]:
        """The command that starts the node."""
        settings = [f"partition-id={self.client}"]
        settings += (
            [f"data={json.dumps(str(self.data.absolute()), ensure_ascii=False)}"] if self.data is not None else []
        )
        settings += [f'source="{self.source}"'] if self.source is not None else []
        return processes.gate(
            "supernode",
            [
                "--superlink",
                self.superlink,
                "--root-certificates",
                str(self.authority.absolute()),
                "--auth-supernode-private-key",
                str(self.key.absolute()),
                "--node-config",
                " ".join(settings),
                "--host",
                "127.0.0.1",
                "--port",
                str(processes.free_port()),
            ],
        )

    def start(self) -> subprocess.Popen[bytes]:
        """Start the node, its words in the log of its home; it ends with this process."""
        self.home.mkdir(mode=0o700, exist_ok=True)
        keeps = {processes.KEEPS: str(self.home)}
        return processes.spawn(self.arguments(), self.home, self.home / "node.log", bound=True, more=keeps)


def run_node(choice: NodeChoice, say: Callable[[str], None]) -> None:
    """Run a node until it is interrupted; a node that the server refuses ends with the reason."""
    choice.check()
    process = choice.start()
    known, said = processes.known(process), ""
    seen: list[str] = []
    try:
        for line in _lines(choice.home / "node.log", process):
            seen.append(line)
            if (text := tell(line, choice)) is not None and text != said:
                say(text)
                said = text
    finally:
        processes.end(known)
        process.wait()
    raise FedgraftError(why_ended("\n".join(seen[-40:]), choice))


def _lines(log: Path, process: subprocess.Popen[bytes]) -> Iterator[str]:
    """The lines a process adds to its log, until it ends."""
    import time

    with log.open(errors="replace") as file:
        file.seek(0, 2)
        file.seek(max(0, file.tell() - 1))
        while True:
            over = process.poll() is not None  # asked before reading, so that the last words are read too
            for line in file:
                yield line.rstrip()
            if over:
                return
            time.sleep(0.2)


def tell(line: str, choice: NodeChoice) -> str | None:
    """What a line of the node's log means to a person, or None."""
    if "SuperNode ID:" in line:
        return f"connected to {choice.superlink} as client {choice.client}; Ctrl-C ends the node"
    if line.strip() == IN_USE:
        return f"{choice.superlink} says: {IN_USE}; trying again for up to {IN_USE_SECONDS:g} s"
    if "Receiving:" in line:
        return f"working on a {line.partition('Receiving: ')[2].partition(' message')[0]} order"
    if "FAB verification failed" in line:
        return "refused an app that is not this installation's fedgraft; both sides need the same version"
    if "Connection attempt failed" in line or "Connection refused" in line:
        return f"{choice.superlink} does not answer; trying again"
    return None


def why_ended(log: str, choice: NodeChoice) -> str:
    """Why a node ended, in one sentence, from the end of its log."""
    where = choice.superlink
    if "mismatch" in log and "CERTIFICATE_VERIFY_FAILED" in log:
        host = where.rpartition(":")[0]
        return f"the server's certificate is not for {host!r}; use the host that the coordinator gave to `deploy init`."
    if "CERTIFICATE_VERIFY_FAILED" in log:
        return (
            f"the server at {where} was not certified by {choice.authority}; ask the coordinator for the right ca.crt."
        )
    if IN_USE in log.rpartition("SuperNode ID:")[2] and "[code: 2004]" in log:
        return f"another process uses the key {choice.key} at {where}; end that one, or make a key for this node."
    if "[code: 2001]" in log or "[code: 2004]" in log or "Invalid SuperNode authentication" in log or "401" in log:
        return (
            f"the server at {where} refused the key {choice.key}: it is not registered; "
            f"the coordinator registers it with: fedgraft deploy register FED NAME {choice.key.stem}.pub."
        )
    if "WRONG_VERSION_NUMBER" in log or "SSL/TLS handshake error" in log:
        return f"the server at {where} does not speak TLS; check the address."
    last = [line for line in log.splitlines() if line.strip() and not line.startswith("INFO")]
    return f"the node ended: {last[-1].strip() if last else 'it said nothing'} (see {choice.home / 'node.log'})."
